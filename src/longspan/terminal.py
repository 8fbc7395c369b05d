"""Safe output on terminals: control characters and invisible characters are printed as escapes.

A model, a prompt, a file name or a damaged file can contain any character. A terminal obeys some of them: ESC starts
commands that move the cursor, rename the window or write to the clipboard. Pipes and files get the text unchanged.
"""

import os
import sys
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

_ESCAPED = {"Cc", "Cf", "Zl", "Zp"}  # control, format (bidi overrides, zero-width, tags), line and paragraph separators
_KEPT = frozenset("\n\t\u200c\u200d")  # Persian, Indic scripts and emoji need the zero-width (non-)joiner


def is_silent() -> bool:
    """Whether torchrun started this process and it is not the first one, which prints for all."""
    return "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("RANK", "0") != "0"


def visible(text: str) -> str:
    """The text with unsafe characters escaped: `\\x1b` for ESC, `\\u202e` for a right-to-left override."""
    if text.isprintable():
        return text
    return "".join(_escape(character) if _is_unsafe(character) else character for character in text)


def _is_unsafe(character: str) -> bool:
    return unicodedata.category(character) in _ESCAPED and character not in _KEPT


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


class _VisibleStream:
    """Wraps a stream and writes `visible` text to it; all other attributes are those of the stream."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        self.stream.write(visible(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def guarded_streams() -> Iterator[None]:
    """Inside this context, standard output and standard error write `visible` text if they are terminals."""
    originals: tuple[TextIO, TextIO] = (sys.stdout, sys.stderr)
    sys.stdout, sys.stderr = (_VisibleStream(stream) if stream.isatty() else stream for stream in originals)  # type: ignore[assignment]
    try:
        yield
    finally:
        sys.stdout, sys.stderr = originals


def unguarded(stream: TextIO) -> TextIO:
    """The original stream, for progress bars and tables: rich draws them with control characters."""
    return stream.stream if isinstance(stream, _VisibleStream) else stream


@contextmanager
def progress_line(label: str, every: float = 5.0) -> Iterator[Callable[[int, int], None]]:
    """A function that prints the part done and the time left to standard error every few seconds."""
    began = printed = time.monotonic()

    def update(done: int, total: int) -> None:
        nonlocal printed
        now = time.monotonic()
        if now - printed >= every and done:
            printed = now
            minutes, seconds = divmod(round((now - began) * (total - done) / done), 60)
            print(f"{label}: {100 * done // total}%, {minutes}:{seconds:02d} left", file=sys.stderr, flush=True)

    yield update
