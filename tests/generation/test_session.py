"""Sessions: constant memory, exact continuation, whole characters."""

import gc
import os
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longspan.errors import DataError, GenerationError, StateError
from longspan.generation.sampling import Sampling
from longspan.generation.session import Session, TextStream
from longspan.models.families import build

GREEDY, FREE = Sampling(temperature=0), Sampling()


def model(family: str = "transformer-xl", **values):
    torch.manual_seed(5)
    small = {"vocabulary": 19, "layers": 2, "width": 16, "heads": 2, "segment": 5}
    made = build(family, small | values)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(0, 0.5)
    return made.eval()


FAMILIES = [("transformer-xl", {"memory": 7}), ("transformer-xl", {"memory": 7, "same_length": True}), ("vanilla", {})]


@pytest.mark.parametrize(("family", "values"), FAMILIES)
def test_same_seed_same_text_another_seed_another(family: str, values: dict) -> None:
    made = model(family, **values)

    def text(seed: int) -> list[int]:
        session = Session(made, seed=seed)
        session.read([1, 2, 3])
        return list(session.write(40, FREE))

    assert text(1) == text(1) != text(2)


@pytest.mark.parametrize(("family", "values"), FAMILIES)
def test_a_prompt_in_pieces_is_the_prompt(family: str, values: dict) -> None:
    """Longer than memory and segment; with same_length cuts cannot matter, elsewhere pieces fall on segments."""
    made, prompt = model(family, **values), [i * 7 % 19 for i in range(31)]
    whole, pieces = Session(made), Session(made)
    whole.read(prompt)
    for a in range(0, 31, 5):
        pieces.read(prompt[a : a + 5])
    if values.get("same_length") or family == "vanilla":
        assert list(whole.write(20, GREEDY)) == list(pieces.write(20, GREEDY))


@pytest.mark.parametrize(("family", "values"), FAMILIES)
def test_a_restored_session_goes_on_as_if_nothing_had_happened(family: str, values: dict) -> None:
    made = model(family, **values)
    one = Session(made)
    one.read([4, 5, 6])
    first = list(one.write(23, GREEDY))
    other = Session(made)
    other.restore(one.decoder.state(), one.pending)
    assert list(one.write(23, GREEDY)) == list(other.write(23, GREEDY))
    assert len(first) == 23


@pytest.mark.parametrize("sampling", [GREEDY, FREE])
@pytest.mark.parametrize(("family", "values"), FAMILIES)
def test_logits_that_are_not_finite_are_an_error(family: str, values: dict, sampling: Sampling) -> None:
    """At the token where they begin; the token before stays the last one."""
    made = model(family, **values)
    session = Session(made)
    session.read([1, 2, 3])
    writing = session.write(9, sampling)
    first = [next(writing) for _ in range(4)]
    with torch.no_grad():
        next(iter(made.head.parameters())).fill_(float("nan"))
    with pytest.raises(GenerationError, match="token 5"):
        next(writing)
    assert session.pending == first[-1]


def test_a_long_stream_in_constant_memory() -> None:
    """A hundred times the ring: the slots stay where they are and the process does not grow."""
    session = Session(model(memory=7))
    session.read([1])
    list(session.write(100, FREE))
    slots, before = [tensor.data_ptr() for tensor in session.decoder.keys], resident_bytes()
    for _ in session.write(700, FREE):
        pass
    assert slots == [tensor.data_ptr() for tensor in session.decoder.keys]
    assert resident_bytes() - before < 4_000_000


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_wrong_use_is_told() -> None:
    session = Session(model(memory=7))
    with pytest.raises(StateError, match="nothing has been read"):
        next(session.write(1, FREE))
    with pytest.raises(DataError, match="token 19"):
        session.read([19])
    with pytest.raises(StateError, match="3 rows"):
        session.restore(session.model.initial_state(3), 1)
    with pytest.raises(StateError, match="token 50"):
        session.restore(session.model.initial_state(1), 50)


def test_tokens_the_tokenizer_lacks_are_never_written() -> None:
    session = Session(model(memory=7), known=3)
    session.read([1])
    assert set(session.write(300, FREE)) <= {0, 1, 2}


@given(st.text(), st.lists(st.integers(0, 200)))
def test_text_comes_in_whole_characters(text: str, cuts: list[int]) -> None:
    data = text.encode("utf-8", errors="replace")
    edges = sorted({0, len(data), *(c for c in cuts if c < len(data))})
    stream = TextStream()
    pieces = [stream.push(data[a:b]) for a, b in pairwise(edges)]
    assert "".join(pieces) + stream.close() == data.decode("utf-8")


@given(st.binary())
def test_bytes_that_make_no_text_are_replaced_not_lost(data: bytes) -> None:
    stream = TextStream()
    pieces = [stream.push(bytes([b])) for b in data]
    assert "".join(pieces) + stream.close() == data.decode("utf-8", errors="replace")
