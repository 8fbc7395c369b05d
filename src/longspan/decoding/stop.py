"""Stop strings: generation ends before the first of them."""

from collections.abc import Sequence

from longspan.errors import ConfigError


class StopText:
    """Text in, text out, up to the first stop string. Text that may be the start of one is held back."""

    def __init__(self, stops: Sequence[str] = ()) -> None:
        if isinstance(stops, str) or any(not isinstance(stop, str) or not stop for stop in stops):
            raise ConfigError(f"stop={stops!r:.80} must be a list of non-empty strings")
        self.stops, self.held, self.stopped = tuple(stops), "", False

    def push(self, text: str) -> str:
        """The text that is certain not to be part of a stop string. `stopped` is set once one is complete."""
        if self.stopped:
            return ""
        if not self.stops:
            return text
        text = self.held + text
        places = [at for stop in self.stops if (at := text.find(stop)) >= 0]
        if places:
            self.held, self.stopped = "", True
            return text[: min(places)]
        size = max((_overlap(text, stop) for stop in self.stops), default=0)
        self.held = text[len(text) - size :]
        return text[: len(text) - size]

    def close(self) -> str:
        """The text that was held back, when nothing follows."""
        text, self.held = self.held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` with which `stop` begins."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
