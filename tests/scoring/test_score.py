"""`score`: the mean over all losses, the method, and the speed without warm-up."""

import inspect
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from longspan.contract import LanguageModel
from longspan.data.encoded import Excerpt
from longspan.errors import ConfigError, UnknownNameError
from longspan.reading import Reading
from longspan.scoring.losses import sliding_losses, stream_losses
from longspan.scoring.score import Pace, default_method, score, warm_up_segments
from tests.support import build

IDS = np.random.default_rng(0).integers(17, size=61).astype(np.uint8)


def make_model(family: str = "transformer-xl", **values: Any) -> LanguageModel:
    torch.manual_seed(2)
    return build(family, {"vocabulary": 17, "layers": 1, "width": 16, "segment": 6, **values}).double().eval()


@pytest.mark.parametrize(("method", "streams"), [("stream", 1), ("stream", 4), ("sliding", 1)])
def test_the_score_is_the_mean_of_all_losses(method: Any, streams: int) -> None:
    model = make_model(memory=9)
    if method == "sliding":
        chunks = sliding_losses(model, IDS, model.reading)
    else:
        chunks = stream_losses(model, IDS, model.reading, streams=streams)
    expected = np.empty(60, np.float32)
    for chunk in chunks:
        expected[chunk.begin : chunk.begin + len(chunk.losses)] = chunk.losses
    calls: list[tuple[int, int]] = []
    found = score(
        model, IDS, method=method, streams=streams, losses=True, progress=lambda done, all: calls.append((done, all))
    )
    np.testing.assert_array_equal(found.losses, expected)
    assert (found.scored, found.method, found.streams, found.reading) == (60, method, streams, model.reading)
    assert math.isclose(found.nats, expected.mean(dtype=np.float64), rel_tol=1e-12)
    assert math.isclose(found.bits, found.nats / math.log(2))
    assert math.isclose(found.perplexity, math.exp(found.nats))
    assert calls[-1] == (60, 60)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


def test_losses_are_written_to_the_given_array_or_not_kept() -> None:
    model, out = make_model(memory=9), np.zeros(60, np.float32)
    found = score(model, IDS, losses=out)
    assert found.losses is out
    assert math.isclose(found.nats, out.mean(dtype=np.float64), rel_tol=1e-12)
    assert score(model, IDS).losses is None


def test_a_reading_changes_the_score_and_not_the_model() -> None:
    model = make_model(memory=9)
    before, reading = score(model, IDS).nats, replace(model.reading, memory=20)
    found = score(model, IDS, reading)
    assert found.reading == reading
    assert found.nats != before == score(model, IDS).nats


def test_a_model_without_memory_is_scored_by_a_sliding_window() -> None:
    assert default_method(make_model(memory=9)) == "stream"
    assert default_method(make_model(memory=9), Reading(memory=0)) == "sliding"
    assert default_method(make_model("vanilla")) == "sliding"
    assert score(make_model("vanilla"), IDS).method == "sliding"


@pytest.mark.parametrize("method", ["stream", "sliding", "dynamic"])
def test_the_state_is_reset_where_a_document_starts(method: Any) -> None:
    model, text = make_model(memory=60), Excerpt(IDS, np.array([0, 20, 41]))
    found, alone = (score(model, one, method=method, losses=True).losses for one in (text, IDS[41:]))
    without = score(model, text, method=method, documents=False, losses=True).losses
    assert found is not None
    assert alone is not None
    if method != "dynamic":  # the weights have learned from the documents before
        np.testing.assert_allclose(found[41:], alone, atol=1e-6)
    np.testing.assert_array_equal(without, score(model, IDS, method=method, losses=True).losses)
    assert without is not None
    np.testing.assert_allclose(found[:20], without[:20], atol=1e-6)
    assert np.abs(found - without).max() > 1e-5
    part = text.excerpt(10, 50)
    assert (part.starts.tolist(), len(part.ids)) == ([10, 31], 40)


@pytest.mark.parametrize("method", ["sliding", "dynamic"])
def test_streams_need_the_method_stream(method: Any) -> None:
    with pytest.raises(ConfigError, match=f"streams=3.*{method}"):
        score(make_model(memory=9), IDS, method=method, streams=3)


@pytest.mark.parametrize(
    ("method", "stride", "words"), [("stream", 3, "stream"), ("sliding", 7, "6"), ("sliding", 0, "6")]
)
def test_a_stride_needs_a_window(method: Any, stride: int, words: str) -> None:
    with pytest.raises(ConfigError, match=f"stride={stride}.*{words}"):
        score(make_model(memory=9), IDS, method=method, stride=stride)


@pytest.mark.parametrize(
    ("method", "suggestion"), [("sldiing", "'sliding'"), ("foo", "dynamic, sliding, stream"), ("", "")]
)
def test_an_unknown_method_is_refused(method: Any, suggestion: str) -> None:
    with pytest.raises(UnknownNameError, match=f"{method!r}.*{suggestion}"):
        inspect.unwrap(score)(make_model(memory=9), IDS, method=method)  # without the type checks of the tests


class Clock:
    """Returns the given times, one after another."""

    def __init__(self, *times: float) -> None:
        self.times = list(times)

    def __call__(self) -> float:
        return self.times.pop(0)


def test_the_speed_excludes_warm_up() -> None:
    """Ten seconds to compile, three more for a last segment of another shape, one second per segment otherwise."""
    pace = Pace(2, Clock(0, 10, 11, 12, 13, 14, 17))
    for scored in (100, 200, 300, 400, 500, 510):
        pace.mark(scored)
    assert pace.tokens_per_second == 100
    assert pace.seconds == 17


@pytest.mark.parametrize("segments", [1, 2, 3])
def test_a_short_text_is_timed_with_its_warm_up(segments: int) -> None:
    pace = Pace(2, Clock(0, 10, 20, 30))
    for n in range(1, segments + 1):
        pace.mark(100 * n)
    assert pace.tokens_per_second == 10


def test_warm_up_fills_the_caches_and_takes_three_more_segments() -> None:
    model = make_model(memory=9)
    assert warm_up_segments(model, model.reading) == 2 + 3
    assert warm_up_segments(model, replace(model.reading, segment=100)) == 1 + 3
    for family in ("vanilla", "lstm"):
        model = make_model(family)
        assert warm_up_segments(model, model.reading) == 3
