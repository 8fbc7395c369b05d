"""Transformer layers over [memory; segment]: the loop that families with an attention memory share."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from longspan.cache import ConvolutionCache, KeyValueCache, Memory, SegmentMask, empty_cache, next_state, open_state
from longspan.cache.pointer import PointerCache, PointerContext, empty_pointer_cache
from longspan.contract import LanguageModel, State
from longspan.errors import ConfigError, StateError
from longspan.hints import Hints
from longspan.nn.attention import Attention
from longspan.nn.dropout import WordBlanking
from longspan.nn.embedding import AdaptiveEmbedding
from longspan.nn.penalties import ActivationPenalty
from longspan.nn.pointer import Pointer
from longspan.nn.transformer import ConvolutionConfig
from longspan.reading import Reading
from longspan.segments import check_segment
from longspan.shapes import Bool, Float, Int, Tensor


@dataclass(frozen=True, kw_only=True)
class MemoryConfig(ConvolutionConfig):
    """Adds the parts that a MemoryTransformer can have. All are off by default."""

    pointer_width: int = 0
    """Width of the pointer's queries and keys; 0 for no pointer. Its reach is a reading setting."""
    embedding_dropout: float = 0.0
    """Dropout of words, at all their positions in a segment."""
    input_dropout: float | None = None
    """Dropout of the embedded input. Default: `dropout`."""
    output_dropout: float | None = None
    """Dropout of the last layer's output. Default: `dropout`."""
    projection_dropout: float = 0.0
    """Dropout of queries, keys and values."""
    ar: float = 0.0
    """Activation regularisation: penalty on large outputs (Merity et al. 2017)."""
    tar: float = 0.0
    """Temporal activation regularisation: penalty on the change between neighbours (Merity et al. 2017)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("embedding_dropout", "input_dropout", "output_dropout", "projection_dropout"):
            self.require_rate(name)
        for name in ("ar", "tar", "pointer_width"):
            self.require_not_negative(name)

    def make_attention(self) -> Attention:
        drops = (self.dropout, self.attention_dropout, self.projection_dropout)
        return Attention(self.width, self.heads, self.head_size, *drops, qk_norm=self.qk_norm)


class LayerOutputs(NamedTuple):
    """The result of all layers for one segment."""

    hidden: tuple[Tensor, ...]
    """The embedding and every layer's output, the last one before its dropout."""
    context: PointerContext | None
    state: State


class MemoryTransformer(LanguageModel):
    """A family defines its embedding, layers and head, the positions that its layers need, and how much each layer
    caches.

    Optional parts are None: a short convolution in the layers, a pointer, dropout of words, penalties.
    """

    settings = frozenset({"segment", "memory", "same_length", "temperature"})
    embedding: AdaptiveEmbedding
    layers: Any
    final_norm: nn.Module
    input_dropout: nn.Module
    output_dropout: nn.Module

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.word_dropout: nn.Module | None = None
        self.pointer: Pointer | None = None
        self.penalty: ActivationPenalty | None = None
        self.taps = 0  # earlier inputs that the convolution of every layer uses

    def add_parts(self, config: MemoryConfig) -> None:
        """Create the parts of the config."""
        rates = (config.input_dropout, config.output_dropout)
        self.input_dropout, self.output_dropout = (nn.Dropout(config.dropout if p is None else p) for p in rates)
        self.word_dropout = WordBlanking(config.vocabulary, config.embedding_dropout)
        self.pointer = Pointer(config.width, config.pointer_width) if config.pointer_width else None
        self.penalty = ActivationPenalty(config.ar, config.tar) if config.ar or config.tar else None
        self.taps = config.convolution

    @property
    def hints(self) -> Hints:  # type: ignore[override]
        return Hints(graph_safe=True)

    @abstractmethod
    def positions(self, state: State, mask: SegmentMask) -> tuple[Sequence[Any], tuple[Tensor, ...]]:
        """The position argument of each layer, and the tensors that the next segments of the stream can use again."""

    def limits(self, reading: Reading) -> list[int]:
        """Positions that each layer caches."""
        return [reading.memory] * len(self.layers)

    def has_memory(self, reading: Reading | None = None) -> bool:
        return max(self.limits(reading or self.reading)) > 0

    def check_reading(self, reading: Reading) -> None:
        super().check_reading(reading)
        if 0 < reading.memory < self.taps:
            raise ConfigError(
                f"memory={reading.memory} is shorter than model.convolution={self.taps}; use 0, or at least {self.taps}"
            )
        if reading.pointer and self.pointer is None:
            raise ConfigError(
                f"pointer={reading.pointer} needs a model with a pointer (model.pointer_width above 0); use pointer=0"
            )

    def reach(self, reading: Reading | None = None) -> int:
        """One hop per layer: to the oldest position that the layer sees, plus the taps of its convolution."""
        reading = reading or self.reading
        position, taps = -1, self.taps if self.has_memory(reading) else 0
        for limit in self.limits(reading):
            if reading.same_length:
                position -= limit - 1 + taps
            else:
                position = position // reading.segment * reading.segment - limit - taps
        return reading.pointer - 1 - position

    def initial_state(
        self, batch: int = 1, reading: Reading | None = None, *, trainable: bool | None = None, filled: bool = False
    ) -> State:
        reading = reading or self.reading
        self.check_reading(reading)
        c, like = self.config, self.embedding.tables[0]
        shape = {"width": c.width, "heads": c.heads, "head_width": c.head_size}
        shape["trainable"] = self.training if trainable is None else trainable
        caches: list[Any] = [empty_cache(like, batch, n * filled, **shape) for n in self.limits(reading)]
        if self.taps:
            inputs = like.new_zeros(batch, self.taps if self.has_memory(reading) else 0, c.width)
            caches = [ConvolutionCache(cache, inputs) for cache in caches]
        if reading.pointer:
            caches.append(empty_pointer_cache(like, batch, reading.pointer, c.width))
        length = like.new_zeros(batch, dtype=torch.int64)
        return State(tuple(caches), length, reading, full=not filled)

    def run_layers(
        self, tokens: Int[Tensor, "B T"], state: State | None, starts: Bool[Tensor, "B T"] | None
    ) -> LayerOutputs:
        types = (ConvolutionCache,) if self.taps else (Memory, KeyValueCache)
        state = open_state(self, tokens, state, *types)
        self.check_inputs(state)
        limits = self.limits(state.reading)
        cached = [cache.trim(limit) for cache, limit in zip(state.caches, limits, strict=False)]
        mask = SegmentMask.of(state, max(cache.positions for cache in cached), tokens.shape[1], starts)
        x = self.embed(tokens)
        positions, shared = self.positions(state, mask)
        hidden, caches = [x], []
        for layer, cache, position, limit in zip(self.layers, cached, positions, limits, strict=True):
            x, cache = layer(x, cache, mask.at(cache.positions, limit), position)
            hidden.append(x)
            caches.append(cache)
        hidden[-1] = self.final_norm(x)
        context = None
        if reach := state.reading.pointer:
            context = PointerContext.of(self.pointer_cache(state), hidden[-1], tokens, starts, reach)
            caches.append(context.cache())
        return LayerOutputs(tuple(hidden), context, next_state(state, mask, tuple(caches), max(limits), shared))

    def check_inputs(self, state: State) -> None:
        """The caches of a convolution have as many inputs as it has taps, or none without memory."""
        for cache in state.caches[: len(self.layers)] if self.taps else ():
            if (count := cache.inputs.shape[1]) not in (0, self.taps):
                raise StateError(
                    f"this state has the last {count} inputs of a convolution, but model.convolution={self.taps}; use "
                    f"a state from a model with convolution={self.taps}"
                )

    def embed(self, tokens: Int[Tensor, "B T"]) -> Float[Tensor, "B T E"]:
        x = self.embedding(tokens)
        return self.input_dropout(x if self.word_dropout is None else self.word_dropout(x, tokens))

    def pointer_cache(self, state: State) -> PointerCache:
        cache = state.caches[-1]
        if not isinstance(cache, PointerCache) or cache.hidden.shape[2] != self.config.width:
            raise StateError(
                f"this state has no pointer cache of width {self.config.width}; start the stream with "
                f"pointer={state.reading.pointer}, or read it with pointer=0"
            )
        return cache

    def hidden_states(
        self, tokens: Int[Tensor, "B T"], state: State | None = None, starts: Bool[Tensor, "B T"] | None = None
    ) -> tuple[tuple[Tensor, ...], State]:
        hidden, _, state = self.run_layers(tokens, state, starts)
        return (*hidden[:-1], self.output_dropout(hidden[-1])), state

    def forward(
        self, tokens: Int[Tensor, "B T"], state: State | None = None, starts: Bool[Tensor, "B T"] | None = None
    ) -> tuple[Float[Tensor, "B T V"], State]:
        hidden, context, state = self.run_layers(tokens, state, starts)
        logits = self.head.logits(self.output_dropout(hidden[-1]), state.reading.temperature)
        if context is not None:
            assert self.pointer is not None  # `check_reading`
            logits = self.pointer.logits(logits, hidden[-1], context.candidates(tokens.shape[1]))
        return logits, state

    def losses(
        self,
        tokens: Int[Tensor, "B T"],
        targets: Int[Tensor, "B S"],
        state: State | None = None,
        starts: Bool[Tensor, "B T"] | None = None,
        *,
        last: int | None = None,
    ) -> tuple[Float[Tensor, "B S"], State]:
        check_segment(tokens, last, targets=targets, starts=starts, vocabulary=self.config.vocabulary)
        losses, _, _, state = self._losses_and_outputs(tokens, targets, state, starts)
        return losses, state

    def training_loss(
        self,
        tokens: Int[Tensor, "B T"],
        targets: Int[Tensor, "B S"],
        state: State | None = None,
        progress: float | Float[Tensor, ""] = 0.0,  # noqa: ARG002
        starts: Bool[Tensor, "B T"] | None = None,
    ) -> tuple[Float[Tensor, ""], State]:
        losses, dropped, output, state = self._losses_and_outputs(tokens, targets, state, starts)
        loss, S = losses.mean(), targets.shape[1]
        if self.penalty is not None:
            starts = None if starts is None else starts[:, -S:]
            loss = self.penalty(loss, dropped[:, -S:], output[:, -S:], starts)
        return loss, state

    def _losses_and_outputs(
        self,
        tokens: Int[Tensor, "B T"],
        targets: Int[Tensor, "B S"],
        state: State | None,
        starts: Bool[Tensor, "B T"] | None,
    ) -> tuple[Float[Tensor, "B S"], Float[Tensor, "B T D"], Float[Tensor, "B T D"], State]:
        """The losses of the last S tokens, the output after and before its dropout, and the state.

        The pointer compares outputs before dropout, because those in its cache had other masks.
        """
        hidden, context, state = self.run_layers(tokens, state, starts)
        dropped, S = self.output_dropout(hidden[-1]), targets.shape[1]
        losses = self.head.losses(dropped[:, -S:], targets, state.reading.temperature)
        if context is not None:
            assert self.pointer is not None  # `check_reading`
            losses = self.pointer.losses(losses, hidden[-1][:, -S:], context.candidates(S), targets)
        return losses, dropped, hidden[-1], state
