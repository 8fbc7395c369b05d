"""An exported step in onnxruntime gives the text of longspan."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from longspan.errors import CheckpointError, ConfigError
from longspan.text_model import TextModel, load
from longspan.tokenizers import ByteTokenizer
from tests.contract.conftest import WITH_MEMORY, make_model
from tests.support import build

pytest.importorskip("onnx")
onnxruntime: Any = pytest.importorskip("onnxruntime")

from longspan.interop.onnx import OnnxModel, Step, export_onnx, write_step  # noqa: E402

SIZES = {"vocabulary": 256, "layers": 1, "width": 32, "dropout": 0.0}
SENTENCE = b"the quick brown fox jumps over a lazy dog.\n"
FAMILIES: dict[str, dict[str, Any]] = {
    "longspan-xl": {"heads": 2, "memory": 24, "same_length": True},
    "lstm": {},
}


@pytest.fixture(autouse=True)
def _sizes_are_tensors() -> Iterator[None]:
    """The exporter traces sizes as tensors, which the checker of annotations does not accept."""
    jaxtyping = pytest.importorskip("jaxtyping")
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def trained(family: str) -> TextModel:
    """A model that has learned a sentence. With random weights, rounding decides some of the tokens."""
    torch.manual_seed(5)
    model = build(family, SIZES | FAMILIES[family]).train()
    ids = torch.frombuffer(bytearray(SENTENCE * 3), dtype=torch.uint8).long()[None]
    optimizer = torch.optim.Adam(model.parameters(), 0.03)
    for _ in range(30 if family == "longspan-xl" else 100):
        model.training_loss(ids[:, :-1], ids[:, 1:])[0].backward()
        optimizer.step()
        optimizer.zero_grad()
    return TextModel(model, ByteTokenizer())


@pytest.mark.parametrize(("family", "count"), [("longspan-xl", 200), ("lstm", 600)])
def test_greedy_tokens_are_equal(family: str, count: int, tmp_path: Path) -> None:
    ours = trained(family)
    ours.save(tmp_path / "ours")
    export_onnx(tmp_path / "ours", tmp_path / "onnx")
    theirs = bytes(islice(OnnxModel(tmp_path / "onnx", threads=1).tokens("the quick"), count))
    assert theirs.decode("utf-8", "replace") == ours.generate("the quick", count, temperature=0)
    assert len(set(theirs)) > 4, "the text is not constant"


@pytest.mark.torture
def test_the_bundled_model_generates_the_same_text(tmp_path: Path) -> None:
    export_onnx(None, tmp_path / "onnx")
    prompt = "It was late in the evening when"
    assert OnnxModel(tmp_path / "onnx").generate(prompt, 2000) == load(device="cpu", int8=False).generate(
        prompt, 2000, temperature=0
    )


@pytest.mark.parametrize("name", ["same-length-clamp", "adaptive", "pointer", "rotary", "qrnn"])
def test_a_step_equals_the_model(name: str, tmp_path: Path) -> None:
    """Logits and every tensor of the state, from an empty state on."""
    assert name in WITH_MEMORY
    model = make_model(name, torch.float32)
    step: Step = write_step(model, tmp_path / "step.onnx", batch=2)
    session = onnxruntime.InferenceSession(str(tmp_path / "step.onnx"))
    inputs = {each.name for each in session.get_inputs()}
    state = tuple(step.empty.tensors().values())
    for tokens in torch.randint(23, (6, 2, 1), generator=torch.Generator().manual_seed(3)):
        feed = {"tokens": tokens.numpy()} | {n: t.numpy() for n, t in zip(step.names, state, strict=True)}
        found = session.run(None, {name: value for name, value in feed.items() if name in inputs})
        with torch.no_grad():
            logits, *state = step(tokens, *state)
        for a, b in zip(found, (logits, *state), strict=True):
            np.testing.assert_allclose(a, b.numpy(), rtol=0, atol=2e-5)


def test_what_cannot_be_exported_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="vanilla has no memory"):
        write_step(make_model("sinusoid", torch.float32), tmp_path / "step.onnx")
    with pytest.raises(CheckpointError, match="nowhere"):
        OnnxModel(tmp_path / "nowhere")
