"""Streams that join and leave a batch between steps: the decoders of the server.

A stream is one row: its state and the number of tokens it has read. It reads a prompt alone, at batch 1 and in pieces
of a fixed size, then takes a slot of a batch and decodes there. Every row is bit-equal to the same stream alone:
batches have a fixed width, and nothing of a row depends on its slot or on the other rows.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from longspan.contract import Decoder, LanguageModel, State
from longspan.cuda_graphs import GraphDecoder
from longspan.decoding.fused import FusedDecoder
from longspan.decoding.ring import FusedRingDecoder, RingDecoder
from longspan.decoding.rolling import attention_of
from longspan.decoding.step_layers import step_layers
from longspan.decoding.window import WindowDecoder
from longspan.reading import Reading
from longspan.shapes import Float, Int, Tensor
from longspan.tree import map_tensors

PIECE = 128
"""Prompt tokens per call, at most: other streams wait for one call, not for a complete prompt."""


@dataclass(frozen=True)
class Stream:
    """One stream between steps. It is never modified, so keeping it is enough to return to it."""

    state: State
    read: int
    """Tokens read since the stream began."""

    @property
    def nbytes(self) -> int:
        return self.state.nbytes_per_row()

    def compact(self) -> "Stream":
        """The same without the larger buffers that its tensors may be views of."""
        return Stream(self.state.map(lambda t: t.clone(memory_format=torch.contiguous_format)), self.read)


class Slots(ABC):
    """A batch of `width` slots of one model."""

    can_undo = False
    """Whether `stream` can return a stream as it was before the last step."""

    def __init__(self, model: LanguageModel, reading: Reading, width: int) -> None:
        self.model, self.reading, self.width = model, reading, width
        self.device = next(model.parameters()).device
        self.free = list(range(width))

    @property
    def active(self) -> int:
        return self.width - len(self.free)

    @property
    def piece(self) -> int:
        """Prompt tokens per call of `prefill`."""
        return min(self.reading.segment, PIECE)

    def start(self) -> Stream:
        """A stream that has read nothing."""
        return Stream(self.model.initial_state(1, self.reading, trainable=False), 0)

    def prefill(self, stream: Stream, tokens: Sequence[int]) -> Stream:
        """The stream after at most `piece` more tokens."""
        return self.prompt_logits(stream, tokens, wanted=False)[0]

    def prompt_logits(
        self, stream: Stream, tokens: Sequence[int], *, wanted: bool = True
    ) -> tuple[Stream, Float[Tensor, "T V"] | None]:
        """The stream after at most `piece` more tokens, and the logits after each of them."""
        row = torch.tensor([list(tokens)], device=self.device)
        # `full` decides whether a mask is applied, which changes the rounding. A restored state does not know it.
        state = replace(stream.state, full=self.is_full(stream.state))
        logits = None
        with torch.no_grad():
            if wanted:
                logits, state = self.model(row, state)
            else:
                _, state = self.model.hidden_states(row, state)
        after = Stream(replace(state, shared=()), stream.read + len(tokens))
        return after, None if logits is None else logits[0]

    def is_full(self, state: State) -> bool:  # noqa: ARG002 (some need it)
        return False

    def join(self, stream: Stream) -> int:
        """Copy a stream into the lowest free slot."""
        slot = min(self.free)
        self.load(slot, stream)
        self.free.remove(slot)
        self.changed()
        return slot

    def leave(self, slot: int) -> None:
        """Free a slot."""
        self.free.append(slot)
        self.changed()

    def changed(self) -> None:  # noqa: B027 (most have nothing to do)
        """Called when slots were taken or freed."""

    @abstractmethod
    def load(self, slot: int, stream: Stream) -> None: ...

    @abstractmethod
    def stream(self, slot: int, back: int = 0) -> Stream:
        """The stream in a slot as it is now, or as it was before the last step (`back` = 1, if `can_undo`)."""

    @abstractmethod
    def step(self, tokens: Int[Tensor, "B"]) -> Float[Tensor, "B V"]:
        """The logits after one more token in every slot; those of free slots mean nothing."""


class RingSlots(Slots):
    """Slots in a rolling KV cache, for layers of four-term attention."""

    can_undo = True
    decoder: RingDecoder | FusedRingDecoder

    def __init__(self, model: LanguageModel, reading: Reading, width: int) -> None:
        super().__init__(model, reading, width)
        state = model.initial_state(width, reading, trainable=False)
        layers = step_layers(model, state)
        assert layers is not None
        fused = FusedDecoder.supports(model, layers)
        self.decoder = (FusedRingDecoder if fused else RingDecoder)(model, state, layers)
        self.stepper: Decoder = GraphDecoder(self.decoder) if fused else self.decoder

    def is_full(self, state: State) -> bool:
        return int(state.length[0]) == attention_of(state.caches[0]).positions

    def load(self, slot: int, stream: Stream) -> None:
        self.decoder.load_row(slot, stream.state, stream.read)

    def stream(self, slot: int, back: int = 0) -> Stream:
        return Stream(self.decoder.row_state(slot, back), self.decoder.read[slot] - back)

    def changed(self) -> None:
        if isinstance(self.decoder, RingDecoder):
            taken = set(range(self.width)).difference(self.free)
            self.decoder.used = max(taken, default=-1) + 1

    def step(self, tokens: Int[Tensor, "B"]) -> Float[Tensor, "B V"]:
        self.clear()
        return self.stepper.step(tokens)

    def clear(self) -> None:
        """Before every step: a free slot reads tokens too."""
        for slot in self.free:
            self.decoder.clear_row(slot)


class StateSlots(Slots):
    """Slots in a state of full size, for every family with memory: `model(tokens, state)` with one token."""

    def __init__(self, model: LanguageModel, reading: Reading, width: int) -> None:
        super().__init__(model, reading, width)
        self.reads = [0] * width
        with torch.no_grad():
            empty = model.initial_state(width, reading, trainable=False, filled=True)
            self.state = empty.map(lambda t: t.clone(memory_format=torch.contiguous_format))

    def start(self) -> Stream:
        # Of full size from the beginning, so that a stream fits its slot as it is.
        return Stream(self.model.initial_state(1, self.reading, trainable=False, filled=True), 0)

    def load(self, slot: int, stream: Stream) -> None:
        given = iter(stream.state.tensors().values())

        def put(tensor: Tensor) -> Tensor:
            changed = tensor.clone()
            changed[slot] = next(given)[0]
            return changed

        length = put(self.state.length)
        self.state = replace(self.state, caches=map_tensors(put, self.state.caches), length=length)
        self.reads[slot] = stream.read

    def stream(self, slot: int, back: int = 0) -> Stream:  # noqa: ARG002 (it cannot undo)
        row = self.state.rows([slot])
        return Stream(replace(row, shared=(), full=False), self.reads[slot])

    @torch.no_grad()
    def step(self, tokens: Int[Tensor, "B"]) -> Float[Tensor, "B V"]:
        logits, state = self.model(tokens[:, None], self.state)
        # Always masked: whether all rows are full depends on the other rows.
        self.state = replace(state, full=False)
        self.reads = [read + 1 for read in self.reads]
        return logits[:, -1]


class RowSlots(Slots):
    """Slots without a batch: every row is computed alone. For states whose size changes from step to step."""

    def __init__(self, model: LanguageModel, reading: Reading, width: int) -> None:
        super().__init__(model, reading, width)
        self.rows: dict[int, Stream] = {}

    def load(self, slot: int, stream: Stream) -> None:
        self.rows[slot] = stream

    def stream(self, slot: int, back: int = 0) -> Stream:  # noqa: ARG002 (it cannot undo)
        return self.rows[slot].compact()

    def changed(self) -> None:
        for slot in self.free:
            self.rows.pop(slot, None)

    def step(self, tokens: Int[Tensor, "B"]) -> Float[Tensor, "B V"]:
        logits: dict[int, Tensor] = {}
        for slot, stream in self.rows.items():
            self.rows[slot], found = self.prompt_logits(stream, [int(tokens[slot])])
            assert found is not None
            logits[slot] = found[-1]
        unused = torch.zeros_like(next(iter(logits.values())))
        return torch.stack([logits.get(slot, unused) for slot in range(self.width)])


class WindowSlots(RowSlots):
    """Slots of models without memory. A row computes its own window, which is wide enough to need no batch."""

    def start(self) -> Stream:
        decoder = WindowDecoder(self.model, self.model.initial_state(1, self.reading, trainable=False))
        return Stream(decoder.state(), 0)

    def prompt_logits(
        self, stream: Stream, tokens: Sequence[int], *, wanted: bool = True
    ) -> tuple[Stream, Float[Tensor, "T V"] | None]:
        decoder = WindowDecoder(self.model, stream.state)
        row = torch.tensor([list(tokens)], device=self.device)
        logits = None
        if wanted:
            logits = torch.cat([decoder.step(token) for token in row.T])
        else:
            decoder.prefill(row)
        return Stream(decoder.state(), stream.read + len(tokens)), logits


def open_slots(model: LanguageModel, width: int, reading: Reading | None = None) -> Slots:
    """A batch of `width` slots in the fastest form that the model supports."""
    reading = reading or model.reading
    if not model.has_memory(reading):
        return WindowSlots(model, reading, width)
    state = model.initial_state(1, reading, trainable=False)
    if not model.training and step_layers(model, state) is not None:
        return RingSlots(model, reading, width)
    return (StateSlots if has_fixed_size(model, reading) else RowSlots)(model, reading, width)


@torch.no_grad()
def has_fixed_size(model: LanguageModel, reading: Reading) -> bool:
    """Whether a state of full size keeps its shapes. That of the Compressive Transformer grows until a block of
    positions is compressed, at the same step in all rows."""
    state = model.initial_state(1, reading, trainable=False, filled=True)
    _, after = model(torch.zeros(1, 1, dtype=torch.int64, device=state.length.device), state)
    return all(
        new.shape == old.shape for new, old in zip(after.tensors().values(), state.tensors().values(), strict=True)
    )


def rows_are_independent(slots: Slots, steps: int = 2) -> bool:
    """Whether a stream gives the same bits alone in the first slot and between others in the last one.

    Matrix products of torch have this property at a fixed width on the machines tried, but it is not promised.
    """
    tokens = [token % slots.model.config.vocabulary for token in range(3, 3 + min(slots.piece, 24))]
    stream = slots.prefill(slots.start(), tokens)
    results = []
    for others in (0, slots.width - 1):
        taken = [slots.join(slots.prefill(slots.start(), tokens[: 1 + n % len(tokens)])) for n in range(others)]
        own = slots.join(stream)
        row = torch.arange(slots.width, device=slots.device) % slots.model.config.vocabulary
        row[own] = tokens[0]
        results.append(torch.stack([slots.step(row)[own].clone() for _ in range(steps)]))
        for slot in [*taken, own]:
            slots.leave(slot)
    return torch.equal(*results)
