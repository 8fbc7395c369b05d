"""The one idea: a text is a stream, a model reads it a segment at a time and carries a state.

    logits, state = model(tokens, state)

Everything else in the house (training, evaluation, generation, pictures) is written once, against this file.
"""

import re
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import nn

from longspan.errors import DataError, StateError
from longspan.shapes import Bool, Float, Int, Tensor

STATE_VERSION = 1
_FIXING = threading.Lock()
FLOATS = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})
UNBOUNDED = sys.maxsize
"""The `reach` of a family that no distance hides a token from."""


@dataclass(frozen=True)
class State:
    """What crosses a segment boundary: a tree of tensors whose first axis is the batch.

    `length[b]` counts the valid positions of row b; a memory keeps them at its end, so a row that has just begun
    has length 0 and sees nothing. Parts hold one tensor per layer (or per whatever the family counts). An empty row
    is all zeros with length 0, for every family: that is what lets `reset` know no family. Nothing here is ever
    changed in place, and nothing carries a gradient. `whole` says, where it is known without asking the device, that
    every position held is valid in every row: then nothing has to be masked.
    """

    length: Int[Tensor, "B"]
    parts: Mapping[str, tuple[Tensor, ...]] = field(default_factory=dict)
    version: int = STATE_VERSION
    whole: bool = False

    @property
    def batch(self) -> int:
        return self.length.shape[0]

    def require_rows(self, rows: int) -> None:
        if self.batch != rows:
            raise StateError(f"the state has {self.batch} rows and the tokens {rows}; they must agree")

    def map(self, change: Callable[[Tensor], Tensor]) -> "State":
        """The same tree with `change` applied to every tensor."""
        parts = {name: tuple(change(tensor) for tensor in tensors) for name, tensors in self.parts.items()}
        return replace(self, length=change(self.length), parts=parts)

    def detach(self) -> "State":
        return self.map(torch.Tensor.detach)

    def to(self, device: torch.device | str) -> "State":
        return self.map(lambda tensor: tensor.to(device))

    def rows(self, index: slice | Int[Tensor, "R"] | list[int]) -> "State":
        """Some rows, in the order asked for: slices and reorders the batch."""
        return self.map(lambda tensor: tensor[index])

    def reset(self, rows: Bool[Tensor, "B"]) -> "State":
        """The same state with the marked rows as before their first token."""

        def clear(tensor: Tensor) -> Tensor:
            mark = rows.to(tensor.device).view(-1, *[1] * (tensor.dim() - 1))
            return torch.where(mark, torch.zeros_like(tensor), tensor)

        return replace(self.map(clear), whole=False)

    def tensors(self) -> dict[str, Tensor]:
        """A flat view for saving: `length`, and `part.index` for every tensor, in one order however it was made."""
        flat = {f"{name}.{i}": t for name, part in sorted(self.parts.items()) for i, t in enumerate(part)}
        return {"length": self.length, **flat}

    @property
    def shapes(self) -> list[torch.Size]:
        return [tensor.shape for tensor in self.tensors().values()]

    @classmethod
    def from_tensors(cls, flat: Mapping[str, Tensor], version: Any = STATE_VERSION) -> "State":
        if version != STATE_VERSION:
            raise StateError(f"this state has format {version!r:.40}; this longspan reads format {STATE_VERSION}")
        if "length" not in flat:
            raise StateError("this state has no 'length'; it is damaged or was not saved by longspan")
        length = flat["length"]
        if length.dtype != torch.int64 or length.dim() != 1 or not len(length):
            raise StateError(f"this state's lengths are {length.dtype} of shape {list(length.shape)}; it is damaged")
        gathered: dict[str, dict[int, Tensor]] = {}
        for key, tensor in flat.items():
            if tensor.shape[:1] != length.shape:
                raise StateError(f"this state has {len(length)} rows and {key!r:.80} the shape {list(tensor.shape)}")
            if key != "length":
                found = re.fullmatch(r"(.+)\.(0|[1-9][0-9]{0,5})", key)
                if not found:
                    raise StateError(f"this state holds {key!r:.80}, which is no part of a state")
                gathered.setdefault(found[1], {})[int(found[2])] = tensor
        for name, tensors in gathered.items():
            if set(tensors) != set(range(len(tensors))):
                raise StateError(f"this state holds {name!r:.80} {sorted(tensors)}; some are missing, it is damaged")
        parts = {name: tuple(tensors[i] for i in sorted(tensors)) for name, tensors in gathered.items()}
        held = {t.shape[-2] if t.dim() > 2 else -1 for tensors in parts.values() for t in tensors}
        whole = len(held) == 1 and bool((length == held.pop()).all())
        return cls(length, parts, STATE_VERSION, whole)

    def nbytes_per_row(self) -> int:
        return sum(t.nelement() * t.element_size() for t in self.tensors().values()) // max(self.batch, 1)


@runtime_checkable
class Decoder(Protocol):
    """Reads a stream one token per row at a time; owns what it carries, and may keep it in place."""

    def read(self, tokens: Int[Tensor, "B T"]) -> None:
        """Take in many tokens at once."""
        ...

    def step(self, tokens: Int[Tensor, "B"]) -> Float[Tensor, "B V"]:
        """Logits of the next token."""
        ...

    def state(self) -> State:
        """What it has read so far, as an immutable state."""
        ...


@runtime_checkable
class Choosing(Protocol):
    """A decoder that can choose the next token on its device, in the same go as the step before it."""

    def chooser(
        self, choose: Callable[[Tensor], Tensor], generator: torch.Generator, key: Any
    ) -> Callable[[Int[Tensor, "B"]], Int[Tensor, "B"]]:
        """From a token to the next; what it returns may be overwritten by the next call."""
        ...


class Head(nn.Module, ABC):
    """From hidden states to tokens. Every softmax is of scores over `temperature`: above 1 for a model too sure of
    itself when it is scored."""

    temperature: float = 1.0

    @abstractmethod
    def logits(self, hidden: Float[Tensor, "B T D"]) -> Float[Tensor, "B T V"]:
        """Scores of every token, up to a constant log-probabilities."""

    @abstractmethod
    def losses(self, hidden: Float[Tensor, "B T D"], targets: Int[Tensor, "B T"]) -> Float[Tensor, "B T"]:
        """Negative log-probabilities of the targets in nats; a large vocabulary never needs its full logits."""


class LanguageModel(nn.Module, ABC):
    """A family: what it keeps, how it reads a segment; the rest follows."""

    Config: ClassVar[type]
    config: Any
    head: Head

    @abstractmethod
    def initial_state(self, batch: int) -> State:
        """The state before the first token: empty, not a row of zero vectors that can be attended to."""

    @abstractmethod
    def hidden_states(
        self, tokens: Int[Tensor, "B T"], state: State | None = None, starts: Bool[Tensor, "B T"] | None = None
    ) -> tuple[tuple[Tensor, ...], State]:
        """The embedding and every layer's output, [B, T, width] each; the last is what the head reads.

        `starts` marks tokens that begin a document: there that row forgets what came before.
        """

    @property
    @abstractmethod
    def reach(self) -> int:
        """How many tokens back the oldest token that can move a prediction may lie, in streaming use."""

    @property
    def parameter_count(self) -> int:
        """Numbers that are trained; a tied one counts once."""
        return sum(parameter.numel() for parameter in self.parameters())

    @property
    def state_size(self) -> int:
        """Numbers a full state holds per row."""
        return 0

    @property
    def has_memory(self) -> bool:
        """Whether the state carries anything: a family without memory is evaluated by a sliding window."""
        return True

    @property
    def worth_compiling(self) -> bool:
        """Whether a compiler gains anything; not where a kernel it cannot look into does the work."""
        return True

    @property
    def recordable(self) -> bool:
        """Whether a training step is the same work whatever it reads, asks the device nothing and leaves nothing behind
        but its state: then it can be recorded. A family says so when it has been tried."""
        return False

    @property
    def tokens_to_fill(self) -> int:
        """Tokens after which a state has the shapes of a full one."""
        return getattr(self.config, "memory", 0)

    def facts(self) -> dict[str, Any]:
        """What is worth telling of this model beyond its config and its sizes, in plain values: what it has learned,
        or found out while reading."""
        return {}

    def forward(
        self, tokens: Int[Tensor, "B T"], state: State | None = None, starts: Bool[Tensor, "B T"] | None = None
    ) -> tuple[Float[Tensor, "B T V"], State]:
        require_segment(tokens, starts=starts)
        hidden, state = self.hidden_states(tokens, state, starts)
        return self.head.logits(hidden[-1]), state

    def losses(
        self,
        tokens: Int[Tensor, "B T"],
        targets: Int[Tensor, "B T"],
        state: State | None = None,
        starts: Bool[Tensor, "B T"] | None = None,
    ) -> tuple[Float[Tensor, "B T"], State]:
        """One loss per token in nats, in the order of the tokens."""
        require_segment(tokens, targets=targets, starts=starts)
        return self.last_losses(tokens, targets, state, starts)

    def next_losses(
        self,
        tokens: Int[Tensor, "B T"],
        targets: Int[Tensor, "B"],
        state: State | None = None,
        starts: Bool[Tensor, "B T"] | None = None,
    ) -> tuple[Float[Tensor, "B"], State]:
        """The loss of the token after the segment alone, one per row: the softmax of every other is saved."""
        require_next(tokens, targets, starts)
        losses, state = self.last_losses(tokens, targets[:, None], state, starts)
        return losses[:, 0], state

    def last_losses(
        self,
        tokens: Int[Tensor, "B T"],
        targets: Int[Tensor, "B S"],
        state: State | None,
        starts: Bool[Tensor, "B T"] | None,
    ) -> tuple[Float[Tensor, "B S"], State]:
        """The losses of a segment's last S tokens; a family that predicts by more than its head overrides this."""
        hidden, state = self.hidden_states(tokens, state, starts)
        return self.head.losses(hidden[-1][:, -targets.shape[1] :], targets), state

    def training_loss(
        self,
        tokens: Int[Tensor, "B T"],
        targets: Int[Tensor, "B T"],
        state: State | None = None,
        progress: float | Float[Tensor, ""] = 0.0,  # noqa: ARG002 (for families that override this)
        starts: Bool[Tensor, "B T"] | None = None,
    ) -> tuple[Float[Tensor, ""], State]:
        """What training minimises; `progress` runs from 0 to 1 over a run, as a tensor where a step is compiled.

        A family whose training loss is more than the mean overrides this.
        """
        losses, state = self.losses(tokens, targets, state, starts)
        return losses.mean(), state

    def state_forms(self) -> list[State]:
        """One row in each form of state that this model reads; an axis of length 0 may have any length."""
        return [self.initial_state(1)]

    def room(self, state: State) -> int:  # noqa: ARG002 (a state that holds no positions has none)
        """How many positions each row of a state can hold. A family also checks here what names, shapes and types do
        not tell."""
        return 0

    def check(self, state: State) -> State:
        """The form of a state from a file. One that this model could not have made is a StateError: names, shapes,
        types, lengths and numbers are checked. Reads the state's values, so it waits for a device."""
        counts = {name: len(part) for name, part in state.parts.items()}
        forms = {str({name: len(part) for name, part in form.parts.items()}): form for form in self.state_forms()}
        form = next((form for form in forms.values() if set(form.tensors()) == set(state.tensors())), None)
        if form is None:
            raise StateError(f"this state holds {counts!s:.200}; this model reads {' or '.join(forms)}")
        for name, wanted in form.tensors().items():
            _require_like(name, state.tensors()[name], wanted, state.batch)
        room = self.room(state)
        if bool(((state.length < 0) | (state.length > room)).any()):
            raise StateError(
                f"this state has a row of length {int(state.length.min())} to {int(state.length.max())}, and holds "
                f"{room} positions"
            )
        return form

    def admit(self, state: State) -> State:
        """A state from a file, checked, on this model's device and in its types."""
        form = self.check(state)
        parts = {
            name: tuple(tensor.to(like.device, like.dtype) for tensor, like in zip(part, form.parts[name], strict=True))
            for name, part in state.parts.items()
        }
        return replace(state, length=state.length.to(form.length.device), parts=parts)

    @contextmanager
    def fixed_weights(self) -> Iterator[None]:
        """Within this block weights do not change and nothing is trained: what follows from them alone is kept.

        Several threads may be in such blocks of one model."""
        keepers: list[Any] = [module for module in self.modules() if hasattr(module, "fix")]

        def fix(fixed: bool) -> None:
            with _FIXING:
                for module in keepers:
                    module.fix(fixed)

        fix(True)
        try:
            yield
        finally:
            fix(False)

    def decoder(self, state: State | None = None, batch: int = 1) -> Decoder:
        """Reads one token per row at a time; families with a faster way override this."""
        return StreamDecoder(self, self.initial_state(batch) if state is None else state)


def require_segment(tokens: Tensor, **beside: Tensor | None) -> None:
    """Tokens are whole numbers, [B, T] with at least one row and one token, and what comes beside them is as large."""
    if tokens.dim() != 2 or tokens.is_floating_point() or tokens.dtype == torch.bool:
        shape = list(tokens.shape)
        raise DataError(f"tokens are {tokens.dtype} of shape {shape}; hand over whole numbers of shape [batch, time]")
    if not tokens.numel():
        raise DataError(f"the segment is empty, of shape {list(tokens.shape)}; hand over at least one token of one row")
    for name, tensor in beside.items():
        if tensor is not None and tensor.shape != tokens.shape:
            raise DataError(
                f"{name} have shape {list(tensor.shape)} and the tokens {list(tokens.shape)}; make them agree"
            )


def require_next(tokens: Tensor, targets: Tensor, starts: Tensor | None) -> None:
    """A segment, and one target for each of its rows."""
    require_segment(tokens, starts=starts)
    if targets.shape != tokens.shape[:1]:
        raise DataError(
            f"targets have shape {list(targets.shape)} and the tokens {len(tokens)} rows; hand over one a row"
        )


def _require_like(name: str, given: Tensor, wanted: Tensor, rows: int) -> None:
    """A tensor of a state is like that of one row: as many rows as there are, the other axes as long as they are unless
    they are empty, floats for floats and finite, and whole numbers of the same type."""
    shape = [rows, *(there or here for there, here in zip(wanted.shape[1:], given.shape[1:], strict=False))]
    floats = given.dtype in FLOATS and wanted.dtype in FLOATS
    if given.dim() != wanted.dim() or list(given.shape) != shape or not (floats or given.dtype == wanted.dtype):
        needed = [rows, *(size or "any" for size in wanted.shape[1:])]
        raise StateError(
            f"this state's {name!r:.80} is {given.dtype} of shape {list(given.shape)}, and this model needs "
            f"{wanted.dtype} of shape {needed}"
        )
    if floats and not bool(given.isfinite().all()):
        raise StateError(f"this state's {name!r:.80} holds numbers that are not finite")


def require_tokens(name: str, tokens: Tensor, most: int) -> None:
    """What a state holds of tokens lies between 0 and `most`."""
    if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) <= most:
        found = f"{int(tokens.min())} to {int(tokens.max())}"
        raise StateError(f"this state's part {name!r} holds {found}, and this model takes 0 to {most}")


class StreamDecoder:
    """The decoder any family has: the contract, called with one token."""

    def __init__(self, model: LanguageModel, state: State) -> None:
        self.model, self.carried = model, state

    @torch.no_grad()
    def read(self, tokens: Int[Tensor, "B T"]) -> None:
        self.carried = read_segments(self.model, tokens, self.carried)

    @torch.no_grad()
    def step(self, tokens: Int[Tensor, "B"]) -> Float[Tensor, "B V"]:
        logits, self.carried = self.model(tokens[:, None], self.carried)
        return logits[:, -1]

    def state(self) -> State:
        return self.carried


def read_segments(model: Any, tokens: Int[Tensor, "B T"], state: State) -> State:
    """The state after a text of any length, read a segment of the model's config at a time."""
    for piece in tokens.split(model.config.segment, dim=1):
        _, state = model.hidden_states(piece, state)
    return state
