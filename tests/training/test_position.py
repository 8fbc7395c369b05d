"""Reliability: after any interruption no token is repeated and none is skipped."""

import json
import os
import random
from pathlib import Path

import numpy as np
import pytest

from longspan.data import BatchStreams
from longspan.errors import DataError
from longspan.training.loop import Trainer
from longspan.training.observer import Observer
from tests.training.conftest import make_recipe, make_text, train

TORTURE = bool(os.environ.get("LONGSPAN_TORTURE"))
CASES = 10_000 if TORTURE else 200


def test_interrupted_passes_read_every_token_once() -> None:
    rng = random.Random(4)
    for _ in range(CASES):
        tokens, rows = rng.randrange(20, 120), rng.randrange(1, 6)
        ids, starts = np.arange(tokens, dtype=np.int32), sorted({0, rng.randrange(tokens)})
        streams, read = BatchStreams(ids, starts, rows, "f"), []
        while streams.passes < 2 or streams.position < streams.row_length:
            if rng.random() < 0.5:
                saved = json.loads(json.dumps(streams.state_dict()))
                streams = BatchStreams(ids, starts, rows, "f")
                streams.load_state_dict(saved)
            if streams.passes == 2 and streams.position == streams.row_length:
                break
            batch = streams.next(rng.randrange(1, 17))
            assert (batch.targets == batch.tokens + 1).all()
            read.append((streams.passes, batch.tokens))
        for k in range(3):
            seen = np.concatenate([tokens_read.ravel() for number, tokens_read in read if number == k])
            assert sorted(seen.tolist()) == list(range(rows * ((tokens - 1) // rows)))


def test_another_text_is_refused() -> None:
    streams = BatchStreams(np.arange(50, dtype=np.int32), [0], 2, "f" * 64, "novel.txt")
    other = BatchStreams(np.arange(50, dtype=np.int32), [0], 2, "g" * 64, "novel.txt")
    with pytest.raises(DataError, match=r"novel\.txt.*g{12}.*f{12}"):
        other.load_state_dict(streams.state_dict())


class Stop(Observer):
    """Stops the run after a number of steps, as a signal would, and records what was read."""

    def __init__(self, after: int, read: list[np.ndarray]) -> None:
        self.after, self.read, self.taken = after, read, 0

    def begin(self, trainer: Trainer) -> None:
        inner, streams = trainer.streams.next, trainer.streams

        def recording(segment: int, rows: None) -> object:
            batch = inner(segment, rows)
            self.read.append(batch.tokens)
            return batch

        streams.next = recording  # type: ignore[method-assign]

    def after_step(self, trainer: Trainer) -> None:
        self.taken += 1
        if self.taken == self.after:
            raise KeyboardInterrupt


def test_an_interrupted_run_reads_the_same_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, text, rng = make_recipe(training_steps=16), make_text(120), random.Random(2)
    uninterrupted: list[np.ndarray] = []
    train(recipe, tmp_path / "uninterrupted", text, monkeypatch, Stop(10**6, uninterrupted))
    pieces: list[np.ndarray] = []
    finished = False
    while not finished:
        # The step that raises was read but not saved. The next process reads it again, so it is removed here.
        read: list[np.ndarray] = []
        try:
            stop = Stop(rng.randrange(2, 9), read)
            finished = train(recipe, tmp_path / "run", text, monkeypatch, stop, resume="auto").finished
            pieces += read
        except KeyboardInterrupt:
            pieces += read[:-1]
    assert len(pieces) == len(uninterrupted) == 16
    assert all(np.array_equal(a, b) for a, b in zip(pieces, uninterrupted, strict=True))
