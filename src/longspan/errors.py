"""Every error a user can meet: one sentence that names the thing, the value and the way out.

The command line prints the sentence and exits with 2. Anything else that reaches a user is a mistake of ours.
"""

import difflib
from collections.abc import Iterable


class LongspanError(Exception):
    """A mistake a user can make and mend."""


class ConfigError(LongspanError):
    """A key, a value or a combination of values that cannot be."""


class UnknownNameError(ConfigError):
    """A name that is not in a list of known ones; says which one is nearest."""

    def __init__(self, what: str, name: str, known: Iterable[str]) -> None:
        known = sorted(known)
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known) or 'none'}"
        super().__init__(f"no {what} called {name!r}; {hint}")


class CheckpointError(LongspanError):
    """A model, state or checkpoint on disk that is missing, damaged, foreign or of another format."""


class DataError(LongspanError):
    """A text that is missing, empty, too short, changed, or not what it was said to be."""


class StateError(LongspanError):
    """A state that does not fit the model it was handed to."""


class GenerationError(LongspanError):
    """Text that cannot be written: the model's logits are not finite."""


class DeviceError(LongspanError):
    """A device or precision that this machine does not have."""


class TrainingError(LongspanError):
    """A run that cannot go on: a loss that is not finite, metrics that cannot be written."""
