"""States from elsewhere: one that the model could have made is taken, in its own types; any other is a StateError."""

import copy
from collections.abc import Iterator

import pytest
import torch

from longspan.contract import LanguageModel, State
from longspan.errors import StateError
from longspan.shapes import Tensor
from tests.contract.conftest import MakeModel, stream
from tests.contract.test_contract import FORMS, begin

# One of each kind of state.
KINDS = ["plain", "convolution", "copying", "rotary", "lstm", "qrnn", "adaptive-span", "longformer-memory"]
KINDS += ["compressive-mean", "sinusoid", "longformer", "memory-0"]


@torch.no_grad()
def states_of(model: LanguageModel) -> list[State]:
    """In both forms, one of them with a row that has just begun, and that of a decoder."""
    tokens, _ = stream(2, 20)
    states = [model(tokens, begin(model, 2, form))[1] for form in FORMS]
    decoder = model.decoder(batch=2)
    decoder.read(tokens)
    return [states[0], states[1].reset(torch.tensor([True, False])), decoder.state()]


@pytest.mark.parametrize("name", KINDS)
@torch.no_grad()
def test_a_state_of_its_own_is_admitted_and_one_of_another_type_converted(make: MakeModel, name: str) -> None:
    model, (tokens, _) = make(name, torch.float32), stream(2, 8, seed=2)
    wide = copy.deepcopy(model).double()

    def close(a: Tensor, b: Tensor) -> None:
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)

    for state, mine in zip(states_of(wide), states_of(model), strict=True):
        own, admitted = model.admit(mine), model.admit(state)
        assert own.whole == mine.whole
        for key, tensor in mine.tensors().items():
            assert torch.equal(own.tensors()[key], tensor)
            assert admitted.tensors()[key].dtype == tensor.dtype
        close(model(tokens, admitted)[0], model(tokens, mine)[0])
        # A decoder converts what it is handed, admitted or not.
        close(model.decoder(state).step(tokens[:, 0]), model.decoder(mine).step(tokens[:, 0]))


def forged_tensors(tensor: Tensor) -> Iterator[Tensor]:
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


def forged(flat: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """A state's tensors with one thing wrong, or changed in a way that does no harm."""
    for name in [name for name in flat if name == "length" or name.endswith(".1")] or flat:
        rest = {key: value for key, value in flat.items() if key != name}
        yield rest
        yield from ({**flat, name: other} for other in forged_tensors(flat[name]))
    for other in ("length_", "length.0", "hidden.x", "hidden.00", "hidden.²", "hidden.7", "strange.0", ".0"):
        yield flat | {other: flat["length"]}
    yield {"length": flat["length"]}


@pytest.mark.parametrize("name", KINDS)
@torch.no_grad()
def test_a_forged_state_is_refused_or_read(make: MakeModel, name: str) -> None:
    model, (tokens, _) = make(name), stream(4, 3, seed=2)
    full, _, decoding = states_of(model)
    refused = tried = 0
    for state in (full, decoding):
        for flat in forged(state.tensors()):
            tried += 1
            try:
                admitted = model.admit(State.from_tensors(flat))
            except StateError:
                refused += 1
                continue
            logits = model(tokens[: admitted.batch], admitted)[0]
            step = model.decoder(admitted).step(tokens[: admitted.batch, 0])
            assert bool(logits.isfinite().all() and step.isfinite().all())
    assert refused > tried * 0.6
