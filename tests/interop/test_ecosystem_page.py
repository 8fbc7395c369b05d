"""The Python of docs/ecosystem.md runs as it is printed."""

import os
import re
from pathlib import Path

import pytest

from longspan.bundled import is_installed

PAGE = (Path(__file__).parents[2] / "docs" / "ecosystem.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.torture
@pytest.mark.skipif(not is_installed(), reason="no bundled model")
def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    hf = pytest.importorskip("longspan.hf", exc_type=Exception)
    jaxtyping = pytest.importorskip("jaxtyping")
    for package in ("accelerate", "onnx", "onnxruntime"):
        pytest.importorskip(package)
    from longspan.interop.onnx import export_onnx

    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(os.environ, "ACCELERATE_USE_CPU", "true")
    hf.export_hf(None, "novels-hf", reading={"memory": 64, "clamp": 63})
    # The exporter traces sizes as tensors, which the checker of annotations does not accept.
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        export_onnx(None, "novels-onnx", reading={"memory": 64, "clamp": 63})
        assert len(EXAMPLES) == 3
        for example in EXAMPLES:
            exec(compile(example, "docs/ecosystem.md", "exec"), {})
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)
    assert "It was late" in capsys.readouterr().out
    assert (tmp_path / "trained" / "model.safetensors").is_file()
