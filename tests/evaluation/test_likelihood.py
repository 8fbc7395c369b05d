"""Streaming and sliding evaluation against one forward pass per target."""

import math
import os
import random
from itertools import pairwise

import numpy as np
import pytest
import torch

from longspan.config import plain
from longspan.errors import ConfigError, DataError
from longspan.evaluation.likelihood import Pace, Tally, sliding_losses, stream_losses, warm_up
from longspan.models.families import build

V = 17


@pytest.fixture
def model():
    torch.manual_seed(2)
    made = build("transformer-xl", {"vocabulary": V, "layers": 2, "width": 16, "heads": 2, "segment": 6, "memory": 9})
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(0, 0.3)
    return made.double().eval()


def ids(count: int) -> np.ndarray:
    return np.random.default_rng(0).integers(V, size=count).astype(np.uint8)


def collected(stretches, count: int) -> np.ndarray:
    out = np.full(count, np.nan, np.float32)
    tally = Tally(out)
    for stretch in stretches:
        assert np.isnan(out[stretch.begin : stretch.begin + len(stretch.losses)]).all(), "a loss came twice"
        tally.add(stretch)
    assert tally.count == count
    assert not np.isnan(out).any()
    assert math.isclose(tally.mean, out.mean(dtype=np.float64), rel_tol=1e-12)
    return out


def one_by_one(model, text: np.ndarray, context: int) -> list[float]:
    """The loss of every target from a fresh state and at most `context` tokens before it."""
    found = []
    for place in range(1, len(text)):
        seen = torch.from_numpy(text[max(0, place - context) : place].astype(np.int64))[None]
        with torch.no_grad():
            logits, _ = model(seen, model.initial_state(1))
        found.append(float(-logits[0, -1].log_softmax(-1)[text[place]]))
    return found


@pytest.mark.parametrize("segment", [1, 5, 40])
def test_streaming_sees_memory_and_segment(model, segment: int) -> None:
    text = ids(33)
    state, expected = model.initial_state(1), []
    for a in range(0, 32, segment):
        piece = torch.from_numpy(text[a : min(a + segment, 32) + 1].astype(np.int64))[None]
        with torch.no_grad():
            losses, state = model.losses(piece[:, :-1], piece[:, 1:], state)
        expected += losses[0].tolist()
    np.testing.assert_allclose(collected(stream_losses(model, text, segment=segment), 32), expected, atol=1e-6)


@pytest.mark.parametrize("lanes", [1, 2, 5, 7, 32])
def test_lanes_are_streams_of_their_own_and_cover_every_target_once(model, lanes: int) -> None:
    text = ids(33)
    found = collected(stream_losses(model, text, segment=4, lanes=lanes), 32)
    edges = [lane * 32 // lanes for lane in range(lanes + 1)]
    for a, b in pairwise(edges):
        alone = collected(stream_losses(model, text[a : b + 1], segment=4), b - a)
        np.testing.assert_allclose(found[a:b], alone, atol=1e-6)


@pytest.mark.parametrize("segment", [1, 7, 100])
@pytest.mark.parametrize("batch", [None, 1, 3])
def test_sliding_gives_every_target_the_tokens_before_it(model, segment: int, batch: int | None) -> None:
    text = ids(40)
    found = collected(sliding_losses(model, text, segment=segment, batch=batch), 39)
    np.testing.assert_allclose(found, one_by_one(model, text, segment), atol=1e-6)


def test_documents_begin_afresh(model) -> None:
    text = ids(30)
    found = collected(stream_losses(model, text, segment=4, lanes=2, starts=np.array([9, 20])), 29)
    alone = collected(stream_losses(model, text[9:21], segment=4), 11)
    np.testing.assert_allclose(found[9:14], alone[:5], atol=1e-6)  # lane 2 begins at 14


def test_wrong_use_is_told(model) -> None:
    for text, keywords, error, sentence in [
        (ids(1), {"segment": 4}, DataError, "at least 2"),
        (ids(9), {"segment": 0}, ConfigError, "--segment 0"),
        (ids(9), {"segment": 4, "lanes": 0}, ConfigError, "--lanes 0"),
        (ids(9), {"segment": 4, "lanes": 9}, ConfigError, "use fewer lanes"),
        (np.array([1, 2, 200], np.uint8), {"segment": 4}, DataError, "token 200"),
    ]:
        with pytest.raises(error, match=sentence):
            list(stream_losses(model, text, **keywords))


@pytest.mark.slow
@pytest.mark.parametrize("block", range(20 if os.environ.get("LONGSPAN_TORTURE") else 1))
def test_random_cuts_change_neither_count_nor_loss(model, block: int) -> None:
    """With same_length a stream may be cut anywhere: a hundred ways, segment by segment, against one pass."""
    draw = random.Random(block)
    same = build("transformer-xl", {**plain(model.config), "same_length": True}).eval()
    same.load_state_dict(model.state_dict())
    text = torch.from_numpy(ids(61).astype(np.int64))[None]
    with torch.inference_mode():
        whole, _ = same.losses(text[:, :-1], text[:, 1:], same.initial_state(1))
        for _ in range(100):
            edges = sorted({0, 60, *(draw.randrange(61) for _ in range(draw.randrange(1, 20)))})
            state, pieces = same.initial_state(1), []
            for a, b in pairwise(edges):
                losses, state = same.losses(text[:, a:b], text[:, a + 1 : b + 1], state)
                pieces.append(losses)
            cut = torch.cat(pieces, dim=1)
            assert cut.shape == whole.shape
            assert (cut - whole).abs().max() < 1e-5, edges


class Clock:
    """Tells the times it was given, one after another."""

    def __init__(self, *times: float) -> None:
        self.times = list(times)

    def __call__(self) -> float:
        return self.times.pop(0)


def test_the_pace_leaves_out_what_compiles() -> None:
    """Ten seconds to compile, another three for a last segment of another shape, one second per segment otherwise."""
    pace = Pace(2, Clock(0, 10, 11, 12, 13, 14, 17))
    for scored in (100, 200, 300, 400, 500, 510):
        pace.mark(scored)
    assert pace.tokens_per_second == 100
    assert pace.seconds == 17


@pytest.mark.parametrize("segments", [1, 2, 3])
def test_a_short_text_is_timed_as_a_whole(segments: int) -> None:
    pace = Pace(2, Clock(0, 10, 20, 30))
    for n in range(1, segments + 1):
        pace.mark(100 * n)
    assert pace.tokens_per_second == 10


def test_warm_is_a_full_memory_and_three_segments(model) -> None:
    assert warm_up(model, 6) == 2 + 3  # a memory of 9
    assert warm_up(model, 100) == 1 + 3
    assert warm_up(build("vanilla", {"vocabulary": V, "layers": 1, "width": 16, "segment": 6}), 6) == 3
