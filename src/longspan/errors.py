"""The errors for users: one sentence with the thing, the value and the fix.

The command line prints the sentence and exits with 2. Any other exception that reaches a user is a bug.
"""

import difflib
from collections.abc import Iterable


def counted(count: int, noun: str) -> str:
    """`1 token` or `2 tokens`."""
    return f"{count} {noun}{'s' * (count != 1)}"


class LongspanError(Exception):
    """A problem the user can fix."""


class ConfigError(LongspanError):
    """An invalid key, value or combination of values."""


class UnknownNameError(ConfigError):
    """A name that is not in a list of known names. The message suggests `meant`, or the closest one, and ends with
    `otherwise`, another thing to do."""

    def __init__(
        self, what: str, name: str, known: Iterable[str], *, meant: str | None = None, otherwise: str = ""
    ) -> None:
        known = sorted(known)
        # The table that all names share is left out, or any two of its keys would look alike.
        table = name[: name.rfind(".") + 1]
        table = table if all(key.startswith(table) for key in known) else ""
        rest = {key.removeprefix(table): key for key in known}
        near = difflib.get_close_matches(name.removeprefix(table), rest, n=1, cutoff=0.6)
        meant = meant or (rest[near[0]] if near else None)
        hint = f"did you mean {meant!r}?" if meant else f"known: {', '.join(known) or 'none'}"
        super().__init__(f"no {what} called {name!r}; {hint}{f' ({otherwise})' * bool(otherwise)}")


class CheckpointError(LongspanError):
    """A model, state or checkpoint on disk that is missing, damaged, or in an unknown format."""


class DataError(LongspanError):
    """A text that is missing, empty, too short or changed, or has a wrong checksum."""


class DataWarning(UserWarning):
    """A text or tokenizer that can be used, but probably not as the user intended."""


class StateError(LongspanError):
    """A state that does not fit the model."""


class GenerationError(LongspanError):
    """Text that cannot be generated, because the model's logits are not finite."""


class DeviceError(LongspanError):
    """A device or precision that this machine does not have."""


class TrainingError(LongspanError):
    """A run that cannot continue, for example because the loss is not finite."""


def not_read(what: object, error: OSError, kind: type[LongspanError] = DataError) -> LongspanError:
    """The error of a file that cannot be read; `what` is its path, or a few words with the path."""
    if isinstance(error, FileNotFoundError):
        fix = "check the name"
    elif isinstance(error, IsADirectoryError):
        fix = "name a file in it"
    elif isinstance(error, PermissionError):
        fix = "change its permissions, or leave it out"
    else:
        fix = "check the disk"
    return kind(f"{what} cannot be read: {error.strerror or error}; {fix}")
