"""Generated tokens as text: incomplete characters and possible stop sequences are held back."""

from collections.abc import Sequence

from longspan.decoding.session import TextStream


class StopText:
    """Tokens in, text out, until a stop sequence occurs, which may begin and end inside tokens."""

    def __init__(self, stops: Sequence[str] = (), held: bytes = b"") -> None:
        self.stops = tuple(stops)
        self.stream = TextStream(held)
        self.buffer = ""
        self.stopped = False

    @property
    def held(self) -> bytes:
        """Bytes of an incomplete character."""
        return self.stream.held

    def push(self, data: bytes) -> str:
        """The text that is complete and cannot be part of a stop sequence."""
        self.buffer += self.stream.push(data)
        found = [(self.buffer.find(stop), stop) for stop in self.stops if stop in self.buffer]
        if found:
            self.stopped = True
            ready, self.buffer = self.buffer[: min(found)[0]], ""
            return ready
        keep = max((_overlap(self.buffer, stop) for stop in self.stops), default=0)
        cut = len(self.buffer) - keep
        ready, self.buffer = self.buffer[:cut], self.buffer[cut:]
        return ready

    def close(self, *, final: bool = True) -> str:
        """The rest. An incomplete character becomes U+FFFD if nothing follows (`final`)."""
        rest, self.buffer = self.buffer, ""
        return "" if self.stopped else rest + (self.stream.close() if final else "")


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of `text` that begin `stop`."""
    for size in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0


def incomplete(data: bytes) -> bytes:
    """The bytes at the end of some text that begin a character."""
    stream = TextStream()
    stream.push(data)
    return stream.held
