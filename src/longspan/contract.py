"""The contract between model families and everything built on them.

A text is a stream. A model reads it one segment at a time and carries a state:

    state = model.initial_state(batch=1)
    logits, state = model(tokens, state)          # tokens [B, T], logits [B, T, V]

Training, scoring, generation and figures are written once, against the classes in this file.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from longspan.errors import ConfigError
from longspan.hints import Hints
from longspan.reading import Reading
from longspan.segments import check_segment
from longspan.shapes import Bool, Float, Int, Tensor
from longspan.tree import map_tensors, named_tensors

UNBOUNDED = sys.maxsize
"""The reach of a family with unbounded context, for example an RNN."""


@dataclass(frozen=True)
class State:
    """What a stream carries from one segment to the next.

    Every tensor's first axis is the batch. A state is never modified in place and holds no gradient. An empty row is
    all zeros with length 0 in every family, which lets `reset` work without knowing the family.
    """

    caches: tuple[Any, ...]
    """One cache per layer, a NamedTuple of tensors (`longspan.cache`), and any the model adds after them."""
    length: Int[Tensor, "B"]
    """Valid positions per row, at the end of the caches. A row that has just started has length 0 and sees nothing."""
    reading: Reading
    full: bool = False
    """All cached positions are valid in all rows, so no mask is needed. Tracked on the host to avoid a sync."""
    shared: tuple[Tensor, ...] = ()
    """Tensors without a batch axis that follow from fixed weights alone (position keys), computed once per stream."""

    @property
    def batch(self) -> int:
        return self.length.shape[0]

    def map(self, change: Callable[[Tensor], Tensor]) -> "State":
        """The same state with `change` applied to every tensor that has a batch axis."""
        return replace(self, caches=map_tensors(change, self.caches), length=change(self.length))

    def detach(self) -> "State":
        return self.map(torch.Tensor.detach)

    def to(self, device: torch.device | str) -> "State":
        """On another device, where `shared` is recomputed."""
        return replace(self.map(lambda tensor: tensor.to(device)), shared=())

    def rows(self, index: slice | Int[Tensor, "R"] | list[int]) -> "State":
        """Some rows in the given order: slices, repeats or reorders the batch."""
        return self.map(lambda tensor: tensor[index])

    def reset(self, rows: Bool[Tensor, "B"]) -> "State":
        """The marked rows start a new stream; the others continue."""

        def clear(tensor: Tensor) -> Tensor:
            mark = rows.to(tensor.device).view(-1, *[1] * (tensor.dim() - 1))
            return torch.where(mark, torch.zeros_like(tensor), tensor)

        return replace(self.map(clear), full=False)

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor with a batch axis by name, `length` and for example `0.keys`: what a file holds."""
        return {"length": self.length, **dict(named_tensors(self.caches))}

    def nbytes_per_row(self) -> int:
        return sum(t.nelement() * t.element_size() for t in self.tensors().values()) // max(self.batch, 1)


class Head(nn.Module, ABC):
    """From hidden states to tokens; scores are divided by `temperature` before the softmax."""

    @abstractmethod
    def logits(self, hidden: Float[Tensor, "B T D"], temperature: float = 1.0) -> Float[Tensor, "B T V"]:
        """Scores of all tokens: log-probabilities up to a constant."""

    @abstractmethod
    def losses(
        self, hidden: Float[Tensor, "B T D"], targets: Int[Tensor, "B T"], temperature: float = 1.0
    ) -> Float[Tensor, "B T"]:
        """Negative log-probabilities of the targets in nats; never needs the full logits of a large vocabulary."""


class LanguageModel(nn.Module, ABC):
    """A model family. Subclasses define `Config`, the state, how it processes a segment and its maximum context."""

    Config: ClassVar[type]
    settings: ClassVar[frozenset[str]] = frozenset({"segment", "temperature"})
    """The keys of `Reading` that this family uses."""
    hints: Hints = Hints()
    causal: ClassVar[bool] = True
    """Whether `encode` sees only earlier tokens."""
    spelled: ClassVar[bool] = False
    """Whether it reads the characters of tokens, so that it must know how they are spelled."""
    draws_targets: ClassVar[bool] = False
    """Whether training predicts tokens that the family draws from the segment, not the targets."""
    predicts_next: ClassVar[bool] = True
    """Whether it is trained to predict the next token in some order, so that likelihoods mean something."""
    classify_at: ClassVar[Literal["first", "last", "both"]] = "last"
    """The position of a document whose hidden state is classified: after its text, or before it. "both" if neither
    has read the complete text."""
    config: Any
    head: Head
    reading: Reading = Reading()
    """The default reading: that of training, or the one stored with the weights."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config

    @abstractmethod
    def initial_state(
        self, batch: int = 1, reading: Reading | None = None, *, trainable: bool | None = None, filled: bool = False
    ) -> State:
        """The state before the first token. It is empty: there are no zero vectors to attend to.

        `trainable` asks for caches that gradients can pass through to the weights (default: in training mode); `filled`
        for caches of their final size, all of it invalid, so that shapes stay the same from the first segment on.
        """

    @abstractmethod
    def hidden_states(
        self, tokens: Int[Tensor, "B T"], state: State | None = None, starts: Bool[Tensor, "B T"] | None = None
    ) -> tuple[tuple[Tensor, ...], State]:
        """The embedding and every layer's output, [B, T, width] each, and the state after the segment.

        The last output is what the head reads. `starts` marks tokens that start a document: the row's earlier context
        is masked.
        """

    def encode(
        self, tokens: Int[Tensor, "B T"], state: State | None = None, starts: Bool[Tensor, "B T"] | None = None
    ) -> tuple[tuple[Tensor, ...], State]:
        """Hidden states as features of a task. In a family that is not `causal`, a position also sees the tokens after
        it in its segment, up to the next document start."""
        return self.hidden_states(tokens, state, starts)

    @abstractmethod
    def reach(self, reading: Reading | None = None) -> int:
        """Distance from a prediction to the oldest token that can influence it."""

    def has_memory(self, reading: Reading | None = None) -> bool:  # noqa: ARG002 (some families need it)
        """Whether anything is carried across segments. Without memory a text is scored by a sliding window."""
        return True

    def check_reading(self, reading: Reading) -> None:
        """Raise a ConfigError if this model cannot be read this way. Families add their own checks."""
        for name in ("clamp", "discount", "same_length", "pointer"):
            if getattr(reading, name) and name not in self.settings:
                used = ", ".join(sorted(self.settings))
                raise ConfigError(
                    f"{name}={getattr(reading, name)} has no effect on this family; leave it out (the settings of this "
                    f"family are {used})"
                )

    def require_next_token(self) -> None:
        """Raise a ConfigError if the family does not predict the next token."""
        if not self.predicts_next:
            raise ConfigError(
                "this model does not predict the next token, so it cannot score or generate text; use it with longspan "
                "finetune or embed"
            )

    def spell(self, tokens: Sequence[bytes]) -> None:
        """Tell a `spelled` model the bytes of every token."""

    def facts(self) -> dict[str, Any]:
        """Numbers worth reporting that are neither config nor size: what was learned or measured."""
        return {}

    @property
    def parameter_count(self) -> int:
        """All parameters, frozen ones included; tied weights are counted once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def parameters_by_part(self) -> dict[str, int]:
        """Parameters of each top-level module; tied weights are counted under their first name."""
        parts: dict[str, int] = {}
        for name, parameter in self.named_parameters():
            part = name.partition(".")[0]
            parts[part] = parts.get(part, 0) + parameter.numel()
        return parts

    @property
    def multiplied_parameters(self) -> int:
        """Parameters in the matrix products of a training step: all but the lookup table of an untied embedding."""
        lookups = 0 if self.config.tie_embedding else self.parameters_by_part().get("embedding", 0)
        return self.parameter_count - lookups

    @property
    def inner_config(self) -> Any:
        """The config with the layers of the model: its own, or that of a model that it wraps."""
        return self.config

    def __call__(
        self, tokens: Int[Tensor, "B T"], state: State | None = None, starts: Bool[Tensor, "B T"] | None = None
    ) -> tuple[Float[Tensor, "B T V"], State]:
        """The logits of the next token at every position, and the state after the segment."""
        self.require_next_token()
        check_segment(tokens, starts=starts, vocabulary=self.config.vocabulary)
        result: tuple[Tensor, State] = super().__call__(tokens, state, starts)
        return result

    def forward(
        self, tokens: Int[Tensor, "B T"], state: State | None = None, starts: Bool[Tensor, "B T"] | None = None
    ) -> tuple[Float[Tensor, "B T V"], State]:
        hidden, state = self.hidden_states(tokens, state, starts)
        return self.head.logits(hidden[-1], state.reading.temperature), state

    def losses(
        self,
        tokens: Int[Tensor, "B T"],
        targets: Int[Tensor, "B S"],
        state: State | None = None,
        starts: Bool[Tensor, "B T"] | None = None,
        *,
        last: int | None = None,
    ) -> tuple[Float[Tensor, "B S"], State]:
        """One loss per token in nats, in token order. With `last`, targets and losses are those of the last tokens
        only, which saves the softmax of the others."""
        self.require_next_token()
        check_segment(tokens, last, targets=targets, starts=starts, vocabulary=self.config.vocabulary)
        hidden, state = self.hidden_states(tokens, state, starts)
        return self.head.losses(hidden[-1][:, -targets.shape[1] :], targets, state.reading.temperature), state

    def training_loss(
        self,
        tokens: Int[Tensor, "B T"],
        targets: Int[Tensor, "B S"],
        state: State | None = None,
        progress: float | Float[Tensor, ""] = 0.0,  # noqa: ARG002 (some families need it)
        starts: Bool[Tensor, "B T"] | None = None,
    ) -> tuple[Float[Tensor, ""], State]:
        """What training minimises: the mean loss of the last tokens, one per target, plus any terms of the family.
        `progress` goes from 0 to 1 in a run."""
        losses, state = self.losses(tokens, targets, state, starts, last=targets.shape[1])
        return losses.mean(), state


class Decoder(ABC):
    """Reads a stream one token per row at a time. It owns its buffers and may update them in place."""

    static = False
    """A step has static shapes and no host sync from now on, so that a CUDA graph can capture it (`cuda_graphs.py`)."""
    can_undo = False
    """Whether `undo` is supported."""

    @abstractmethod
    def prefill(self, tokens: Int[Tensor, "B T"]) -> None:
        """Read a prompt of any length."""

    @abstractmethod
    def launch(self, tokens: Int[Tensor, "B"]) -> Float[Tensor, "B V"]:
        """Work on the device: logits of the next token. A later step may overwrite them."""

    def advance(self) -> None:  # noqa: B027 (many decoders have none)
        """Host-side bookkeeping."""

    def step(self, tokens: Int[Tensor, "B"]) -> Float[Tensor, "B V"]:
        logits = self.launch(tokens)
        self.advance()
        return logits

    def undo(self) -> None:
        """Return to the state before the last step. Between two calls there must be a step."""
        raise NotImplementedError

    @abstractmethod
    def state(self) -> State:
        """The state after everything read so far; later steps do not change it."""

    def buffers(self) -> list[Tensor]:
        """What a static launch updates in place, and would update again if it were repeated."""
        return []
