"""Without a GPU, Triton kernels run in its interpreter (TRITON_INTERPRET=1, set before Triton is imported)."""

import importlib
import importlib.util
import sys
from typing import Any

import pytest
import torch

KERNELS = (
    "longspan.kernels.bidirectional_attention.kernels",
    "longspan.kernels.relative_attention.fused_backward",
    "longspan.kernels.relative_attention.stored_backward",
    "longspan.kernels.relative_attention.last_sum_kernels",
    "longspan.kernels.relative_attention.split_kernels",
    "longspan.kernels.one_token.kernels",
    "longspan.kernels.one_token.split_kernel",
    "longspan.kernels.head_norm.kernels",
    "longspan.kernels.muon.kernels",
    "longspan.kernels.rms_update.kernels",
    "longspan.kernels.cluster_losses.kernels",
    "longspan.kernels.one_token.persistent_kernel",
    "longspan.kernels.sampling.kernel",
)

if importlib.util.find_spec("triton") is not None:
    # Triton parses the source of a kernel, which the wrapper of the shape checker hides. So kernels are imported
    # without it.
    hooks = [finder for finder in sys.meta_path if type(finder).__module__.startswith("jaxtyping")]
    for hook in hooks:
        sys.meta_path.remove(hook)
    for module in KERNELS:
        importlib.import_module(module)
    for hook in hooks:
        sys.meta_path.insert(0, hook)


@pytest.fixture(autouse=True)
def _interpreter_with_numpy_2_4(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter of Triton 3.6 calls int() on one-element arrays for loop bounds, which NumPy 2.4 refuses."""
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if torch.cuda.is_available() or interpreter is None:
        return
    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
