"""What a terminal gets: text as it is, control characters and invisible characters as escapes.

A model, a prompt, a file name or a damaged file can contain any character. A terminal obeys some of them: ESC starts
commands that move the cursor, rename the window or write to the clipboard. Pipes and files get all of them unchanged.
"""

import sys
import unicodedata
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

_ESCAPED = {"Cc", "Cf", "Zl", "Zp"}  # control, format (bidi overrides, zero-width, tags), line and paragraph separators
_KEPT = frozenset("\n\t\u200c\u200d")  # Persian, Indic scripts and emoji are spelled with the zero-width (non-)joiner


def visible(text: str) -> str:
    """The same text with `\\x1b` for ESC, `\\u202e` for a right-to-left override and so on."""
    if text.isprintable():
        return text
    return "".join(_escape(letter) if _is_escaped(letter) else letter for letter in text)


def _is_escaped(letter: str) -> bool:
    return unicodedata.category(letter) in _ESCAPED and letter not in _KEPT


def _escape(letter: str) -> str:
    return letter.encode("unicode_escape").decode("ascii")


class _VisibleStream:
    """A stream that writes `visible` text; everything else is the stream's own."""

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
    """Within this block standard output and standard error write `visible` text where they are terminals."""
    before: tuple[TextIO, TextIO] = (sys.stdout, sys.stderr)
    sys.stdout, sys.stderr = (_VisibleStream(stream) if stream.isatty() else stream for stream in before)  # type: ignore[assignment]
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def unguarded(stream: TextIO) -> TextIO:
    """The stream itself: for progress bars and tables, which rich draws with control characters."""
    return stream.stream if isinstance(stream, _VisibleStream) else stream
