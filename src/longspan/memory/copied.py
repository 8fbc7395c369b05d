"""What tokens may be copied from: the outputs of the last C positions, and the tokens that were read there.

A state keeps them as the part `copied`: hidden states [B, C, D], and tokens plus one [B, C, 1], 0 where nothing was.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from longspan.contract import State
from longspan.errors import StateError
from longspan.shapes import Bool, Float, Int, Tensor


class Candidates(NamedTuple):
    """All places but the last: the output there, the token that followed, how far back it lies from each of some
    positions, and whether that one may copy it: read before, no further back than the reach, in the same document."""

    hidden: Float[Tensor, "B K D"]
    following: Int[Tensor, "B K"]
    age: Int[Tensor, "S K"]
    seen: Bool[Tensor, "B S K"]


@dataclass(frozen=True)
class Copied:
    """[what was kept; a segment], the place where the document of each position of the segment begins, if any begins
    there, and how far back a position may copy from."""

    hidden: Float[Tensor, "B N D"]
    tokens: Int[Tensor, "B N"]  # plus one; 0 where nothing was read
    first: Int[Tensor, "B T"] | None
    reach: int

    @classmethod
    def join(
        cls,
        state: State,
        hidden: Float[Tensor, "B T D"],
        tokens: Int[Tensor, "B T"],
        starts: Bool[Tensor, "B T"] | None,
        reach: int,
    ) -> "Copied":
        before, kept = state.parts["copied"]
        hidden, read = torch.cat([before.to(hidden.dtype), hidden], dim=1), torch.cat([kept[..., 0], tokens + 1], dim=1)
        if starts is None:
            return cls(hidden, read, None, reach)
        place = torch.arange(kept.shape[1], read.shape[1], device=tokens.device)
        return cls(hidden, read, torch.where(starts, place, 0).cummax(dim=1).values, reach)

    def last(self) -> tuple[Tensor, Tensor]:
        """The part of the state after the segment, without gradient and without documents that have ended."""
        hidden, tokens = self.hidden[:, -self.reach :].detach(), self.tokens[:, -self.reach :, None]
        if self.first is None:
            return hidden, tokens
        place = torch.arange(self.tokens.shape[1], device=tokens.device)[-self.reach :]
        over = (place < self.first[:, -1:])[..., None]
        return hidden.masked_fill(over, 0.0), tokens.masked_fill(over, 0)

    def candidates(self, count: int) -> "Candidates":
        """What the last `count` positions may copy."""
        place = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        here, there = place[-count:, None], place[:-1]
        age = here - there
        seen = (self.tokens[:, None, :-1] > 0) & (age > 0) & (age <= self.reach)
        if self.first is not None:
            seen = seen & (there >= self.first[:, -count:, None])
        return Candidates(self.hidden[:, :-1], (self.tokens[:, 1:] - 1).clamp(min=0), age, seen)


def require_copies(state: State, width: int) -> None:
    """A state of a model that copies and is as wide."""
    if "copied" not in state.parts:
        raise StateError("this state has no part 'copied' and this model copies (model.copy); they must agree")
    shapes = [list(part.shape) for part in state.parts["copied"]]
    rows, places = shapes[0][:2]
    if rows != state.batch or shapes != [[rows, places, width], [rows, places, 1]]:
        raise StateError(
            f"this state's part 'copied' has the shapes {shapes}; {state.batch} rows of a model of width {width} have "
            f"[{state.batch}, C, {width}] and [{state.batch}, C, 1]"
        )


def without_copies(state: State) -> State:
    """A state's other parts."""
    return replace(state, parts={name: part for name, part in state.parts.items() if name != "copied"})


def empty_copies(config: Any, like: Tensor, batch: int) -> dict[str, tuple[Tensor, ...]]:
    """The part of a state that has read nothing: of full size, so that it has one shape throughout."""
    if not config.copy:
        return {}
    nothing = torch.zeros(batch, config.copy, 1, dtype=torch.int64, device=like.device)
    return {"copied": (like.new_zeros(batch, config.copy, config.width), nothing)}
