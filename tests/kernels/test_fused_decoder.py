"""FusedDecoder (Triton one-token kernels) equals the generic RollingDecoder, step by step.

Without a GPU the kernels run in Triton's interpreter (conftest.py).
"""

from typing import Any

import pytest
import torch

from longspan.contract import LanguageModel
from longspan.decoding.fused import FusedDecoder
from longspan.decoding.ring import FusedRingDecoder, RingDecoder
from longspan.decoding.rolling import RollingDecoder
from longspan.decoding.step_layers import step_layers
from tests.models.paper import PAPER
from tests.support import build

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPE = {"vocabulary": 19, "layers": 2, "width": 24, "heads": 2, "head_width": 10, "inner": 40, "segment": 8}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "paper": ("transformer-xl", {"memory": 6}),
    "same-length-clamp": ("transformer-xl", {"memory": 5, "same_length": True, "clamp": 2, "norm": "pre"}),
    "longspan": ("longspan-xl", {"memory": 6}),
    "one-layer": ("longspan-xl", PAPER | {"memory": 6, "layers": 1, "convolution": 2}),
}


def make_model(name: str) -> LanguageModel:
    family, values = MODELS[name]
    torch.manual_seed(5)
    model = build(family, SHAPE | values).to(DEVICE).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    return model


def open_both(model: LanguageModel, rows: int) -> tuple[FusedDecoder, RollingDecoder]:
    state = model.initial_state(rows, trainable=False)
    layers = step_layers(model, state)
    assert layers is not None
    return FusedDecoder(model, state, layers, 0), RollingDecoder(model, state, layers, 0)


def assert_equal_steps(fused: FusedDecoder, rolling: RollingDecoder, rows: int, steps: int) -> None:
    bound = 1e-4 if DEVICE == "cuda" else 1e-5
    for _ in range(steps):
        tokens = torch.randint(19, (rows,), device=DEVICE)
        expected, found = rolling.step(tokens), fused.step(tokens)
        assert (found - expected).abs().max() / expected.abs().max() < bound
    assert int(fused.count) == fused.written == rolling.written
    found_state, expected_state = fused.state(), rolling.state()
    for name, tensor in expected_state.tensors().items():
        torch.testing.assert_close(found_state.tensors()[name], tensor, rtol=0, atol=bound)


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("paper", 1),
        pytest.param("same-length-clamp", 1, marks=pytest.mark.torture),
        pytest.param("longspan", 2, marks=pytest.mark.torture),
    ],
)
def test_steps_and_states_are_those_of_the_rolling_decoder(name: str, rows: int) -> None:
    """From an empty cache past the point where it wraps around, and again after a prompt."""
    fused, rolling = open_both(make_model(name), rows)
    assert_equal_steps(fused, rolling, rows, 9)
    prompt = torch.randint(19, (rows, 4), device=DEVICE)
    fused.prefill(prompt)
    rolling.prefill(prompt)
    assert_equal_steps(fused, rolling, rows, 3)


@pytest.mark.torture
def test_a_step_that_is_undone_leaves_the_state_before_it() -> None:
    """With a full cache: the next step gives what it gives without the one that was undone."""
    fused, rolling = open_both(make_model("one-layer"), 1)
    prompt = torch.randint(19, (1, 9), device=DEVICE)
    for decoder in (fused, rolling):
        decoder.prefill(prompt)
        before = decoder.state().tensors()
        first = decoder.step(torch.tensor([7], device=DEVICE)).clone()
        decoder.undo()
        for name, tensor in decoder.state().tensors().items():
            assert torch.equal(tensor, before[name])
        assert torch.equal(decoder.step(torch.tensor([7], device=DEVICE)), first)
    assert int(fused.count) == fused.written


def test_a_step_repeated_after_its_buffers_are_restored_gives_the_same_logits() -> None:
    """A CUDA graph is captured this way: the warm-up runs the step, then `buffers` are put back."""
    model = make_model("longspan")
    fused, rolling = open_both(model, 1)
    assert_equal_steps(fused, rolling, 1, 3)
    token, saved = torch.tensor([7], device=DEVICE), [buffer.clone() for buffer in fused.buffers()]
    first = fused.launch(token).clone()
    for buffer, before in zip(fused.buffers(), saved, strict=True):
        buffer.copy_(before)
    torch.testing.assert_close(fused.launch(token), first, rtol=0, atol=0)
    fused.advance()
    rolling.step(token)
    assert_equal_steps(fused, rolling, 1, 2)


def test_the_fused_decoder_needs_cuda() -> None:
    model = make_model("paper")
    layers = step_layers(model, model.initial_state(1, trainable=False))
    assert layers is not None
    assert FusedDecoder.supports(model, layers) is torch.cuda.is_available()


@pytest.mark.parametrize("name", ["longspan", *(pytest.param(n, marks=pytest.mark.torture) for n in list(MODELS)[:2])])
def test_rows_of_different_lengths(name: str) -> None:
    """Streams of 0, 4 and 11 tokens in the second to fourth of four rows: equal to the plain ring, before and after the
    cache of 5 to 7 slots wraps."""
    model = make_model(name)
    empty = model.initial_state(4, trainable=False)
    layers = step_layers(model, empty)
    assert layers is not None
    fused, plain = FusedRingDecoder(model, empty, layers), RingDecoder(model, empty, layers)
    plain.used = 4
    for row, length in ((1, 0), (2, 4), (3, 11)):
        state = model.initial_state(1, trainable=False)
        for token in range(length):
            _, state = model(torch.tensor([[token % 19]], device=DEVICE), state)
        for decoder in (fused, plain):
            decoder.load_row(row, state, length)
    for step in range(2):
        tokens = torch.tensor([1, 2 + step, 3, 4], device=DEVICE)
        expected, found = plain.step(tokens), fused.step(tokens)
        assert (found - expected)[1:].abs().max() / expected.abs().max() < (1e-4 if DEVICE == "cuda" else 1e-5)
    assert fused.count.tolist()[1:] == fused.read[1:] == plain.read[1:] == [2, 6, 13]
    for row in (1, 2, 3):
        for one, other in zip(
            fused.row_state(row).tensors().values(), plain.row_state(row).tensors().values(), strict=True
        ):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-4)
