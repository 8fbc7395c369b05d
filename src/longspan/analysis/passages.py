"""A stretch of text with every head's attention at its last tokens, and how it is written down to be read along."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from longspan.analysis.attention import attention_at
from longspan.analysis.drawing import readable
from longspan.contract import LanguageModel
from longspan.errors import DataError
from longspan.evaluation.likelihood import Ids
from longspan.tokens import Tokenizer


@dataclass(frozen=True, eq=False)
class Passage:
    """`attention[n, h, i, d]` of the query before target i to the token d places before that target, less one.

    `seen[i]` distances are visible to it; `tokens` are the texts of the tokens up to the last target, it included.
    """

    attention: NDArray[np.float32]
    seen: NDArray[np.int64]
    tokens: tuple[str, ...]

    @property
    def targets(self) -> tuple[str, ...]:
        return self.tokens[-self.attention.shape[2] :]

    def memory_of(self, row: int) -> tuple[str, ...]:
        """The tokens a target's query saw, in the order of the text."""
        place = len(self.tokens) + (row if row < 0 else row - self.attention.shape[2])
        return self.tokens[place - int(self.seen[row]) : place]


def take_passage(model: LanguageModel, ids: Ids, tokenizer: Tokenizer, rows: int) -> Passage:
    """A passage from the middle of a text, with as much before it as the memory holds where there is as much."""
    memory = getattr(model.config, "memory", 0) if model.has_memory else model.config.segment
    if len(ids) < 3:
        raise DataError(f"the text has {len(ids)} tokens; a passage needs at least 3")
    rows = min(rows, len(ids) - 1, len(ids) if model.has_memory else model.config.segment)
    end = min(len(ids), len(ids) // 2 + memory + rows)
    begin = max(0, end - 1 - rows - 2 * memory) if model.has_memory else max(0, end - 1 - model.config.segment)
    text = np.asarray(ids[begin:end])
    weights = attention_at(model, text[:-1], rows).numpy()
    places = np.arange(len(text) - 1 - rows, len(text) - 1)
    window = getattr(model.config, "window", None)
    first = 0 if not model.has_memory else max(0, int(places[0]) - memory)
    seen = np.minimum(places + 1 - first, window or len(text))
    farthest = int(seen.max())
    names = tuple(tokenizer.decode_bytes([int(token)]).decode("utf-8", errors="replace") for token in text)
    return Passage(weights[..., :farthest].astype(np.float32), seen, names)


def label(text: str) -> str:
    """A token that stands alone: one of spaces only would be invisible."""
    shown = readable(text) or "·"
    return shown if shown.strip() else "␣" * len(shown)


def lay_out(tokens: Sequence[str], marks: NDArray[np.bool_], columns: int) -> list[list[tuple[str, bool]]]:
    """Tokens in lines of so many characters: stretches of text, each with whether it is marked."""
    letters = [
        (letter, bool(mark)) for token, mark in zip(tokens, marks, strict=True) for letter in readable(token) or "·"
    ]
    lines = []
    for begin in range(0, len(letters), columns):
        line: list[tuple[str, bool]] = []
        for letter, mark in letters[begin : begin + columns]:
            if line and line[-1][1] == mark:
                line[-1] = (line[-1][0] + letter, mark)
            else:
                line.append((letter, mark))
        lines.append(line)
    return lines
