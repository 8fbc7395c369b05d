"""Streaming and sliding-window losses against one forward pass per target."""

import os
import random
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from longspan.contract import LanguageModel
from longspan.errors import ConfigError, DataError
from longspan.reading import Reading
from longspan.scoring.losses import Chunk, sliding_losses, stream_losses
from tests.support import build

V = 17


@pytest.fixture
def model() -> LanguageModel:
    torch.manual_seed(2)
    made = build("transformer-xl", {"vocabulary": V, "layers": 2, "width": 16, "heads": 2, "segment": 6, "memory": 9})
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(0, 0.3)
    return made.double().eval()


def make_ids(count: int) -> np.ndarray:
    return np.random.default_rng(0).integers(V, size=count).astype(np.uint8)


def with_segment(model: LanguageModel, segment: int) -> Reading:
    return replace(model.reading, segment=segment)


def collect(chunks: Iterable[Chunk], count: int) -> np.ndarray:
    """All losses of a text, each of which must come exactly once."""
    out = np.full(count, np.nan, np.float32)
    for chunk in chunks:
        entries = slice(chunk.begin, chunk.begin + len(chunk.losses))
        assert np.isnan(out[entries]).all(), "a loss came twice"
        out[entries] = chunk.losses
    assert not np.isnan(out).any()
    return out


def losses_one_by_one(model: LanguageModel, ids: np.ndarray, contexts: list[int]) -> list[float]:
    """The loss of every target from an empty state and at most so many tokens before it."""
    found = []
    for place, context in enumerate(contexts, start=1):
        seen = torch.from_numpy(ids[max(0, place - context) : place].astype(np.int64))[None]
        with torch.no_grad():
            logits, _ = model(seen, model.initial_state(1))
        found.append(float(-logits[0, -1].log_softmax(-1)[ids[place]]))
    return found


@pytest.mark.parametrize("segment", [1, 5, 40])
def test_a_stream_sees_memory_and_segment(model: LanguageModel, segment: int) -> None:
    ids = make_ids(33)
    state, expected = model.initial_state(1), []
    for a in range(0, 32, segment):
        piece = torch.from_numpy(ids[a : min(a + segment, 32) + 1].astype(np.int64))[None]
        with torch.no_grad():
            losses, state = model.losses(piece[:, :-1], piece[:, 1:], state)
        expected += losses[0].tolist()
    found = collect(stream_losses(model, ids, with_segment(model, segment)), 32)
    np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("streams", [1, 2, 5, 7, 32])
def test_streams_are_independent_and_cover_every_target_once(model: LanguageModel, streams: int) -> None:
    ids, reading = make_ids(33), with_segment(model, 4)
    found = collect(stream_losses(model, ids, reading, streams=streams), 32)
    edges = [stream * 32 // streams for stream in range(streams + 1)]
    for a, b in pairwise(edges):
        alone = collect(stream_losses(model, ids[a : b + 1], reading), b - a)
        np.testing.assert_allclose(found[a:b], alone, atol=1e-6)


@pytest.mark.parametrize("segment", [1, 7, 100])
@pytest.mark.parametrize("batch", [None, 1, 3])
def test_a_sliding_window_ends_at_every_target(model: LanguageModel, segment: int, batch: int | None) -> None:
    ids = make_ids(40)
    found = collect(sliding_losses(model, ids, with_segment(model, segment), batch=batch), 39)
    np.testing.assert_allclose(found, losses_one_by_one(model, ids, [segment] * 39), atol=1e-6)


@pytest.mark.parametrize(("segment", "stride"), [(7, 3), (8, 4), (7, 7), (100, 50)])
@pytest.mark.parametrize("batch", [None, 1, 3])
def test_a_stride_scores_the_last_tokens_of_every_window(
    model: LanguageModel, segment: int, stride: int, batch: int | None
) -> None:
    """Token by token, from the beginning of the first window that has it. The last window ends with the text."""
    ids = make_ids(40)
    windows = [(end - segment, end) for end in (*range(segment, 39, stride), 39) if end >= segment] or [(0, 39)]
    contexts = [k + 1 - next(begin for begin, end in windows if k < end) for k in range(39)]
    found = collect(sliding_losses(model, ids, with_segment(model, segment), stride=stride, batch=batch), 39)
    np.testing.assert_allclose(found, losses_one_by_one(model, ids, contexts), atol=1e-6)


def test_a_document_starts_with_an_empty_memory(model: LanguageModel) -> None:
    ids, reading = make_ids(30), with_segment(model, 4)
    found = collect(stream_losses(model, ids, reading, streams=2, starts=np.array([9, 20])), 29)
    alone = collect(stream_losses(model, ids[9:21], reading), 11)
    np.testing.assert_allclose(found[9:14], alone[:5], atol=1e-6)  # stream 2 starts at 14


@pytest.mark.parametrize(
    ("ids", "segment", "streams", "error", "values"),
    [
        (make_ids(1), 4, 1, DataError, r"1 .*2"),
        (make_ids(9), 0, 1, ConfigError, "segment=0"),
        (make_ids(9), 4, 0, ConfigError, "streams=0"),
        (make_ids(9), 4, 9, ConfigError, r"streams=9 .*8"),
        (np.array([1, 2, 200], np.uint8), 4, 1, DataError, r"token 200.* 16"),
    ],
)
def test_errors_name_the_value(
    model: LanguageModel, ids: np.ndarray, segment: int, streams: int, error: type[Exception], values: str
) -> None:
    with pytest.raises(error, match=values):
        list(stream_losses(model, ids, with_segment(model, segment), streams=streams))


@pytest.mark.slow
@pytest.mark.parametrize("block", range(20 if os.environ.get("LONGSPAN_TORTURE") else 1))
def test_random_cuts_change_neither_count_nor_loss(model: LanguageModel, block: int) -> None:
    """With same_length a stream may be cut anywhere: a hundred random cuts against one forward pass."""
    draw, reading = random.Random(block), replace(model.reading, same_length=True)
    ids = torch.from_numpy(make_ids(61).astype(np.int64))[None]
    with torch.inference_mode():
        uncut, _ = model.losses(ids[:, :-1], ids[:, 1:], model.initial_state(1, reading))
        for _ in range(100):
            edges = sorted({0, 60, *(draw.randrange(61) for _ in range(draw.randrange(1, 20)))})
            state, pieces = model.initial_state(1, reading), []
            for a, b in pairwise(edges):
                losses, state = model.losses(ids[:, a:b], ids[:, a + 1 : b + 1], state)
                pieces.append(losses)
            cut = torch.cat(pieces, dim=1)
            assert cut.shape == uncut.shape
            assert (cut - uncut).abs().max() < 1e-5, edges
