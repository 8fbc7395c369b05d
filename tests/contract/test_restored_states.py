"""Restored states: a state that the model could have produced is accepted and converted; any other is a StateError."""

import copy
from collections.abc import Iterator

import pytest
import torch

from longspan.checkpoints.states import restore_state
from longspan.contract import LanguageModel, State
from longspan.decoding import open_decoder
from longspan.errors import StateError
from longspan.shapes import Tensor
from tests.contract.conftest import MakeModel, stream
from tests.contract.test_contract import FORMS, begin

# One of each kind of state.
KINDS = ["plain", "convolution", "pointer", "rotary", "lstm", "qrnn", "adaptive-span", "longformer-memory"]
KINDS += ["compressive-mean", "sinusoid", "longformer", "memory-0"]


@torch.no_grad()
def states_of(model: LanguageModel) -> list[State]:
    """A state in each form of cache, one with a row that has just started, and the state of a decoder."""
    tokens, _ = stream(2, 20)
    states = [model(tokens, begin(model, 2, form))[1] for form in FORMS]
    decoder = open_decoder(model, batch=2)
    decoder.prefill(tokens)
    return [states[0], states[1].reset(torch.tensor([True, False])), decoder.state()]


@pytest.mark.parametrize("name", KINDS)
@torch.no_grad()
def test_a_state_of_the_model_is_accepted_and_another_dtype_is_converted(make: MakeModel, name: str) -> None:
    model, (tokens, _) = make(name, torch.float32), stream(2, 8, seed=2)
    wide = copy.deepcopy(model).double()

    def close(a: Tensor, b: Tensor) -> None:
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)

    for state, mine in zip(states_of(wide), states_of(model), strict=True):
        own, restored = (restore_state(model, one.tensors(), one.reading) for one in (mine, state))
        for key, tensor in mine.tensors().items():
            assert torch.equal(own.tensors()[key], tensor)
            assert restored.tensors()[key].dtype == tensor.dtype
        close(model(tokens, restored)[0], model(tokens, mine)[0])
        close(open_decoder(model, restored).step(tokens[:, 0]), open_decoder(model, mine).step(tokens[:, 0]))


def altered_tensors(tensor: Tensor) -> Iterator[Tensor]:
    yield from (tensor[..., None], tensor[0], torch.zeros(()), tensor.to(torch.int32), tensor.to(torch.complex64))
    yield from (tensor.bool(), tensor + 10**6, tensor - 10**6, torch.zeros_like(tensor) - 1)
    if tensor.is_floating_point():
        yield from (tensor * torch.nan, tensor + torch.inf)
    for axis in range(tensor.dim()):
        size = tensor.shape[axis]
        yield torch.cat([tensor, tensor], axis)
        yield tensor.narrow(axis, 0, max(size - 1, 0))
        yield tensor.narrow(axis, 0, 0)
        if size:
            yield torch.cat([tensor, tensor.narrow(axis, 0, 1)], axis)


def altered(flat: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """The tensors of a state with one error, or with a harmless change."""
    for name in [name for name in flat if name == "length" or name.startswith("1.")] or flat:
        rest = {key: value for key, value in flat.items() if key != name}
        yield rest
        yield from ({**flat, name: other} for other in altered_tensors(flat[name]))
    for other in ("length_", "length.0", "x.hidden", "00.hidden", "7.hidden", "0.strange", ".0"):
        yield flat | {other: flat["length"]}
    yield {"length": flat["length"]}


@pytest.mark.parametrize("name", KINDS)
@torch.no_grad()
def test_an_altered_state_is_refused_or_gives_finite_logits(make: MakeModel, name: str) -> None:
    model, (tokens, _) = make(name), stream(4, 3, seed=2)
    full, _, decoding = states_of(model)
    refused = tried = 0
    for state in (full, decoding):
        for flat in altered(state.tensors()):
            tried += 1
            try:
                restored = restore_state(model, flat, state.reading)
            except StateError:
                refused += 1
                continue
            logits = model(tokens[: restored.batch], restored)[0]
            step = open_decoder(model, restored).step(tokens[: restored.batch, 0])
            assert bool(logits.isfinite().all() and step.isfinite().all())
    assert refused > tried * 0.6
