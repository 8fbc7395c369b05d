"""A rolling KV cache whose rows are streams of different lengths, which join and leave between steps.

The slot of a token depends only on its index in its own stream: token t is in slot t % size. So neither the other rows
nor the moment at which a stream joined change the order in which its keys are summed, and the result of a row is
bit-equal to that of the same stream alone. Matrix products always have the full width for the same reason.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from longspan.cache import ConvolutionCache, KeyValueCache
from longspan.contract import State
from longspan.decoding.fused import FusedDecoder
from longspan.decoding.rolling import RollingDecoder, attention_of
from longspan.decoding.step_layers import StepLayer
from longspan.kernels.relative_attention.reference import far_discount
from longspan.reading import Reading
from longspan.shapes import Float, Int, Tensor

KEYS = 64
"""Attention reads the slots in use, rounded up to a multiple of this. Masked slots add exact zeros."""


class RingRows:
    """Rows of a rolling decoder that are loaded and read one by one. `read[b]` tokens were read by row b. Those before
    `first[b]` are not visible, and at most `memory` are."""

    memory: int
    size: int
    layers: Sequence[StepLayer]
    keys: list[Tensor]
    values: list[Tensor]
    inputs: list[Tensor]
    history: list[Tensor]
    reading: Reading
    can_undo = False
    """The last step of one row can be undone (`row_state`), but not that of all."""

    def __init__(self, model: Any, state: State, layers: Sequence[StepLayer]) -> None:
        self.read, self.first = [0] * state.batch, [0] * state.batch
        super().__init__(model, state, layers, 0)  # type: ignore[call-arg]  # that of a RollingDecoder
        self.device = self.keys[0].device

    def load(self, state: State, age: int) -> None:
        """Rows are loaded one at a time by `load_row`."""

    def load_row(self, row: int, state: State, read: int) -> None:
        """Copy the only row of a state, which has read `read` tokens."""
        valid = min(int(state.length[0]), self.memory)
        self.read[row], self.first[row] = read, read - valid
        slots = self._slots(read, valid)
        for n, cache in enumerate(state.caches[: len(self.layers)]):
            cached = attention_of(cache)
            for buffer, positions in ((self.keys[n], cached.keys), (self.values[n], cached.values)):
                buffer[row][:, slots] = positions[0, :, positions.shape[2] - valid :]
            if isinstance(cache, ConvolutionCache):
                self.inputs[n][row].zero_()
                self.inputs[n][row, self.inputs[n].shape[1] - cache.inputs.shape[1] :] = cache.inputs[0]

    def clear_row(self, row: int) -> None:
        self.read[row] = self.first[row] = 0

    def visible(self, row: int, back: int = 0) -> int:
        return min(self.read[row] - back - self.first[row], self.memory)

    def row_state(self, row: int, back: int = 0) -> State:
        """A row as a state of its own, oldest position first; with `back` = 1 as it was before the last step.

        That step has overwritten the oldest slot. No later token attends to it, so it is set to zero.
        """
        valid = self.visible(row, back)
        slots = self._slots(self.read[row] - back, valid)
        lost = bool(back) and valid == self.size

        def positions(buffer: Tensor) -> Tensor:
            found = buffer[row][None, :, slots]
            if lost:
                found[:, :, 0] = 0.0
            return found

        caches: list[Any] = [
            KeyValueCache(positions(k), positions(v)) for k, v in zip(self.keys, self.values, strict=True)
        ]
        if self.inputs:
            inputs = [history[row, 1 - back : history.shape[1] - back][None].clone() for history in self.history]
            caches = [ConvolutionCache(cache, own) for cache, own in zip(caches, inputs, strict=True)]
        length = torch.full((1,), valid, dtype=torch.int64, device=self.device)
        return State(tuple(caches), length, self.reading, full=True)

    def advance(self) -> None:
        self.read = [read + 1 for read in self.read]

    def _slots(self, read: int, valid: int) -> Int[Tensor, "P"]:
        """The slots of the last `valid` of `read` tokens, oldest first."""
        return torch.arange(read - valid, read, device=self.device) % self.size


class FusedRingDecoder(RingRows, FusedDecoder):
    """The Triton kernels with a count of tokens per row. An unused row reads whatever it is given."""

    def __init__(self, model: Any, state: State, layers: Sequence[StepLayer]) -> None:
        super().__init__(model, state, layers)
        self.count = torch.zeros(state.batch, dtype=torch.int64, device=self.device)

    def load_row(self, row: int, state: State, read: int) -> None:
        super().load_row(row, state, read)
        self.count[row] = read


class RingDecoder(RingRows, RollingDecoder):
    """Torch's attention. An unused row has read no token."""

    used = 0
    """Rows below this one are computed by the attention."""

    def __init__(self, model: Any, state: State, layers: Sequence[StepLayer]) -> None:
        super().__init__(model, state, layers)
        self.rows = torch.arange(state.batch, device=self.device)
        self.slots = torch.zeros_like(self.rows)
        self.columns: dict[int, tuple[Tensor, Tensor | None]] = {}

    def launch(self, tokens: Int[Tensor, "B"]) -> Float[Tensor, "B V"]:
        read = torch.tensor(self.read, device=self.device)
        self.slots = read % self.size
        self.columns = self._columns(read)
        return super().launch(tokens)

    def write(self, n: int, key: Float[Tensor, "B H D"], value: Float[Tensor, "B H D"]) -> None:
        self.keys[n][self.rows, :, self.slots] = key
        self.values[n][self.rows, :, self.slots] = value

    def attend(self, n: int, query: Float[Tensor, "B H D"]) -> Float[Tensor, "B E"]:
        """As in `RollingDecoder`, but every row has its own order of the slots. Column C of the position scores is
        -inf, for slots that are not visible."""
        used, scale = self.used, query.shape[-1] ** -0.5
        r, u, w = self.positions[n]
        columns, discount = self.columns[r.shape[2]]
        scores = torch.bmm(torch.add(w, query, alpha=scale).transpose(0, 1), r)
        scores = F.pad(scores, (0, 1), value=-torch.inf).transpose(0, 1)[:used]
        mask = scores.gather(2, columns[:, None].expand(-1, scores.shape[1], -1))
        if discount is not None:
            mask = mask - discount[:, None]
        keys = columns.shape[1]
        attended = F.scaled_dot_product_attention(
            (query + u)[:used].unsqueeze(2),
            self.keys[n][:used, :, :keys],
            self.values[n][:used, :, :keys],
            attn_mask=mask.unsqueeze(2),
            scale=scale,
        )
        return F.pad(attended.flatten(1), (0, 0, 0, len(query) - used))

    def _columns(self, read: Int[Tensor, "B"]) -> dict[int, tuple[Tensor, Tensor | None]]:
        """For each number C of known distances: the column of position scores that every slot needs, and the discount
        of far slots."""
        read = read[: self.used, None]
        valid = torch.tensor([self.visible(row) for row in range(self.used)], device=self.device)[:, None]
        longest = max(self.read[: self.used], default=0) + 1
        keys = min(-(-longest // KEYS) * KEYS, self.size) if longest < self.size else self.size
        distance = (read - torch.arange(keys, device=self.device)) % self.size
        found: dict[int, tuple[Tensor, Tensor | None]] = {}
        for known in {r.shape[2] for r, _, _ in self.positions}:
            columns = (known - 1 - distance).clamp(min=0).masked_fill(distance > valid, known)
            discount = None
            if self.reading.discount:
                gap = distance.clamp(min=known - 1)
                discount = far_discount(gap, known - 1, self.reading.discount).to(self.keys[0].dtype)
            found[known] = columns, discount
        return found
