"""Reading a batch of `transformers` with a longspan model: in segments, in windows, and without padding."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch.nn import functional as F

from longspan.cache import TokenWindow
from longspan.contract import LanguageModel, State
from longspan.decoding.slots import has_fixed_size
from longspan.decoding.window import last_logits
from longspan.interop.hf.cache import SplitState, merge_rows
from longspan.shapes import Bool, Float, Int, Tensor

IGNORED = -100
"""The label of positions without a loss in `transformers`."""
_WINDOW_TOKENS = 65536
"""Tokens of the windows that are read at a time."""


@dataclass(frozen=True)
class Inputs:
    """What is read, and what is wanted of it."""

    tokens: Int[Tensor, "B T"]
    starts: Bool[Tensor, "B T"] | None = None
    targets: Int[Tensor, "B T"] | None = None
    """The next tokens, or IGNORED. Losses are computed from them instead of logits."""
    keep: int = 0
    """Logits of only so many of the last positions; 0 for all."""
    hidden: bool = False
    """Whether hidden states are wanted too."""

    def part(self, columns: slice, rows: Tensor | None = None) -> "Inputs":
        def cut(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else (tensor if rows is None else tensor[rows])[:, columns]

        tokens = cut(self.tokens)
        assert tokens is not None
        return replace(self, tokens=tokens, starts=cut(self.starts), targets=cut(self.targets))


@dataclass(frozen=True)
class Outputs:
    """Logits or losses of the positions, and the state after them."""

    state: State | SplitState
    logits: Float[Tensor, "B K V"] | None = None
    losses: Float[Tensor, "B T"] | None = None
    hidden: tuple[Tensor, ...] | None = None


def read_padded(
    model: LanguageModel, inputs: Inputs, padding: Int[Tensor, "B"], state: State | SplitState | None
) -> Outputs:
    """Read rows that begin with `padding` columns which are not part of the text.

    Rows with the same padding are read together, without it. So each row gives the numbers that it gives alone, in
    every family and for every segment length. Logits and losses of padding are 0.
    """
    T = inputs.tokens.shape[1]
    state = model.initial_state(len(padding)) if state is None else state
    if isinstance(state, State) and not padding.any() and not _has_unequal_windows(state):
        return read(model, inputs, state)
    results, rows = [], []
    for chosen, part in _groups(padding, state):
        count = int(padding[chosen[0]])
        rows.append(chosen)
        results.append(Outputs(part) if count == T else read(model, inputs.part(slice(count, T), chosen), part))
    order = torch.cat(rows).argsort()

    def join(get: Callable[[Outputs], Tensor | None], size: int) -> Tensor | None:
        found = [get(result) for result in results]
        example = next((tensor for tensor in found if tensor is not None), None)
        if example is None:
            return None
        parts = []
        for tensor, chosen in zip(found, rows, strict=True):
            empty = example.new_zeros(len(chosen), 0, *example.shape[2:])
            own = empty if tensor is None else tensor
            parts.append(F.pad(own, [0, 0] * (own.dim() - 2) + [size - own.shape[1], 0]))
        return torch.cat(parts)[order]

    layers = len(next((result.hidden for result in results if result.hidden), ()))
    hidden = [join(lambda result, n=n: result.hidden and result.hidden[n], T) for n in range(layers)]  # type: ignore[misc]
    return Outputs(
        _joined(model, [cast(State, result.state) for result in results], rows),
        join(lambda result: result.logits, min(inputs.keep or T, T)),
        join(lambda result: result.losses, T),
        tuple(layer for layer in hidden if layer is not None) or None,
    )


def _has_unequal_windows(state: State) -> bool:
    """Whether rows have windows of unequal lengths. A window has no mask, so such rows must not be read together."""
    return _is_window(state) and bool((state.length != state.length[0]).any())


def _is_window(state: State) -> bool:
    return bool(state.caches) and isinstance(state.caches[0], TokenWindow)


def _groups(padding: Int[Tensor, "B"], state: State | SplitState) -> Iterator[tuple[Int[Tensor, "R"], State]]:
    """Rows that can be read together, with their state: those with the same padding, in one part of the state."""
    if isinstance(state, State):
        parts: Iterable[tuple[Tensor, State]] = [(torch.arange(len(padding), device=padding.device), state)]
    else:
        parts = zip(state.index, state.parts, strict=True)
    for own, part in parts:
        lengths = part.length if _has_unequal_windows(part) else torch.zeros_like(padding[own])
        kinds = torch.stack([padding[own], lengths], dim=1)
        for kind in kinds.unique(dim=0):
            chosen = (kinds == kind).all(dim=1).nonzero()[:, 0]
            yield own[chosen], part.rows(chosen)


def _joined(model: LanguageModel, states: Sequence[State], rows: Sequence[Int[Tensor, "..."]]) -> State | SplitState:
    """The states of groups of rows as one, if the family allows rows of unequal lengths in a state."""
    if len(states) == 1 or _is_window(states[0]) or has_fixed_size(model, states[0].reading):
        return merge_rows(states, rows)
    return SplitState(tuple(states), tuple(rows))


def read(model: LanguageModel, inputs: Inputs, state: State) -> Outputs:
    """Segment by segment with the state carried over. In evaluation mode, a model without memory is read with a sliding
    window instead, as `longspan.score` and `longspan.generate` do."""
    slides = not (model.training or model.has_memory(state.reading) or inputs.hidden) and inputs.starts is None
    return read_windows(model, inputs, state) if slides else read_segments(model, inputs, state)


def read_segments(model: LanguageModel, inputs: Inputs, state: State) -> Outputs:
    T, size = inputs.tokens.shape[1], state.reading.segment
    logits, losses, hidden = [], [], []
    for begin in range(0, T, size):
        part = inputs.part(slice(begin, begin + size))
        before = state
        if part.targets is not None:
            ignored = part.targets == IGNORED
            found, state = model.losses(part.tokens, part.targets.masked_fill(ignored, 0), before, part.starts)
            losses.append(found.masked_fill(ignored, 0.0))
        elif inputs.keep and begin + size <= T - inputs.keep:
            _, state = model.hidden_states(part.tokens, before, part.starts)  # its logits are not wanted
        else:
            scores, state = model(part.tokens, before, part.starts)
            logits.append(scores)
        if inputs.hidden:
            hidden.append(model.hidden_states(part.tokens, before, part.starts)[0])
    return Outputs(
        state,
        torch.cat(logits, dim=1)[:, -inputs.keep :] if logits else None,
        torch.cat(losses, dim=1) if losses else None,
        tuple(torch.cat(layer, dim=1) for layer in zip(*hidden, strict=True)) if hidden else None,
    )


def read_windows(model: LanguageModel, inputs: Inputs, state: State) -> Outputs:
    """Every position with a window of at most `segment` tokens that ends there, the tokens before `inputs` included."""
    T, size, reading = inputs.tokens.shape[1], state.reading.segment, state.reading
    length = int(state.length[0]) if state.caches else 0
    before = state.caches[0].tokens[:, state.caches[0].positions - length :, 0] if length else inputs.tokens[:, :0]
    text = torch.cat([before, inputs.tokens], dim=1)
    rows, total = text.shape
    first = total - (min(inputs.keep, T) if inputs.keep and inputs.targets is None else T)
    pieces = []
    if first < size:
        logits, _ = model(text[:, :size], model.initial_state(rows, reading))
        pieces.append(logits[:, first:])
    if total > size:
        windows = text.unfold(1, size, 1)[:, max(first + 1 - size, 1) :].flatten(0, 1)
        many = max(1, _WINDOW_TOKENS // size)
        last = torch.cat([last_logits(model, windows[k : k + many], reading) for k in range(0, len(windows), many)])
        pieces.append(last.unflatten(0, (rows, -1)))
    kept = text[:, -size:, None]
    after = State((TokenWindow(kept),), state.length.new_full((rows,), kept.shape[1]), reading)
    logits = torch.cat(pieces, dim=1)
    if inputs.targets is None:
        return Outputs(after, logits)
    return Outputs(after, losses=token_losses(logits, inputs.targets))


def token_losses(logits: Float[Tensor, "B T V"], targets: Int[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """-log p of the targets, 0 where they are IGNORED; in float32 or wider."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(wide.transpose(1, 2), targets, ignore_index=IGNORED, reduction="none")
