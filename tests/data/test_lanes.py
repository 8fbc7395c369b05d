"""Reliability test 4, the data's side: whatever interrupts a reading, no token is repeated or skipped."""

import json
import os
import random

import numpy as np
import pytest

from longspan.data.lanes import Batch, Lanes
from longspan.errors import DataError

CASES = 10_000 if os.environ.get("LONGSPAN_TORTURE") else 200


def some_text(generator: random.Random) -> tuple[np.ndarray, list[int], int]:
    tokens = generator.randrange(2, 200)
    starts = sorted({0, *(generator.randrange(tokens) for _ in range(generator.randrange(5)))})
    return np.arange(tokens, dtype=np.uint8), starts, generator.randrange(1, tokens)


def rows_of_a_pass(lanes: Lanes, generator: random.Random) -> list[Batch]:
    batches = [lanes.next(generator.randrange(1, 30))]
    while lanes.position < lanes.row_length:
        batches.append(lanes.next(generator.randrange(1, 30)))
    return batches


def test_a_pass_reads_every_token_once_in_contiguous_rows() -> None:
    generator = random.Random(0)
    for _ in range(CASES):
        ids, starts, batch = some_text(generator)
        lanes = Lanes(ids, starts, batch)
        for passes in range(2):
            batches = rows_of_a_pass(lanes, generator)
            tokens, targets, begins = (
                np.concatenate([getattr(b, part) for b in batches], axis=1) for part in ("tokens", "targets", "starts")
            )
            rows = (len(ids) - 1) // batch
            assert np.array_equal(tokens.reshape(-1), np.arange(batch * rows))
            assert np.array_equal(targets, tokens + 1)
            expected = np.isin(tokens, starts)
            expected[:, 0] = True
            assert np.array_equal(begins, expected)
            assert lanes.passes == passes


def test_interrupted_readings_give_the_same_batches() -> None:
    generator = random.Random(1)
    for _ in range(CASES):
        ids, starts, batch = some_text(generator)
        lengths = [generator.randrange(1, 40) for _ in range(12)]
        straight = Lanes(ids, starts, batch, "print")
        lanes = Lanes(ids, starts, batch, "print")
        for length in lengths:
            if generator.random() < 0.4:
                saved = json.loads(json.dumps(lanes.state_dict()))
                lanes = Lanes(ids, starts, generator.randrange(1, len(ids)), "print")
                lanes.load_state_dict(saved)
            one, other = straight.next(length), lanes.next(length)
            for part in ("tokens", "targets", "starts"):
                assert np.array_equal(getattr(one, part), getattr(other, part))


def test_another_number_of_rows_goes_on_with_what_is_unread() -> None:
    generator = random.Random(2)
    for _ in range(CASES):
        ids, starts, batch = some_text(generator)
        lanes = Lanes(ids, starts, batch)
        seen: list[int] = []
        while True:
            if generator.random() < 0.3:
                lanes.rebatch(generator.randrange(1, 1 + min(8, len(ids) - 1)))
                lanes.load_state_dict(json.loads(json.dumps(lanes.state_dict())))
            if lanes.passes or lanes.position == lanes.row_length:
                break
            fresh = lanes.position == 0
            read = lanes.next(generator.randrange(1, 20))
            assert np.array_equal(read.targets, read.tokens + 1)
            jumps = np.diff(read.tokens, axis=1) != 1
            assert read.starts[:, 1:][jumps].all()
            assert read.starts[:, 0].all() or not fresh
            seen += read.tokens.reshape(-1).tolist()
        assert len(seen) == len(set(seen))
        left = sum(stop - start for start, stop in lanes.stretches) % lanes.batch if not lanes.passes else 8
        assert len(ids) - 1 - len(seen) <= max(left, 8)


def test_a_batch_is_int64_whatever_the_text_is() -> None:
    read = Lanes(np.arange(9, dtype=np.uint16), [0], 2).next(3)
    assert read.tokens.dtype == read.targets.dtype == np.int64
    assert read.tokens.tolist() == [[0, 1, 2], [4, 5, 6]]


def test_changed_data_is_refused_by_name() -> None:
    ids = np.arange(50)
    state = Lanes(ids, [0], 2, "one", "novels").state_dict()
    with pytest.raises(DataError, match="novels is not the text this run was trained on"):
        Lanes(ids, [0], 2, "other", "novels").load_state_dict(state)
    with pytest.raises(DataError, match="novels is not the text"):
        Lanes(ids[:-1], [0], 2, "one", "novels").load_state_dict(state)


def test_a_damaged_position_is_refused() -> None:
    lanes = Lanes(np.arange(50), [0], 2, "one")
    state = lanes.state_dict()
    odd: list[object] = [None, -1, True, "x", 1.5, [], [[0]], [[5, 3]], [[0, 50]], 10**30]
    for key in state:
        for value in odd:
            changed = {**state, key: value}
            if changed != state and (key, value) != ("passes", 10**30):  # True is 1 to Python
                with pytest.raises(DataError):
                    lanes.load_state_dict(changed)
        with pytest.raises(DataError):
            lanes.load_state_dict({k: v for k, v in state.items() if k != key})
    lanes.load_state_dict(state)


def test_too_short_a_text_says_so() -> None:
    with pytest.raises(DataError, match="has 4 tokens, too few for a batch of 4 rows"):
        Lanes(np.arange(4), [0], 4)
    with pytest.raises(DataError, match="at least one row"):
        Lanes(np.arange(4), [0], 0)
    with pytest.raises(DataError, match="at least one token"):
        Lanes(np.arange(4), [0], 1).next(0)
