"""Generated tokens as text: incomplete characters and possible stop strings are held back."""

from collections.abc import Sequence

from longspan.decoding.session import TextStream
from longspan.decoding.stop import StopText


class GeneratedText:
    """Bytes of tokens in, text out, until a stop string occurs, which may begin and end inside tokens."""

    def __init__(self, stops: Sequence[str] = (), held: bytes = b"") -> None:
        self.stream, self.until = TextStream(held), StopText(stops)

    @property
    def held(self) -> bytes:
        """Bytes of an incomplete character."""
        return self.stream.held

    @property
    def stopped(self) -> bool:
        return self.until.stopped

    def push(self, data: bytes) -> str:
        """The text that is complete and cannot be part of a stop string."""
        return self.until.push(self.stream.push(data))

    def close(self, *, final: bool = True) -> str:
        """The rest. An incomplete character becomes U+FFFD if nothing follows (`final`)."""
        rest = self.until.close()
        return "" if self.stopped else rest + (self.stream.close() if final else "")


def incomplete(data: bytes) -> bytes:
    """The bytes at the end of some text that begin a character."""
    stream = TextStream()
    stream.push(data)
    return stream.held
