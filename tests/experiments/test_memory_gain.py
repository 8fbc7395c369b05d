"""MemoryComparison against `TextModel.score`."""

import math

import numpy as np
import pytest

import longspan
from longspan.errors import ConfigError
from longspan.experiments.memory_gain import ALONE, MemoryComparison, with_memory
from longspan.text_model import TextModel

TEXT = "a quick brown fox; a lazy dog. " * 6


@pytest.fixture(scope="module")
def text() -> TextModel:
    return longspan.init(
        "transformer-xl", layers=2, width=16, heads=2, device="cpu", reading={"segment": 16, "memory": 24}
    )


def test_a_memory_beyond_the_models_own_is_clamped_and_none_reads_segments_alone(text: TextModel) -> None:
    none, less, more = (with_memory(text.model, memory) for memory in (0, 8, 100))
    assert (none.memory, none.segment, none.same_length) == (0, min(16, ALONE), False)
    assert (less.memory, less.clamp) == (8, 0)
    assert (more.memory, more.clamp) == (100, 24 + 16 - 1)
    with pytest.raises(ConfigError, match="LSTM"):
        with_memory(longspan.init("lstm", layers=1, width=8, device="cpu").model, 64)


def test_memories_equal_scores_with_that_memory(text: TextModel) -> None:
    made = MemoryComparison(TEXT.encode(), [(text, with_memory(text.model, memory)) for memory in (0, 8, 100)])
    *_, done = made.read()
    assert done == made.total == 3 * len(TEXT)
    expected = [
        text.score(TEXT, memory=0, method="stream"),
        text.score(TEXT, memory=8),
        text.score(TEXT, memory=100, clamp=39),
    ]
    for score, other in zip(made.scores, expected, strict=True):
        assert np.array_equal(score.losses, other.losses)
        assert score.bits_per_byte == pytest.approx(other.bits_per_byte)
    saved = (expected[0].losses - expected[2].losses) / math.log(2)
    best = made.helped_tokens(2, 5)
    assert [one.begin for one in best] == (np.argsort(-saved, kind="stable")[:5] + 1).tolist()
    assert [one.saved for one in best] == pytest.approx(np.sort(saved)[::-1][:5], abs=1e-5)


def test_models_with_different_tokenizers_are_compared_by_words(text: TextModel) -> None:
    other = longspan.init("lstm", "characters", layers=1, width=8, vocabulary=128, device="cpu")
    made = MemoryComparison(TEXT.encode(), [(text, text.reading), (other, other.reading)])
    for _ in made.read():
        pass
    assert not made.same_tokens
    with pytest.raises(ConfigError):
        made.helped_tokens(1, 3)
    words = made.helped_words(1, 1000)
    assert len(words) == len(TEXT.split()) + 1  # the last blank is one of its own
    for column, score in (("before", made.scores[0]), ("after", made.scores[1])):
        assert sum(getattr(one, column) for one in words) == pytest.approx(score.nats / math.log(2), rel=1e-5)
    quick = next(one for one in words if one.begin == 1)
    assert TEXT[quick.begin : quick.end] == " quick"
    assert quick.before == pytest.approx(made.scores[0].losses[:6].sum() / math.log(2), rel=1e-5)
