"""One token at a time on a ring of projected keys and values: constant time and space however long the stream."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from longspan.contract import State, read_segments
from longspan.memory.tails import mix
from longspan.shapes import Float, Int, Tensor


@runtime_checkable
class Reader(Protocol):
    """What a ring needs of a model: Transformer-XL's parts, by name."""

    config: Any
    embedding: Any
    layers: Any
    convolutions: Any
    final_norm: Any
    head: Any

    def hidden_states(self, tokens: Tensor, state: State) -> tuple[tuple[Tensor, ...], State]: ...

    def positions(self, keys: int) -> Callable[[Any], tuple[Tensor, Tensor, Tensor]]: ...


class Ring:
    """Keys and values in slots that are overwritten oldest first.

    Attention does not care in which order its keys lie, only each key's distance matters; the slot written `a` steps
    ago is at distance a. So the keys stay where they are and the distances turn. All rows advance together: rows of
    unequal age are for the general decoder.
    """

    def __init__(self, model: Reader, state: State, age: int) -> None:
        self.model = model
        self.size = model.config.window or model.config.memory + 1
        self.keys = [_slots(keys, self.size) for keys in state.parts["keys"]]
        self.values = [_slots(values, self.size) for values in state.parts["values"]]
        shape = (state.batch, model.config.convolution, model.config.width)
        self.tails = [tail.new_zeros(shape) for tail in state.parts.get("tails", ())]
        self.fill(state, age)

    def fill(self, state: State, age: int) -> None:
        """Begin with what a state holds, in the slots that are there."""
        kept = min(age, self.size)
        self.written, self.age = kept, age
        for slots, part in ((self.keys, "keys"), (self.values, "values")):
            for ring, positions in zip(slots, state.parts[part], strict=True):
                ring[:, :, :kept] = positions[:, :, positions.shape[2] - kept :]
        for tail, given in zip(self.tails, state.parts.get("tails", ()), strict=True):
            tail.zero_()
            tail[:, tail.shape[1] - given.shape[1] :] = given

    @torch.no_grad()
    def read(self, tokens: Int[Tensor, "B T"]) -> None:
        state = read_segments(self.model, tokens, self.state())
        self.fill(state, int(state.length[0]))

    def advance(self) -> int:
        """The slot of the next token, which counts as written from now on."""
        slot, self.written = self.written % self.size, self.written + 1
        self.age = min(self.age + 1, self.model.config.memory)
        return slot

    def state(self) -> State:
        """The ring unrolled, oldest first, as a state any reader of the family can go on from."""
        begin = self.written % self.size if self.written > self.size else 0
        filled = min(self.written, self.size)

        def unroll(slots: Sequence[Tensor]) -> tuple[Tensor, ...]:
            return tuple(s[:, :, :filled].roll(-begin, dims=2)[:, :, filled - min(filled, self.age) :] for s in slots)

        keys, values = unroll(self.keys), unroll(self.values)
        length = torch.full((keys[0].shape[0],), keys[0].shape[2], dtype=torch.int64, device=keys[0].device)
        tails = {"tails": tuple(tail.clone() for tail in self.tails)} if self.tails else {}
        return State(length, {"keys": keys, "values": values, **tails})


class RingDecoder(Ring):
    """A ring on any device, through the model's own layers: distances are kept twice in a row, and the rotation that
    fits the slots is a view."""

    def __init__(self, model: Reader, state: State, age: int) -> None:
        super().__init__(model, state, age)
        with torch.no_grad():
            position = model.positions(self.size)
            self.positions = [_twice(*position(layer), self.size) for layer in model.layers]

    @torch.no_grad()
    def step(self, tokens: Int[Tensor, "B"]) -> Float[Tensor, "B V"]:
        slot = self.advance()
        filled = min(self.written, self.size)
        turn = slice(self.size - 1 - slot, self.size - 1 - slot + filled)
        h = self.model.embedding(tokens[:, None])
        for n, layer in enumerate(self.model.layers):
            if self.tails:
                h, tail = mix(self.model.convolutions[n], h, self.tails[n], None)
                self.tails[n].copy_(tail)
            keys, values = layer.keys_values(h)
            self.keys[n][:, :, slot] = keys[:, :, 0]
            self.values[n][:, :, slot] = values[:, :, 0]
            distance, u, w = self.positions[n]
            h = layer(
                h, self.keys[n][:, :, :filled], self.values[n][:, :, :filled], (distance[:, turn], u, w), None, None
            )
        return self.model.head.logits(self.model.final_norm(h))[:, -1]


def _slots(positions: Float[Tensor, "B H M D"], size: int) -> Float[Tensor, "B H S D"]:
    B, H, _, D = positions.shape
    return positions.new_zeros(B, H, size, D)


def _twice(distance: Tensor, u: Tensor, w: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Distances size-1..0, the clamped ones written out, twice in a row."""
    clamped = distance[:, :1].expand(-1, size - distance.shape[1], -1)
    once = torch.cat([clamped, distance], dim=1)
    return torch.cat([once, once], dim=1), u, w
