"""Read-ahead on a GPU: tokens, states and generators of a plain loop, from the captured kernels."""

from dataclasses import asdict
from typing import Any

import pytest
import torch

from longspan.contract import LanguageModel
from longspan.decoding import samplers, written_tokens
from longspan.decoding.fused import FusedDecoder
from longspan.decoding.persistent import PersistentDecoder
from longspan.decoding.sampling import Sampling
from longspan.decoding.session import Session
from longspan.decoding.written_tokens import AheadTokens
from longspan.kernels.sampling import Places, choose_tokens
from tests.models.paper import PAPER
from tests.support import build

pytestmark = pytest.mark.gpu
SHAPE = {"vocabulary": 61, "layers": 2, "width": 32, "heads": 2, "inner": 48, "segment": 8, "memory": 12}
MODELS: dict[str, tuple[str, dict[str, Any], type]] = {
    "persistent": ("transformer-xl", {}, PersistentDecoder),
    "fused": ("longspan-xl", PAPER | {"same_length": True, "convolution": 2}, FusedDecoder),
}
SETTINGS = [Sampling(temperature=0.9), Sampling(top_k=20, top_p=0.9, frequency_penalty=0.5), Sampling(temperature=0)]
COUNT = 30


def make(name: str) -> LanguageModel:
    family, values, _ = MODELS[name]
    torch.manual_seed(4)
    model = build(family, SHAPE | values).cuda().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    return model


def start(model: LanguageModel) -> Session:
    session = Session(model, seed=11)
    session.read([1, 2, 3])
    return session


@pytest.mark.parametrize("sampling", SETTINGS)
@pytest.mark.parametrize("name", MODELS)
def test_tokens_and_states_are_those_of_a_plain_loop(
    name: str, sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make(name)
    monkeypatch.setattr(written_tokens, "READ_AHEAD", False)
    plain = start(model)
    expected, states = [], [plain.decoder.state()]
    for token in plain.write(COUNT, sampling):
        expected.append(token)
        states.append(plain.decoder.state())
    monkeypatch.setattr(written_tokens, "READ_AHEAD", True)
    for stop in (1, 2, 7, 13, 14, COUNT):
        session, found = start(model), []
        for token in session.write(COUNT, sampling):
            found.append(token)
            if len(found) == stop:
                break
        assert isinstance(session._writing, AheadTokens)
        assert type(session._decoder.decoder) is MODELS[name][2]  # type: ignore[attr-defined]
        assert found == expected[:stop]
        assert session.generator.get_offset() == (0 if sampling.greedy else 4 * stop)
        for key, tensor in states[stop].tensors().items():
            other = session.decoder.state().tensors()[key]
            if name == "fused" and tensor.dim() == 4:  # the oldest position of a sliding window may be lost
                tensor, other = tensor[:, :, 1:], other[:, :, 1:]
            assert torch.equal(tensor, other), key
        if not sampling.penalises:
            assert list(session.write(COUNT - stop, sampling)) == expected[stop:]


@pytest.mark.parametrize("zero_copy", [True, False])
def test_a_fork_between_tokens_changes_none(zero_copy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samplers, "ZERO_COPY", zero_copy)
    model = make("persistent")
    whole = list(start(model).write(COUNT, SETTINGS[0]))
    session, found = start(model), []
    for token in session.write(COUNT, SETTINGS[0]):
        found.append(token)
        if len(found) in (3, 4, 20):
            assert list(session.fork().write(5, SETTINGS[0])) == whole[len(found) : len(found) + 5]
    assert found == whole


def test_random_numbers_are_those_of_torch() -> None:
    """For a seed, tokens are the same as with `torch.rand`, so also as before the kernel drew them."""
    settings, rows = Sampling(temperature=1.5), 300
    logits = torch.randn(6, rows, 61, device="cuda")
    generator = torch.Generator("cuda").manual_seed(5)
    generator.set_offset(12)
    random = torch.tensor([[5, 3, 0]] * rows, device="cuda")
    places = Places(torch.zeros(rows, dtype=torch.int64, device="cuda"), random)
    for one in logits:
        expected = settings.choose(one, generator)
        assert torch.equal(choose_tokens(one, places=places, **asdict(settings)), expected)
    assert generator.get_offset() == 12 + 4 * len(logits)
