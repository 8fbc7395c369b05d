"""Streams in a batch of slots: equal to the decoder of the family, and bit-equal with and without other streams."""

import random
from dataclasses import replace

import pytest
import torch

from longspan.checkpoints.states import decode_state, encode_state
from longspan.config import keys
from longspan.contract import LanguageModel
from longspan.decoding.open import open_decoder
from longspan.decoding.ring import FusedRingDecoder
from longspan.decoding.slots import (
    RingSlots,
    RowSlots,
    Slots,
    StateSlots,
    Stream,
    WindowSlots,
    open_slots,
    rows_are_independent,
)
from longspan.models.families import family as find_family
from tests.contract.conftest import DEPENDS_ON_CUTS, SMALL, VOCABULARY, WITH_MEMORY, WITHOUT_MEMORY
from tests.support import READING, build

MODELS = {**WITH_MEMORY, **DEPENDS_ON_CUTS, **WITHOUT_MEMORY}
WIDTH = 4
FEW = ["same-length-clamp", "convolution-same-length", "lstm", "sinusoid"]
NAMES = [name if name in FEW else pytest.param(name, marks=pytest.mark.torture) for name in MODELS]
"""One of every kind in the suite, all of them in `make torture`."""


def make(name: str) -> LanguageModel:
    family, values = MODELS[name]
    known = {*keys(find_family(family).Config), *READING}
    torch.manual_seed(1)
    model = build(family, {key: value for key, value in SMALL.items() if key in known} | values).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)  # no position or bias stays 0
    return model


def text(seed: int, length: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(VOCABULARY) for _ in range(length)]


def after(slots: Slots, stream: Stream, tokens: list[int]) -> Stream:
    for begin in range(0, len(tokens), slots.piece):
        stream = slots.prefill(stream, tokens[begin : begin + slots.piece])
    return stream


def decode(slots: Slots, stream: Stream, tokens: list[int], *, crowded: int = 0) -> tuple[torch.Tensor, Stream]:
    """The logits after each token, alone or while other streams join and leave at random."""
    others, source = [], random.Random(crowded)
    if crowded:
        others = [slots.join(after(slots, slots.start(), text(n, 3 + 7 * n))) for n in range(2)]
    own, found = slots.join(stream), []
    for token in tokens:
        if crowded and source.random() < 0.4 and slots.free:
            others.append(slots.join(after(slots, slots.start(), text(source.randrange(99), source.randrange(1, 30)))))
        elif crowded and source.random() < 0.4 and others:
            slots.leave(others.pop(source.randrange(len(others))))
        row = torch.tensor(text(source.randrange(10**6), slots.width), device=slots.device)
        row[own] = token
        found.append(slots.step(row)[own].clone())
    end = slots.stream(own)
    for slot in [own, *others]:
        slots.leave(slot)
    return torch.stack(found), end


@pytest.mark.parametrize("name", NAMES)
def test_a_stream_equals_the_decoder_of_the_family(name: str) -> None:
    model = make(name)
    # Long enough for the ring to wrap: most have 41 slots.
    slots, prompt, tokens = open_slots(model, WIDTH), text(1, 30), text(2, 18)
    found, _ = decode(slots, after(slots, slots.start(), prompt), tokens, crowded=5)
    decoder = open_decoder(model)
    decoder.prefill(torch.tensor([prompt]))
    with torch.no_grad():
        expected = torch.cat([decoder.step(torch.tensor([token])).clone() for token in tokens])
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_other_streams_change_no_bit(name: str) -> None:
    model = make(name)
    slots, tokens = open_slots(model, WIDTH), text(3, 20)
    stream = after(slots, slots.start(), text(4, 27))
    alone, end = decode(slots, stream, tokens)
    for crowded in (1,):
        found, other_end = decode(slots, stream, tokens, crowded=crowded)
        assert torch.equal(found, alone)
        for one, other in zip(end.state.tensors().values(), other_end.state.tensors().values(), strict=True):
            assert torch.equal(one, other)
    assert rows_are_independent(slots)


@pytest.mark.parametrize("name", NAMES)
def test_a_saved_stream_continues_with_the_same_bits(name: str, tmp_path) -> None:
    """Through a file, at a moment at which the ring has wrapped, with a prompt in between."""
    model = make(name)
    slots = open_slots(model, WIDTH)
    _, stream = decode(
        slots, after(slots, slots.start(), text(5, 13)), text(6, 33 if isinstance(slots, RingSlots) else 6)
    )
    state, _ = decode_state(encode_state(stream.state, model_hash="a"), tmp_path, model, model_hash="a")
    restored = Stream(state, stream.read)
    found = [decode(slots, after(slots, one, text(7, 9)), text(8, 8))[0] for one in (stream, restored)]
    assert torch.equal(*found)


def test_the_kinds_of_slots() -> None:
    kinds = {
        name: type(open_slots(make(name), 2))
        for name in ("plain", "rotary", "lstm", "pointer", "memory-0", "compressive-mean")
    }
    assert kinds == {
        "plain": RingSlots,
        "rotary": StateSlots,
        "lstm": StateSlots,
        "pointer": StateSlots,
        "memory-0": WindowSlots,
        "compressive-mean": RowSlots,
    }


def test_logits_of_a_prompt() -> None:
    for name in ("plain", "rotary", "sinusoid"):
        model = make(name)
        slots, tokens = open_slots(model, WIDTH), text(9, 8)
        stream, logits = slots.prompt_logits(slots.start(), tokens)
        expected, _ = decode(slots, slots.start(), tokens)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
        assert stream.read == 8


def test_dependent_rows_are_found() -> None:
    """The check at start-up fails for a batch whose rows influence each other."""

    class Leaking(RingSlots):
        def step(self, tokens: torch.Tensor) -> torch.Tensor:
            logits = super().step(tokens)
            return logits + 1e-6 * logits.mean()

    model = make("plain")
    assert not rows_are_independent(Leaking(model, replace(model.reading), WIDTH))


@pytest.mark.gpu
def test_graphs_on_a_gpu() -> None:
    """The fused step in a CUDA graph: equal to the CPU, and no bit depends on other streams or on when they join."""
    on_cpu, model = make("same-length-clamp"), make("same-length-clamp").cuda()
    slots, plain = open_slots(model, 8), open_slots(on_cpu, 8)
    assert isinstance(slots, RingSlots)
    assert isinstance(slots.decoder, FusedRingDecoder)
    tokens, stream = text(3, 40), after(slots, slots.start(), text(4, 27))
    alone, end = decode(slots, stream, tokens)
    crowded, other_end = decode(slots, stream, tokens, crowded=1)
    assert torch.equal(alone, crowded)
    for one, other in zip(end.state.tensors().values(), other_end.state.tensors().values(), strict=True):
        assert torch.equal(one, other)
    expected, _ = decode(plain, after(plain, plain.start(), text(4, 27)), tokens)
    torch.testing.assert_close(alone.cpu(), expected, atol=2e-3, rtol=1e-3)
