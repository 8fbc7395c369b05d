"""Counters of an engine."""

from dataclasses import dataclass


@dataclass
class Statistics:
    """Written by the thread of the engine only, read by any."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
