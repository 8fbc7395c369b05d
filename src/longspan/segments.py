"""Checks of the arguments of a segment, and reading a longer text in segments."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

import torch

from longspan.errors import DataError, StateError, counted
from longspan.shapes import Int, Tensor

if TYPE_CHECKING:
    from longspan.contract import LanguageModel, State

Result = TypeVar("Result")


def check_segment(
    tokens: Tensor,
    last: int | None = None,
    *,
    targets: Tensor | None = None,
    starts: Tensor | None = None,
    vocabulary: int | None = None,
) -> None:
    """Tokens are integers [B, T] and not empty; `starts` is [B, T] and `targets` is [B, T], or [B, last] with `last`.

    On a CPU, tokens are below `vocabulary`. On a GPU that check would need a sync, and compiled code cannot branch on
    values.
    """
    if tokens.dim() != 2 or tokens.is_floating_point() or tokens.dtype == torch.bool or not tokens.numel():
        raise DataError(
            f"tokens have shape {list(tokens.shape)} and dtype {tokens.dtype}; "
            "expected integers of shape [batch, time] with at least one token"
        )
    rows, time = tokens.shape
    scored = time if last is None else last
    if not 1 <= scored <= time:
        raise DataError(f"last={last} must be between 1 and the {counted(time, 'token')} of the segment")
    for name, tensor, columns in (("targets", targets, scored), ("starts", starts, time)):
        if tensor is not None and tensor.shape != (rows, columns):
            raise DataError(f"{name} have shape {list(tensor.shape)}; expected {[rows, columns]} for these tokens")
    if vocabulary is not None and tokens.device.type == "cpu" and not torch.compiler.is_compiling():
        least, most = (int(edge) for edge in tokens.aminmax())
        if least < 0 or most >= vocabulary:
            raise DataError(
                f"tokens are between {least} and {most}; the tokens of this model are between 0 and {vocabulary - 1}"
            )


def check_rows(tokens: Tensor, rows: int) -> None:
    if tokens.shape[0] != rows:
        raise StateError(
            f"the state has {counted(rows, 'row')} and the tokens have {tokens.shape[0]}; "
            f"use a state of {counted(tokens.shape[0], 'row')}"
        )


def map_segments(
    call: Callable[..., "tuple[Result, State]"], state: "State", *tensors: Int[Tensor, "B T"]
) -> Iterator["tuple[Result, State]"]:
    """`result, state = call(*segment, state)` for one segment of the tensors after the other; yields both each time."""
    size = state.reading.segment
    for begin in range(0, tensors[0].shape[1], size):
        result, state = call(*(tensor[:, begin : begin + size] for tensor in tensors), state)
        yield result, state


def read_segments(model: "LanguageModel", tokens: Int[Tensor, "B T"], state: "State") -> "State":
    """The state after a text of any length, read one segment at a time."""
    for _, after in map_segments(model.hidden_states, state, tokens):
        state = after
    return state
