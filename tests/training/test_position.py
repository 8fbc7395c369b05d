"""Test 4 of reliability: whatever interrupts the reading, no token is repeated and none is skipped."""

import json
import os
import random
from pathlib import Path

import numpy as np
import pytest

from longspan.data import Lanes
from longspan.errors import DataError
from longspan.training.loop import Trainer
from longspan.training.observer import Observer
from tests.training.conftest import make_recipe, make_text, train

TORTURE = bool(os.environ.get("LONGSPAN_TORTURE"))
CASES = 10_000 if TORTURE else 200


def test_interrupted_reading_covers_every_pass_once() -> None:
    chance = random.Random(4)
    for _ in range(CASES):
        tokens, rows = chance.randrange(20, 120), chance.randrange(1, 6)
        ids, starts = np.arange(tokens, dtype=np.int32), sorted({0, chance.randrange(tokens)})
        lanes, read = Lanes(ids, starts, rows, "f"), []
        while lanes.passes < 2 or lanes.position < lanes.row_length:
            if chance.random() < 0.5:
                saved = json.loads(json.dumps(lanes.state_dict()))
                lanes = Lanes(ids, starts, rows, "f")
                lanes.load_state_dict(saved)
            if lanes.passes == 2 and lanes.position == lanes.row_length:
                break
            batch = lanes.next(chance.randrange(1, 17))
            assert (batch.targets == batch.tokens + 1).all()
            read.append((lanes.passes, batch.tokens))
        for k in range(3):
            seen = np.concatenate([tokens_read.ravel() for number, tokens_read in read if number == k])
            assert sorted(seen.tolist()) == list(range(rows * ((tokens - 1) // rows)))


def test_another_text_is_refused_by_name() -> None:
    lanes = Lanes(np.arange(50, dtype=np.int32), [0], 2, "f" * 64, "novel.txt")
    other = Lanes(np.arange(50, dtype=np.int32), [0], 2, "g" * 64, "novel.txt")
    with pytest.raises(DataError, match=r"novel.txt is not the text this run was trained on"):
        other.load_state_dict(lanes.state_dict())


class Stop(Observer):
    """Ends the process after some step, as a signal would, and notes what was read."""

    def __init__(self, after: int, read: list[np.ndarray]) -> None:
        self.after, self.read, self.taken = after, read, 0

    def begin(self, trainer: Trainer) -> None:
        inner, lanes = trainer.lanes.next, trainer.lanes

        def noting(segment: int) -> object:
            batch = inner(segment)
            self.read.append(batch.tokens)
            return batch

        lanes.next = noting  # type: ignore[method-assign]

    def after_step(self, trainer: Trainer) -> None:
        self.taken += 1
        if self.taken == self.after:
            raise KeyboardInterrupt


def test_a_run_in_pieces_reads_what_a_whole_run_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, text, chance = make_recipe(training_steps=16), make_text(120), random.Random(2)
    whole: list[np.ndarray] = []
    train(recipe, tmp_path / "whole", text, monkeypatch, Stop(10**6, whole))
    pieces: list[np.ndarray] = []
    finished = False
    while not finished:
        # The step that raises was read but never saved: the next process reads it again, and the note is taken back.
        read: list[np.ndarray] = []
        try:
            stop = Stop(chance.randrange(2, 9), read)
            finished = train(recipe, tmp_path / "run", text, monkeypatch, stop, resume="auto").finished
            pieces += read
        except KeyboardInterrupt:
            pieces += read[:-1]
    assert len(pieces) == len(whole) == 16
    assert all(np.array_equal(a, b) for a, b in zip(pieces, whole, strict=True))
