"""Segment-level recurrence (Dai et al. 2019, section 3.2): every layer reads a memory of its earlier inputs.

    h~ = [stop_gradient(m) ; h]          q = h Wq   k = h~ Wk   v = h~ Wv

Where the config has a `convolution`, h is a layer's input after it (`memory/tails.py`), and so is what is remembered;
where it has a `copy`, the last layer's outputs are remembered too, to copy tokens from (`memory/copied.py`).
How a score tells positions is the family's business; what is remembered, in which form and for how long is here.
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from longspan.contract import Decoder, LanguageModel, State, StreamDecoder, require_segment, require_tokens
from longspan.memory.copied import Copied, empty_copies, require_copies, without_copies
from longspan.memory.forms import empty_memory, held, require_memory, with_memory
from longspan.memory.segments import first_visible, remaining, trim
from longspan.memory.tails import empty_tails, mix, seen_taps
from longspan.memory.window import WindowDecoder, window_form, window_room
from longspan.shapes import Bool, Float, Int, Tensor


class Remembering(LanguageModel):
    """Layers over [memory; segment]. A family gives it its parts, and `positions`."""

    embedding: Any
    layers: nn.ModuleList
    convolutions: nn.ModuleList
    final_norm: nn.Module
    copying: Any

    def regularise(self, config: Any) -> None:
        """Make what keeps it from learning a small text by heart: dropout at both ends, penalties on the output."""
        self.word_dropout, self.input_dropout, self.output_dropout = config.make_dropouts()
        self.penalty = config.make_penalty()

    @abstractmethod
    def positions(self, keys: int) -> Callable[[Any], Any]:
        """What each layer needs to tell that many keys apart; called with the layer."""

    @property
    def reach(self) -> int:
        """Hops back from a segment's last position, one per layer, each to the oldest position it can see and on to
        the oldest that one has taken in; where it copies, another `copy` further."""
        c, place = self.config, -1
        for _ in range(c.layers):
            place = place - (c.memory - 1) if c.same_length else place // c.segment * c.segment - c.memory
            place -= c.convolution if self.has_memory else 0
        return c.copy - 1 - place

    @property
    def state_size(self) -> int:
        """Projected keys and values, tails, and what may be copied; hidden states are half of the first where heads x
        head_width is the width."""
        c = self.config
        layer = 2 * c.memory * c.heads * c.head_size + c.convolution * c.width
        return c.layers * layer + c.copy * (c.width + 1) if self.has_memory else 0

    @property
    def has_memory(self) -> bool:
        return self.config.memory > 0

    @property
    def recordable(self) -> bool:
        """With cutoffs the softmax has shapes that depend on the data."""
        return not self.config.cutoffs

    def initial_state(self, batch: int, *, projected: bool | None = None) -> State:
        """Nothing read yet: hidden states while training, projected keys and values with fixed weights."""
        projected = not self.training if projected is None else projected
        like = self.embedding.tables[0]
        state = empty_memory(self.config, like, batch, projected=projected)
        beside = empty_tails(self.config, like, batch) | empty_copies(self.config, like, batch)
        return replace(state, parts={**state.parts, **beside})

    def state_forms(self) -> list[State]:
        """Both forms of memory, with tails and copies of any number of positions; and a decoder's window of tokens."""
        forms = []
        for projected in (True, False):
            state = self.initial_state(1, projected=projected)
            parts = {
                name: tuple(tensor[:, :0] for tensor in part) if name in ("tails", "copied") else part
                for name, part in state.parts.items()
            }
            forms.append(replace(state, parts=parts))
        return [*forms, window_form(self)]

    def admit(self, state: State) -> State:
        return super().admit(state if self.config.copy else without_copies(state))

    def room(self, state: State) -> int:
        if "window" in state.parts:
            return window_room(state, self.config.vocabulary)
        require_memory(without_copies(state), state.batch, self.config.layers, self.config.convolution)
        if self.config.copy:
            require_copies(state, self.config.width)
            require_tokens("copied", state.parts["copied"][1], self.config.vocabulary)
        return held(state)

    def hidden_states(
        self, tokens: Int[Tensor, "B T"], state: State | None = None, starts: Bool[Tensor, "B T"] | None = None
    ) -> tuple[tuple[Tensor, ...], State]:
        hidden, _, state = self.read(tokens, state, starts)
        return (*hidden[:-1], self.output_dropout(hidden[-1])), state

    def forward(
        self, tokens: Int[Tensor, "B T"], state: State | None = None, starts: Bool[Tensor, "B T"] | None = None
    ) -> tuple[Float[Tensor, "B T V"], State]:
        require_segment(tokens, starts=starts)
        hidden, copied, state = self.read(tokens, state, starts)
        logits = self.head.logits(self.output_dropout(hidden[-1]))
        if copied is not None:
            logits = self.copying.logits(logits, *self.offered(copied, hidden[-1]))
        return logits, state

    def last_losses(
        self,
        tokens: Int[Tensor, "B T"],
        targets: Int[Tensor, "B S"],
        state: State | None,
        starts: Bool[Tensor, "B T"] | None,
    ) -> tuple[Float[Tensor, "B S"], State]:
        losses, _, _, state = self.score(tokens, targets, state, starts)
        return losses, state

    def training_loss(
        self,
        tokens: Int[Tensor, "B T"],
        targets: Int[Tensor, "B T"],
        state: State | None = None,
        progress: float | Float[Tensor, ""] = 0.0,  # noqa: ARG002 (nothing here changes with it)
        starts: Bool[Tensor, "B T"] | None = None,
    ) -> tuple[Float[Tensor, ""], State]:
        losses, dropped, output, state = self.score(tokens, targets, state, starts)
        loss = losses.mean()
        return loss if self.penalty is None else self.penalty(loss, dropped, output, starts), state

    def score(
        self,
        tokens: Int[Tensor, "B T"],
        targets: Int[Tensor, "B S"],
        state: State | None,
        starts: Bool[Tensor, "B T"] | None,
    ) -> tuple[Float[Tensor, "B S"], Float[Tensor, "B T D"], Float[Tensor, "B T D"], State]:
        """The losses of the last S tokens, the output as the head reads it and before its dropout, and the state.

        What is copied is chosen by outputs before their dropout: what was kept has other masks."""
        hidden, copied, state = self.read(tokens, state, starts)
        dropped, S = self.output_dropout(hidden[-1]), targets.shape[1]
        losses = self.head.losses(dropped[:, -S:], targets)
        if copied is not None:
            losses = self.copying.losses(losses, *self.offered(copied, hidden[-1][:, -S:]), targets)
        return losses, dropped, hidden[-1], state

    def offered(
        self, copied: Copied, output: Float[Tensor, "B S D"]
    ) -> tuple[Float[Tensor, "B S K"], Int[Tensor, "B K"]]:
        """Scores of what the segment's last positions may copy, by their outputs, and the tokens it would give."""
        found = copied.candidates(output.shape[1])
        return self.copying(output, found.hidden, found.age, found.seen), found.following

    def read(
        self, tokens: Int[Tensor, "B T"], state: State | None, starts: Bool[Tensor, "B T"] | None
    ) -> tuple[tuple[Tensor, ...], Copied | None, State]:
        """Every layer's input as it reads it and the last one's output before its dropout, what may be copied, and the
        state."""
        if state is None or "window" in state.parts:  # a window of tokens is a decoder's, and says nothing here
            state = self.initial_state(tokens.shape[0])
        if self.config.copy:
            require_copies(state, self.config.width)
        before, state = state, without_copies(state)
        require_memory(state, tokens.shape[0], self.config.layers, self.config.convolution)
        T, capacity = tokens.shape[1], self.config.memory
        state = trim(state, capacity)
        remembered = state.parts["keys" if "keys" in state.parts else "hidden"][0].shape[-2]
        first_key = None if starts is None and state.whole else first_visible(state.length, remembered, T, starts)
        # A tail has no past but its document's, so only a beginning within the segment hides anything.
        seen = None if starts is None else seen_taps(first_key, remembered, self.config.convolution)
        position = self.positions(remembered + T)
        hidden = [self.input_dropout(self.word_dropout(self.embedding(tokens), tokens))]
        kept: dict[str, tuple[Tensor, ...]] = dict.fromkeys(state.parts, ())
        for n, layer in enumerate(self.layers):
            memory = {name: part[n] for name, part in state.parts.items()}
            tails: dict[str, Tensor] = {}
            if self.convolutions:
                hidden[-1], tail = mix(self.convolutions[n], hidden[-1], memory["tails"], seen)
                tails = {"tails": tail if capacity else tail[:, :0]}
            keys, values, memory = with_memory(layer, hidden[-1], memory, capacity)
            kept = {name: (*kept[name], part) for name, part in (memory | tails).items()}
            hidden.append(layer(hidden[-1], keys, values, position(layer), self.config.window, first_key))
        hidden[-1] = self.final_norm(hidden[-1])
        length = state.length + T if first_key is None else remaining(first_key, remembered, capacity)
        whole = starts is None and (state.whole or capacity <= T)
        copied = None
        if self.config.copy:
            copied = Copied.join(before, hidden[-1], tokens, starts, self.config.copy)
            kept["copied"] = copied.last()
        return tuple(hidden), copied, State(length.clamp(max=capacity), kept, whole=whole)

    def decoder(self, state: State | None = None, batch: int = 1) -> Decoder:
        """One token at a time: on a window of tokens where there is no memory, else on what `ring` offers."""
        state = self.initial_state(batch, projected=True) if state is None else state
        if not self.has_memory:
            return WindowDecoder(self, state, self.config.segment)
        state = state if self.config.copy else without_copies(state)
        ages = set(state.length.tolist())
        if "keys" not in state.parts or len(ages) != 1 or self.config.copy:
            return StreamDecoder(self, state)
        require_memory(state, state.batch, self.config.layers, self.config.convolution)
        return self.ring(state, ages.pop())

    def ring(self, state: State, age: int) -> Decoder:  # noqa: ARG002 (for families whose keys may lie in any order)
        """The decoder for rows of one age."""
        return StreamDecoder(self, state)
