"""Counters of an engine."""

from collections.abc import Callable
from dataclasses import dataclass


def _ignore(seconds: float) -> None:
    pass


@dataclass
class Statistics:
    """Written by the thread of the engine only, read by any."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    first_token: Callable[[float], None] = _ignore
    """Gets the seconds from the submission of a work to the first token of a choice."""
    next_token: Callable[[float], None] = _ignore
    """Gets the seconds between two tokens of a choice."""
