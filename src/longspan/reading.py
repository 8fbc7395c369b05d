"""How a stream is read: settings that no weight depends on."""

from dataclasses import dataclass
from typing import TypedDict

from longspan.config import shown
from longspan.errors import ConfigError

LONGEST = 2**20
"""Upper bound of every length here: far beyond any use, small enough that nothing overflows."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How a stream is read. A model can be read with a longer memory, or other segments, than it was trained with.

    A state carries its reading, so `model.initial_state(1, reading)` is where it is chosen.
    """

    segment: int = 128
    """Tokens per call."""
    memory: int = 128
    """Earlier positions that a layer may attend to; 0 reads every segment on its own."""
    clamp: int = 0
    """Distances beyond this one share its position key; 0 turns the clamp off."""
    same_length: bool = False
    """Every query attends to exactly `memory` keys, itself included, at any position in the segment."""
    pointer: int = 0
    """Earlier positions that the pointer may copy a token from; 0 turns it off."""
    temperature: float = 1.0
    """Logits are divided by this before the softmax."""

    def __post_init__(self) -> None:
        for name, least in (("segment", 1), ("memory", 0), ("clamp", 0), ("pointer", 0)):
            value = getattr(self, name)
            if not least <= value <= LONGEST:
                raise ConfigError(f"{name}={shown(value)} must be between {least} and {LONGEST}")
        if not 0.01 <= self.temperature <= 100:
            raise ConfigError(
                f"temperature={shown(self.temperature)} must be between 0.01 and 100; 1 leaves logits as they are"
            )
        if self.same_length and not self.memory:
            raise ConfigError("same_length=true needs a memory above 0: it gives every query `memory` keys")
        if self.pointer and not self.memory:
            raise ConfigError(f"pointer={self.pointer} needs a memory above 0; set pointer=0 to read without memory")

    @property
    def window(self) -> int | None:
        """Keys per query with same_length: distances 0 to memory - 1. None where every earlier key is visible."""
        return self.memory if self.same_length else None


class ContextSettings(TypedDict, total=False):
    """The settings of a `Reading` as keyword arguments, without its temperature."""

    segment: int
    memory: int
    clamp: int
    same_length: bool
    pointer: int


class ReadingSettings(ContextSettings, total=False):
    """The settings of a `Reading` as keyword arguments: `load("runs/tiny", memory=3800)`."""

    temperature: float
