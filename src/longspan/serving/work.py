"""What the engine works on: a prompt to read and one or more choices to generate from it."""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from longspan.decoding.choosing import Choosing, ChoosingRow, Draws
from longspan.decoding.slots import Stream
from longspan.serving.text import GeneratedText

Reason = Literal["stop", "length", "cancelled", "error"]
_numbers = itertools.count()


@dataclass(frozen=True)
class TokenLogprob:
    """A token, its log-probability (None for the first of a text), and the most likely tokens at its place."""

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


class Piece(NamedTuple):
    """The result of one step: a token and the text that is ready."""

    text: str
    token: int
    logprob: TokenLogprob | None = None


@dataclass(frozen=True)
class Prompt:
    """The prompt was read. `logprobs` are those of its tokens, if they were requested."""

    logprobs: tuple[TokenLogprob, ...] | None


@dataclass(frozen=True)
class Finished:
    """The end of a choice. With `keep`, `stream`, `pending` and `held` continue it."""

    reason: Reason
    text: str = ""
    stream: Stream | None = None
    pending: int | None = None
    held: bytes = b""
    message: str = ""


Event = Piece | Prompt | Finished


@dataclass(eq=False)
class Choice:
    """One continuation of a prompt. Its events are passed to `emit` from the thread of the engine."""

    emit: Callable[[Event], None]
    row: ChoosingRow
    text: GeneratedText
    max_tokens: int
    logprobs: int | None = None
    """Number of most likely tokens to report; None for no log-probabilities."""
    keep: bool = False
    """Return the stream at the end: a session."""
    generated: int = 0
    pending: int = -1
    cancelled: bool = False
    stop_now: Reason | None = None
    """Finish at the next step for this reason, and keep what was generated."""
    done: bool = False
    since: float = field(default_factory=time.perf_counter)
    """The time of the last token, or of the submission."""


@dataclass(eq=False)
class Work:
    """A prompt and its choices. The prompt is read once."""

    tokens: Sequence[int]
    """The prompt. The last token stays pending: the first step of every choice reads it."""
    choices: list[Choice]
    stream: Stream | None = None
    """What the prompt continues; None for a new stream."""
    prompt_logprobs: int | None = None
    """Number of most likely tokens to report for the prompt; None for no log-probabilities."""
    number: int = field(default_factory=lambda: next(_numbers))
    read: int = 0
    found: list[TokenLogprob] = field(default_factory=list)

    @property
    def cancelled(self) -> bool:
        return all(choice.cancelled or choice.done for choice in self.choices)

    def cancel(self) -> None:
        """Stop at the next step; the engine emits nothing more for it."""
        for choice in self.choices:
            choice.cancelled = True


def choice(
    emit: Callable[[Event], None],
    *,
    choosing: Choosing | None = None,
    draws: Draws | None = None,
    seed: int = 0,
    stops: Sequence[str] = (),
    held: bytes = b"",
    max_tokens: int = 16,
    logprobs: int | None = None,
    keep: bool = False,
) -> Choice:
    row = ChoosingRow(choosing or Choosing(), draws or Draws(seed))
    return Choice(emit, row, GeneratedText(stops, held), max_tokens, logprobs, keep)
