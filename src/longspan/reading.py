"""How a stream is read: settings that no weight depends on."""

from dataclasses import dataclass
from typing import TypedDict

from longspan.config import convert_fields, shown
from longspan.errors import ConfigError

LONGEST = 2**20
"""Upper bound of every length here: far beyond any use, small enough that nothing overflows."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How a stream is read. A model can be read with a longer memory, or other segments, than it was trained with.

    A state carries its reading: pass it to `model.initial_state(1, reading)`.
    """

    segment: int = 128
    """Tokens per call."""
    memory: int = 128
    """Earlier positions that a layer may attend to; 0: segments are independent."""
    clamp: int = 0
    """Distances beyond this one share its position key; 0 turns the clamp off."""
    discount: float = 0.0
    """Scores of distances d beyond the clamp are lowered by discount * log(d / clamp); 0 turns it off."""
    same_length: bool = False
    """Every query attends to exactly `memory` keys, itself included, at any position in the segment."""
    pointer: int = 0
    """Earlier positions that the pointer may copy a token from; 0 turns it off."""
    temperature: float = 1.0
    """Logits are divided by this before the softmax."""

    def __post_init__(self) -> None:
        convert_fields(self)
        for name, least in (("segment", 1), ("memory", 0), ("clamp", 0), ("pointer", 0)):
            value = getattr(self, name)
            if not least <= value <= LONGEST:
                raise ConfigError(f"{name}={shown(value)} must be between {least} and {LONGEST}")
        if not 0.01 <= self.temperature <= 100:
            raise ConfigError(
                f"temperature={shown(self.temperature)} must be between 0.01 and 100; 1 leaves logits as they are"
            )
        if not 0 <= self.discount <= 100:
            raise ConfigError(f"discount={shown(self.discount)} must be between 0 and 100; 0 turns it off")
        if self.discount and not self.clamp:
            raise ConfigError(
                f"discount={shown(self.discount)} needs a clamp; set clamp to the longest distance in training"
            )
        if self.same_length and not self.memory:
            raise ConfigError(
                "same_length=true needs a memory above 0, because every query attends to exactly `memory` keys; to "
                "read without memory, also set same_length=false (--no-same-length)"
            )
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
    discount: float
    same_length: bool
    pointer: int


class ReadingSettings(ContextSettings, total=False):
    """The settings of a `Reading` as keyword arguments: `load("runs/tiny", memory=3800)`."""

    temperature: float
