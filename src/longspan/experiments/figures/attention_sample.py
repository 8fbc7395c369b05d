"""The attention of every head at the last tokens of a short text, and the layout of that text in a figure."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from longspan.contract import LanguageModel
from longspan.errors import DataError, counted
from longspan.experiments.figures.attention import last_attention
from longspan.experiments.figures.drawing import printable
from longspan.scoring.losses import Ids
from longspan.tokenizers import Tokenizer


@dataclass(frozen=True, eq=False)
class AttentionSample:
    """`attention[n, h, i, d]` is the weight that the query before target i gives to the token d + 1 before the target.

    `visible[i]` distances are visible to it. `tokens` are the texts of the tokens up to and including the last target.
    """

    attention: NDArray[np.float32]
    visible: NDArray[np.int64]
    tokens: tuple[str, ...]

    @property
    def targets(self) -> tuple[str, ...]:
        return self.tokens[-self.attention.shape[2] :]

    def context(self, row: int) -> tuple[str, ...]:
        """The tokens visible to a target's query, in text order."""
        target = len(self.tokens) + (row if row < 0 else row - self.attention.shape[2])
        return self.tokens[target - int(self.visible[row]) : target]


def sample_attention(model: LanguageModel, ids: Ids, tokenizer: Tokenizer, rows: int) -> AttentionSample:
    """A sample from the middle of a text, after enough tokens to fill the memory if the text has them."""
    reading, remembers = model.reading, model.has_memory()
    memory = reading.memory if remembers else reading.segment
    if len(ids) < 3:
        raise DataError(
            f"the text has {counted(len(ids), 'token')}; a figure of attention needs at least 3, so use a longer text"
        )
    rows = min(rows, len(ids) - 1, len(ids) if remembers else reading.segment)
    end = min(len(ids), len(ids) // 2 + memory + rows)
    begin = max(0, end - 1 - rows - 2 * memory) if remembers else max(0, end - 1 - reading.segment)
    text = np.asarray(ids[begin:end])
    weights = last_attention(model, text[:-1], rows).numpy()
    positions = np.arange(len(text) - 1 - rows, len(text) - 1)
    window = reading.window if remembers else None
    first = 0 if not remembers else max(0, int(positions[0]) - memory)
    visible = np.minimum(positions + 1 - first, window or len(text))
    tokens = tuple(tokenizer.decode_bytes([int(token)]).decode("utf-8", errors="replace") for token in text)
    return AttentionSample(weights[..., : int(visible.max())].astype(np.float32), visible, tokens)


def label(text: str) -> str:
    """A token as an axis label. Spaces alone would be invisible, so they get a sign."""
    shown = printable(text) or "·"
    return shown if shown.strip() else "␣" * len(shown)


def wrap(tokens: Sequence[str], marks: NDArray[np.bool_], columns: int) -> list[list[tuple[str, bool]]]:
    """Tokens in lines of `columns` characters. Each line is a list of strings, marked or not."""
    characters = [
        (character, bool(mark))
        for token, mark in zip(tokens, marks, strict=True)
        for character in printable(token) or "·"
    ]
    lines = []
    for begin in range(0, len(characters), columns):
        line: list[tuple[str, bool]] = []
        for character, mark in characters[begin : begin + columns]:
            if line and line[-1][1] == mark:
                line[-1] = (line[-1][0] + character, mark)
            else:
                line.append((character, mark))
        lines.append(line)
    return lines
