"""Per-token losses of many texts, several at a time."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from longspan.config import convert
from longspan.contract import LanguageModel
from longspan.errors import ConfigError
from longspan.reading import Reading
from longspan.scoring.losses import Ids, Progress, check_text
from longspan.scoring.score import default_method, score

Losses = NDArray[np.float32]


def losses_of_texts(
    model: LanguageModel,
    texts: Sequence[Ids],
    reading: Reading | None = None,
    *,
    batch: int = 8,
    progress: Progress | None = None,
) -> list[Losses]:
    """The losses of each text, those of `score(text)`: every text starts with an empty state. Texts of fewer than two
    tokens have none.

    `batch` texts of similar length are read in parallel. All of them start at the beginning of a segment, so every text
    is cut at the same places as alone. A model without memory scores one text at a time, with a sliding window.
    """
    reading, batch = reading or model.reading, convert(int, batch, "batch")
    if batch < 1:
        raise ConfigError(f"batch={batch} must be at least 1")
    model.check_reading(reading)
    found: list[Losses] = [np.empty(max(len(ids) - 1, 0), np.float32) for ids in texts]
    scored = [k for k, ids in enumerate(texts) if len(ids) > 1]
    total, done = sum(check_text(model, texts[k]) for k in scored), 0
    if default_method(model, reading) == "sliding":
        for k in scored:
            score(model, texts[k], reading, losses=found[k])
            done = _report(progress, done + len(found[k]), total)
        return found
    scored.sort(key=lambda k: -len(texts[k]))
    for first in range(0, len(scored), batch):
        rows = scored[first : first + batch]
        for count in _read_together(model, [texts[k] for k in rows], [found[k] for k in rows], reading):
            done = _report(progress, done + count, total)
    return found


def _report(progress: Progress | None, done: int, total: int) -> int:
    if progress is not None:
        progress(done, total)
    return done


def _read_together(
    model: LanguageModel, texts: Sequence[Ids], found: Sequence[Losses], reading: Reading
) -> Iterator[int]:
    """Fill the losses of texts that are sorted by length, longest first. Yields the number of new losses."""
    device, segment = next(model.parameters()).device, reading.segment
    state, sizes = None, [len(ids) - 1 for ids in texts]
    for begin in range(0, sizes[0], segment):
        rows = sum(size > begin for size in sizes)  # the shorter texts have ended
        width = min(segment, sizes[0] - begin)
        tokens = np.zeros((rows, width + 1), np.int64)
        for row in range(rows):
            piece = texts[row][begin : begin + width + 1]
            tokens[row, : len(piece)] = piece
        both = torch.from_numpy(tokens).to(device)
        with torch.inference_mode():
            state = model.initial_state(rows, reading, trainable=False) if state is None else state
            state = state if state.batch == rows else state.rows(slice(0, rows))
            losses, state = model.losses(both[:, :-1], both[:, 1:], state)
        values, new = losses.float().cpu().numpy(), 0
        for row in range(rows):
            count = min(width, sizes[row] - begin)
            found[row][begin : begin + count] = values[row, :count]
            new += count
        yield new
