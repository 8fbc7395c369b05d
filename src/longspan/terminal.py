"""Safe output on terminals: control characters and invisible characters are printed as escapes.

A model, a prompt, a file name or a damaged file can contain any character. A terminal obeys some of them: ESC starts
commands that move the cursor, rename the window or write to the clipboard. Pipes and files get the text unchanged.
"""

import os
import sys
import threading
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

_ESCAPED = {"Cc", "Cf", "Zl", "Zp"}  # control, format (bidi overrides, zero-width, tags), line and paragraph separators
_KEPT = frozenset("\n\t\u200c\u200d")  # Persian, Indic scripts and emoji need the zero-width (non-)joiner
PLAIN_SECONDS = 10.0
"""The time between two lines of progress where there is no terminal for a bar."""


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
def progress_line(label: str, every: float | None = None) -> Iterator[Callable[[int, int | None], None]]:
    """Prints a line to standard error every ten seconds: the part done and the time left, or the time so far.

    Yields a function to call with the amount done and the total. The lines come from a thread, so that they also appear
    while a single step takes long.
    """
    began, ended, pause = time.monotonic(), threading.Event(), PLAIN_SECONDS if every is None else every
    state: tuple[int, int | None] = (0, None)
    stream = sys.stderr

    def update(done: int, total: int | None) -> None:
        nonlocal state
        state = (done, total)

    def report() -> None:
        while not ended.wait(pause):
            print(f"{label}: {_shown_progress(*state, time.monotonic() - began)}", file=stream, flush=True)

    reporter = threading.Thread(target=report, daemon=True)
    if not is_silent():
        reporter.start()
    try:
        yield update
    finally:
        ended.set()
        if reporter.is_alive():
            reporter.join()


def _shown_progress(done: int, total: int | None, seconds: float) -> str:
    if not done or not total:
        return f"{_clock(seconds)} so far"
    return f"{100 * done // total}%, {_clock(seconds * (total - done) / done)} left"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"
