"""Sessions: constant memory, exact continuation, complete characters."""

import gc
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longspan.contract import LanguageModel
from longspan.decoding.sampling import Sampling
from longspan.decoding.session import Session, TextStream
from longspan.errors import DataError, GenerationError, StateError
from tests.support import build

GREEDY, FREE = Sampling(temperature=0), Sampling()


def make_model(family: str = "transformer-xl", **values: Any) -> LanguageModel:
    torch.manual_seed(5)
    small = {"vocabulary": 19, "layers": 2, "width": 16, "heads": 2, "segment": 5}
    made = build(family, small | values)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(0, 0.5)
    return made.eval()


FAMILIES = [
    ("transformer-xl", {"memory": 7}),
    ("transformer-xl", {"memory": 7, "same_length": True}),
    ("longspan-xl", {"memory": 7}),
    ("vanilla", {}),
]


@pytest.mark.parametrize(("family", "values"), FAMILIES)
def test_the_seed_determines_the_tokens(family: str, values: dict[str, Any]) -> None:
    made = make_model(family, **values)

    def text(seed: int) -> list[int]:
        session = Session(made, seed=seed)
        session.read([1, 2, 3])
        return list(session.write(40, FREE))

    assert text(1) == text(1) != text(2)


@pytest.mark.parametrize(("family", "values"), FAMILIES)
def test_a_prompt_may_come_in_pieces(family: str, values: dict[str, Any]) -> None:
    """The prompt is longer than memory and segment. A segment's queries see all of it, so the state depends on the cuts
    unless same_length or a sliding window fixes what a query sees."""
    made, prompt = make_model(family, **values), [i * 7 % 19 for i in range(31)]
    at_once, in_pieces = Session(made), Session(made)
    at_once.read(prompt)
    for a in range(0, 31, 5):
        in_pieces.read(prompt[a : a + 5])
    assert in_pieces.pending == at_once.pending == prompt[-1]
    if values.get("same_length") or family == "vanilla":
        assert list(at_once.write(20, GREEDY)) == list(in_pieces.write(20, GREEDY))


@pytest.mark.parametrize(("family", "values"), FAMILIES)
def test_a_restored_session_continues_identically(family: str, values: dict[str, Any]) -> None:
    made = make_model(family, **values)
    one = Session(made)
    one.read([4, 5, 6])
    first = list(one.write(23, GREEDY))
    other = Session(made)
    other.restore(one.decoder.state(), one.pending)
    assert list(one.write(23, GREEDY)) == list(other.write(23, GREEDY))
    assert len(first) == 23


@pytest.mark.parametrize("sampling", [GREEDY, FREE])
@pytest.mark.parametrize(("family", "values"), FAMILIES)
def test_non_finite_logits_are_an_error(family: str, values: dict[str, Any], sampling: Sampling) -> None:
    """Raised at the first such token; the token before it stays pending."""
    made = make_model(family, **values)
    session = Session(made)
    session.read([1, 2, 3])
    writing = session.write(9, sampling)
    first = [next(writing) for _ in range(4)]
    with torch.no_grad():
        next(iter(made.head.parameters())).fill_(float("nan"))
    with pytest.raises(GenerationError, match="token 5"):
        next(writing)
    assert session.pending == first[-1]


def test_a_long_stream_uses_constant_memory() -> None:
    """A hundred times the rolling cache: its slots stay in place and the process does not grow."""
    session = Session(make_model(memory=7))
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


def test_errors_name_the_value() -> None:
    session = Session(make_model(memory=7))
    with pytest.raises(StateError, match="prompt"):
        next(session.write(1, FREE))
    with pytest.raises(DataError, match=r"token 19.* 18"):
        session.read([19])
    with pytest.raises(StateError, match="3 rows"):
        session.restore(session.model.initial_state(3), 1)
    with pytest.raises(StateError, match=r"token 50.* 18"):
        session.restore(session.model.initial_state(1), 50)


def test_tokens_outside_the_tokenizer_are_never_sampled() -> None:
    session = Session(make_model(memory=7), known=3)
    session.read([1])
    assert set(session.write(300, FREE)) <= {0, 1, 2}


@given(st.text(), st.lists(st.integers(0, 200)))
def test_text_comes_in_complete_characters(text: str, cuts: list[int]) -> None:
    data = text.encode("utf-8", errors="replace")
    edges = sorted({0, len(data), *(c for c in cuts if c < len(data))})
    stream = TextStream()
    pieces = [stream.push(data[a:b]) for a, b in pairwise(edges)]
    assert "".join(pieces) + stream.close() == data.decode("utf-8")


@given(st.binary())
def test_invalid_bytes_become_replacement_characters(data: bytes) -> None:
    stream = TextStream()
    pieces = [stream.push(bytes([b])) for b in data]
    assert "".join(pieces) + stream.close() == data.decode("utf-8", errors="replace")
