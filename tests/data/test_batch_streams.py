"""Reliability test 4, data part: no token is repeated or skipped, however a run is interrupted."""

import json
import os
import random

import numpy as np
import pytest

from longspan.data.batch_streams import Batch, BatchStreams
from longspan.errors import DataError

CASES = 10_000 if os.environ.get("LONGSPAN_TORTURE") else 200


def random_text(generator: random.Random) -> tuple[np.ndarray, list[int], int]:
    tokens = generator.randrange(2, 200)
    starts = sorted({0, *(generator.randrange(tokens) for _ in range(generator.randrange(5)))})
    return np.arange(tokens, dtype=np.uint8), starts, generator.randrange(1, tokens)


def batches_of_a_pass(streams: BatchStreams, generator: random.Random) -> list[Batch]:
    batches = [streams.next(generator.randrange(1, 30))]
    while streams.position < streams.row_length:
        batches.append(streams.next(generator.randrange(1, 30)))
    return batches


def test_a_pass_reads_every_token_once_in_contiguous_rows() -> None:
    generator = random.Random(0)
    for _ in range(CASES):
        ids, starts, batch = random_text(generator)
        streams = BatchStreams(ids, starts, batch)
        for passes in range(2):
            batches = batches_of_a_pass(streams, generator)
            tokens, targets, begins = (
                np.concatenate([getattr(b, part) for b in batches], axis=1) for part in ("tokens", "targets", "starts")
            )
            rows = (len(ids) - 1) // batch
            assert np.array_equal(tokens.reshape(-1), np.arange(batch * rows))
            assert np.array_equal(targets, tokens + 1)
            expected = np.isin(tokens, starts)
            expected[:, 0] = True
            assert np.array_equal(begins, expected)
            assert streams.passes == passes


def test_interrupted_streams_give_the_same_batches() -> None:
    generator = random.Random(1)
    for _ in range(CASES):
        ids, starts, batch = random_text(generator)
        lengths = [generator.randrange(1, 40) for _ in range(12)]
        uninterrupted = BatchStreams(ids, starts, batch, "print")
        streams = BatchStreams(ids, starts, batch, "print")
        for length in lengths:
            if generator.random() < 0.4:
                saved = json.loads(json.dumps(streams.state_dict()))
                streams = BatchStreams(ids, starts, generator.randrange(1, len(ids)), "print")
                streams.load_state_dict(saved)
            one, other = uninterrupted.next(length), streams.next(length)
            for part in ("tokens", "targets", "starts"):
                assert np.array_equal(getattr(one, part), getattr(other, part))


def test_rebatch_continues_with_the_unread_tokens() -> None:
    generator = random.Random(2)
    for _ in range(CASES):
        ids, starts, rows = random_text(generator)
        streams = BatchStreams(ids, starts, rows)
        seen: list[int] = []
        while True:
            if generator.random() < 0.3:
                streams.rebatch(generator.randrange(1, 1 + min(8, len(ids) - 1)))
                streams.load_state_dict(json.loads(json.dumps(streams.state_dict())))
            if streams.passes or streams.position == streams.row_length:
                break
            fresh = streams.position == 0
            batch = streams.next(generator.randrange(1, 20))
            assert np.array_equal(batch.targets, batch.tokens + 1)
            jumps = np.diff(batch.tokens, axis=1) != 1
            assert batch.starts[:, 1:][jumps].all()
            assert batch.starts[:, 0].all() or not fresh
            seen += batch.tokens.reshape(-1).tolist()
        assert len(seen) == len(set(seen))
        left = sum(stop - start for start, stop in streams.ranges) % streams.batch if not streams.passes else 8
        assert len(ids) - 1 - len(seen) <= max(left, 8)


def test_an_overlap_repeats_the_tokens_before_a_batch() -> None:
    generator = random.Random(3)
    for _ in range(CASES):
        ids, starts, rows = random_text(generator)
        overlap = generator.randrange(1, 40)
        plain = BatchStreams(ids, starts, rows)
        streams = BatchStreams(ids, starts, rows, overlap=overlap)
        tokens, begins = np.zeros((rows, 0), np.int64), np.zeros((rows, 0), np.bool_)
        for _ in range(8):
            if generator.random() < 0.3:
                saved = streams.state_dict()
                streams = BatchStreams(ids, starts, generator.randrange(1, len(ids)), overlap=overlap)
                streams.load_state_dict(saved)
            if plain.position in (0, plain.row_length):  # a pass begins
                tokens, begins = tokens[:, :0], begins[:, :0]
            length = generator.randrange(1, 30)
            one, other = plain.next(length), streams.next(length)
            tokens = np.concatenate([tokens, one.tokens], axis=1)
            begins = np.concatenate([begins, one.starts], axis=1)
            assert np.array_equal(other.targets, one.targets)
            assert np.array_equal(other.tokens, tokens[:, -one.new - overlap :])
            assert np.array_equal(other.starts, begins[:, -one.new - overlap :])


def test_a_batch_is_int64_for_every_dtype_of_ids() -> None:
    batch = BatchStreams(np.arange(9, dtype=np.uint16), [0], 2).next(3)
    assert batch.tokens.dtype == batch.targets.dtype == np.int64
    assert batch.tokens.tolist() == [[0, 1, 2], [4, 5, 6]]


def test_changed_data_is_refused() -> None:
    ids = np.arange(50)
    state = BatchStreams(ids, [0], 2, "one", "novels").state_dict()
    with pytest.raises(DataError, match=r"novels .*other.*one"):
        BatchStreams(ids, [0], 2, "other", "novels").load_state_dict(state)
    with pytest.raises(DataError, match=r"novels .*one"):
        BatchStreams(ids[:-1], [0], 2, "one", "novels").load_state_dict(state)


def test_a_damaged_position_is_refused() -> None:
    streams = BatchStreams(np.arange(50), [0], 2, "one")
    state = streams.state_dict()
    invalid: list[object] = [None, -1, True, "x", 1.5, [], [[0]], [[5, 3]], [[0, 50]], 10**30]
    for key in state:
        for value in invalid:
            changed = {**state, key: value}
            if changed != state and (key, value) != ("passes", 10**30):  # True == 1 in Python
                with pytest.raises(DataError):
                    streams.load_state_dict(changed)
        with pytest.raises(DataError):
            streams.load_state_dict({k: v for k, v in state.items() if k != key})
    streams.load_state_dict(state)


def test_a_text_that_is_too_short_is_refused() -> None:
    with pytest.raises(DataError, match=r"4 tokens.*batch of 4"):
        BatchStreams(np.arange(4), [0], 4)
    with pytest.raises(DataError, match="batch=0"):
        BatchStreams(np.arange(4), [0], 0)
    with pytest.raises(DataError, match="segment=0"):
        BatchStreams(np.arange(4), [0], 1).next(0)
