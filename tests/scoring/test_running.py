"""RunningScore against `score` and sums by hand."""

import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import longspan
from longspan.scoring.running import RunningScore, round_robin, word_starts
from longspan.text_model import TextModel

TEXT = "the cat sat on the mat.\nthe dog sat on the log. " * 4


@pytest.fixture(scope="module")
def text() -> TextModel:
    return longspan.init(
        "transformer-xl", layers=2, width=16, heads=2, device="cpu", reading={"segment": 16, "memory": 24}
    )


def running(text: TextModel, content: str = TEXT, **settings: int) -> RunningScore:
    reading = text.reading_with(**settings)  # type: ignore[arg-type]
    return RunningScore(text.model, text.tokenizer, text.tokenizer.encode(content), reading, method="stream")


def test_it_equals_score_and_grows_by_segments(text: TextModel) -> None:
    made = running(text)
    assert math.isnan(made.bits_per_byte)
    assert made.passages(3) == []
    steps = [(scored, made.bits_per_byte) for scored in made.read()]
    assert [scored for scored, _ in steps] == [*range(16, len(TEXT) - 1, 16), len(TEXT) - 1]
    expected = text.score(TEXT)
    assert np.array_equal(made.losses, expected.losses)
    assert made.bits_per_byte == pytest.approx(expected.bits_per_byte)
    assert steps[0][1] == pytest.approx(expected.losses[:16].mean() / math.log(2))


def by_hand(losses: list[float], content: bytes, scored: int | None = None) -> RunningScore:
    """A score with given losses of single bytes, in bits."""
    made = RunningScore.__new__(RunningScore)
    made.__dict__ = {
        "data": content,
        "ids": np.frombuffer(content, np.uint8),
        "total": len(content) - 1,
        "sizes": np.ones(len(content), np.int64),
        "ends": np.arange(1, len(content) + 1),
        "losses": np.array(losses, np.float32) * math.log(2),
        "scored": len(losses) if scored is None else scored,
    }
    return made


def test_the_curve_is_the_mean_of_equal_parts() -> None:
    made = by_hand([1, 3, 5, 7, 2, 4, 6, 8], b"abcdefghi")
    places, bits = made.curve(4)
    assert bits == pytest.approx([2, 6, 3, 7])
    assert places.tolist() == [2, 4, 6, 8]
    made.scored = 5
    assert made.curve(4)[1] == pytest.approx([2, 6])  # the third part is incomplete
    places, bits = by_hand([1, 3, 5, 7], b"abcde").running_bits(4)
    assert places[-1] == 5
    assert bits[-1] == pytest.approx(4)


def test_words_have_the_losses_of_the_bytes_that_begin_in_them() -> None:
    made = by_hand([1, 2, 3, 4, 5, 6, 7], b"ab cd\ne ")
    starts, nats = made.words()
    assert starts.tolist() == [0, 2, 5, 7]
    # The first byte has no loss, so b has 1, the second word 2 + 3 + 4, the third 5 + 6, the last blank 7.
    assert nats / math.log(2) == pytest.approx([1, 9, 11, 7])
    assert word_starts(b"  a").tolist() == [0]


def test_passages_are_the_most_surprising_and_do_not_overlap() -> None:
    words = [b"aaaa "] * 60
    words[20:22] = [b"zzzz "] * 2
    content = b"".join(words)
    losses = [8.0 if byte == ord("z") else 1.0 for byte in content[1:]]
    found = by_hand(losses, content).passages(3, length=20)
    assert b"zzzz zzzz" in content[found[0].begin : found[0].end]
    assert found[0].bits_per_byte > 2 * found[1].bits_per_byte > 0
    spans = sorted((one.begin, one.end) for one in found)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))


def test_several_readings_keep_pace(text: TextModel) -> None:
    scores = [running(text), running(text, memory=0, segment=8)]
    for total in round_robin(scores):
        assert abs(scores[0].scored - scores[1].scored) <= 16
        assert total == sum(score.bytes_read for score in scores if score.scored)
    assert [score.scored for score in scores] == [len(TEXT) - 1] * 2


def test_longer_tokens_count_their_bytes(tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("one\nthree\n<unk>\n<eos>\n")
    text = longspan.init("lstm", tmp_path / "words.txt", layers=1, width=8, device="cpu")
    made = RunningScore(text.model, text.tokenizer, text.tokenizer.encode("one three three one\n"))
    for _ in made.read():
        pass
    first = len(text.tokenizer.decode_bytes(made.ids[:1]))
    assert made.bytes_read == len(made.data) == len(text.tokenizer.decode_bytes(made.ids)) > len(made.ids)
    assert made.bits_per_byte == pytest.approx(made.nats / math.log(2) / (len(made.data) - first))
