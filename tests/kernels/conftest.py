"""Triton kernels without a GPU: they run in its interpreter (TRITON_INTERPRET=1, set before Triton loads)."""

import importlib
import importlib.util
import sys
from typing import Any

import pytest
import torch

KERNELS = ("longspan.kernels.relative_attention.fused_backward", "longspan.kernels.one_token.kernels")

if importlib.util.find_spec("triton") is not None:
    # Triton reads a kernel's source and cannot see through the wrapper that checks shapes elsewhere.
    hooks = [finder for finder in sys.meta_path if type(finder).__module__.startswith("jaxtyping")]
    for hook in hooks:
        sys.meta_path.remove(hook)
    for module in KERNELS:
        importlib.import_module(module)
    for hook in hooks:
        sys.meta_path.insert(0, hook)


@pytest.fixture(autouse=True)
def _interpreter_meets_new_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.6's interpreter turns one-element arrays into loop bounds by int(), which NumPy 2.4 refuses."""
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if torch.cuda.is_available() or interpreter is None:
        return
    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
