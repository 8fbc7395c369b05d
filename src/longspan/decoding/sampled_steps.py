"""Steps of a batch with sampling. Sampled tokens stay on the device as the input of the next step, so that step can be
launched before the host has read them: a GPU computes while the host turns tokens into text."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from longspan.cuda_graphs import GraphDecoder
from longspan.decoding.choosing import ChoosingRow, choose, plan, plan_of, values_of
from longspan.decoding.host_tokens import HostTokens
from longspan.decoding.slots import RingSlots, Slots
from longspan.shapes import Float, Int, Tensor


class Launched(NamedTuple):
    """A step that may still be computed. `logits` are overwritten by the next step, `tokens` by the one after it."""

    logits: Float[Tensor, "B V"]
    chosen: Int[Tensor, "B"]
    arrived: torch.cuda.Event | None = None
    """When `chosen` is in host memory; None if reading it waits for the device anyway."""

    def tokens(self) -> list[int]:
        """The tokens that were sampled, -1 where logits were not finite. Waits for this step, not for later ones."""
        if self.arrived is not None:
            self.arrived.synchronize()
        found: list[int] = self.chosen.tolist()
        return found


class SampledSteps:
    """Steps of `slots`, sampling from the first `known` tokens."""

    ahead = False
    """Whether it is worth launching a step before the tokens of the last one were read."""

    def __init__(self, slots: Slots, known: int) -> None:
        self.slots, self.known = slots, known
        self.tokens = torch.zeros(slots.width, dtype=torch.int64, device=slots.device)

    def put(self, slot: int, token: int) -> None:
        """The next token that a slot reads: after a stream has joined."""
        self.tokens[slot].fill_(token)

    def launch(self, rows: Sequence[ChoosingRow | None], ahead: Sequence[int] | None = None) -> Launched:
        """One step. `ahead[i]` is 1 if row i was in the step before and does not know its token yet."""
        planned = plan(rows, self.slots.device, ahead)
        logits = self.slots.step(self.tokens)[:, : self.known]
        chosen = choose(logits, planned)
        self.tokens.copy_(chosen.clamp(min=0))
        return Launched(logits, chosen)


class GraphedSteps(SampledSteps):
    """Step and sampling in one CUDA graph. Per step the host copies the settings of all rows to the device, replays the
    graph and starts the copy of the tokens; nothing waits. Offsets to logits have no fixed number, so steps with some
    sample outside the graph."""

    ahead = True

    def __init__(self, slots: RingSlots, known: int) -> None:
        super().__init__(slots, known)
        stepper = slots.stepper
        assert isinstance(stepper, GraphDecoder)
        if stepper.tokens is None:
            stepper.tokens = self.tokens
        self.tokens = stepper.tokens  # the graphs read this buffer
        self.clear = slots.clear
        device, width = slots.device, slots.width
        self.values = torch.zeros(width, 3, dtype=torch.float64, device=device)
        self.chosen = torch.zeros_like(self.tokens)
        # Two: the host fills those of the next step while the device may still copy those of the last one.
        self.given = [torch.zeros(width, 3, dtype=torch.float64, pin_memory=True) for _ in range(2)]
        self.host = HostTokens(width, device)
        self.turn = 0
        self.logits: dict[bool, Tensor] = {}
        self.samplers: dict[bool, Callable[[Tensor], Tensor]] = {
            truncated: stepper.sampler(partial(self._choose, truncated=truncated), None, ("rows", truncated))
            for truncated in (False, True)
        }
        for sample in self.samplers.values():  # capture now, while no stream waits
            sample(self.tokens)

    def _choose(self, logits: Float[Tensor, "B V"], *, truncated: bool) -> Int[Tensor, "B"]:
        """Part of the graph: it keeps logits and tokens in fixed places, and returns what the next step reads."""
        self.logits[truncated] = logits = logits[:, : self.known]
        self.chosen.copy_(choose(logits, plan_of(self.values, truncated=truncated)))
        return self.chosen.clamp(min=0)

    def launch(self, rows: Sequence[ChoosingRow | None], ahead: Sequence[int] | None = None) -> Launched:
        if any(row is not None and row.has_offsets for row in rows):
            return super().launch(rows, ahead)
        values = values_of(rows, ahead)
        truncated = any(limit < 1 for _, _, limit in values)
        self.turn = 1 - self.turn
        given, found = self.given[self.turn], self.host.rows[self.turn]
        given.numpy()[:] = values
        self.values.copy_(given, non_blocking=True)
        self.clear()
        self.samplers[truncated](self.tokens)
        found.copy_(self.chosen, non_blocking=True)
        return Launched(self.logits[truncated], found, self.host.launched(self.turn))


def sampled_steps(slots: Slots, known: int) -> SampledSteps:
    """The fastest form that the slots support."""
    if isinstance(slots, RingSlots) and isinstance(slots.stepper, GraphDecoder):
        return GraphedSteps(slots, known)
    return SampledSteps(slots, known)
