"""A layer for one token per row, in few kernel launches, with each weight read once.

Decoding one token is launch-bound. These two functions compute a layer of four products in five launches. They write to
given buffers and allocate nothing, so that a CUDA graph can capture a step.

On Hopper and later every kernel starts while the one before it still runs (programmatic dependent launch), loads its
weights or its older keys and values, and then waits until the one before it is complete. This is safe, because

- a kernel waits before it reads what an earlier one computed, and before it stores anything. Every program waits, so a
  kernel is complete only after all kernels before it, and none of them can still read what it overwrites;
- what is loaded before the wait is never written by one of these kernels in the same step: weights, position keys,
  `written`, and the keys and values of other slots than the newest. Steps are separated by kernels of torch (embedding
  and count), which are launched normally and let the next kernel start only when they are complete.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn

from longspan.shapes import Float, Int, Tensor

ACTIVATIONS = {None: 0, "relu": 1, "squared-relu": 2, "gelu": 3}
WIDEST = 8192  # a program holds a complete row
FEW_ROWS, ROWS = 4, 16
SLOTS, MOST_SPLITS, PROGRAMS = 32, 32, 1024
PDL = True
"""Use programmatic dependent launch where the device has it."""


class Tiles(NamedTuple):
    """The tile of a program in a product of several rows."""

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int
    splits: int = 1
    """Programs that share a long K. More than 1 only without a norm of the input."""


MOST_TILES, MOST_K_SPLITS = 4096, 8


class Scratch(NamedTuple):
    """What programs that share a product give to each other."""

    parts: Float[Tensor, "P"]
    tickets: Int[Tensor, "T"]

    @classmethod
    def of(cls, rows: int, width: int, device: torch.device) -> "Scratch":
        parts = torch.empty(MOST_K_SPLITS * rows * width, device=device)
        return cls(parts, torch.zeros(MOST_TILES, dtype=torch.int32, device=device))


class Walk(NamedTuple):
    """How a program of the attention walks over the slots."""

    slots: int
    splits: int
    warps: int
    stages: int


def tiles(N: int, K: int, early: bool) -> Tiles:
    """For about 64 rows on an H200. A short K is loaded at once. A long one is loaded in steps, or at once by several
    programs if weights are loaded `early`, before the input is known. The tiles for early weights are chosen so that
    the registers of a multiprocessor hold a program of this kernel and one of the next."""
    if early and power(K) <= 512:
        return Tiles(ROWS, 64, power(K), 8, 1) if N > 1024 else Tiles(ROWS, 16, power(K), 4, 1)
    if early and K % 512 == 0 and K <= 512 * MOST_K_SPLITS:
        return Tiles(2 * ROWS, 32, 512, 8, 1, K // 512)
    columns = 32 if N > 1024 else 16
    return Tiles(ROWS, columns, power(K), 4, 1) if K <= 512 else Tiles(ROWS, columns, 256, 4, 3)


def walk(rows: int, slots: int) -> Walk:
    if rows >= 256:
        return Walk(64, 1, 4, 2)
    return Walk(SLOTS, split_count(rows, slots), 4, 1)


@cache
def can_start_early(device: torch.device) -> bool:
    """Whether the device has programmatic dependent launch."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 9


@dataclass(frozen=True, eq=False)
class Norm:
    """The weights of a layer norm or RMS norm, for the kernels."""

    gain: Tensor
    shift: Tensor | None
    eps: float

    @classmethod
    def of(cls, module: nn.Module) -> "Norm | None":
        if isinstance(module, nn.Identity):
            return None
        assert isinstance(module, nn.LayerNorm | nn.RMSNorm)
        return cls(module.weight.detach(), getattr(module, "bias", None), module.eps or 0.0)


def linear(
    x: Float[Tensor, "B K"],
    weight: Float[Tensor, "N K"],
    bias: Float[Tensor, "N"] | None,
    out: Float[Tensor, "B N"],
    *,
    norm: Norm | None = None,
    activation: str | None = None,
    residual: Float[Tensor, "B N"] | None = None,
    residual_norm: Norm | None = None,
    scratch: Scratch | None = None,
) -> None:
    """out = residual_norm(residual) + activation(norm(x) W^T + b). With `scratch`, programs may share a long K."""
    from longspan.kernels.one_token.kernels import row_kernel, rows_kernel

    B, N, K = x.shape[0], *weight.shape
    inputs = (x, weight, bias, out, *_parts(norm), residual, *_parts(residual_norm), B)
    shape: dict[str, Any] = {
        "N": N,
        "K": K,
        "BN": power(N),
        "BK": power(K),
        "NORM": kind_of(norm),
        "ACTIVATION": ACTIVATIONS[activation],
        "RESIDUAL": residual is not None,
        "RESIDUAL_NORM": kind_of(residual_norm),
        "BIAS": bias is not None,
    }
    launch = _launch(x)
    if B < FEW_ROWS:
        columns = max(1, min(16, 8192 // power(K)))
        row_kernel[(-(-N // columns), B)](*inputs, COLUMNS=columns, num_warps=4, **shape, **launch)
        return
    tile = tiles(N, K, launch["PDL"] and x.dtype != torch.float32)
    places = -(-N // tile.columns) * -(-B // tile.rows)
    if tile.splits > 1 and (scratch is None or norm is not None or places > MOST_TILES):
        tile = tiles(N, K, False)
    if tile.splits > 1:
        assert scratch is not None
        _split_linear(x, weight, bias, out, activation, residual, residual_norm, scratch, tile)
        return
    rows_kernel[(-(-N // tile.columns), -(-B // tile.rows))](
        *inputs, COLUMNS=tile.columns, ROWS=tile.rows, INNER=tile.inner, PRECISION=_precision(x),
        num_warps=tile.warps, num_stages=tile.stages, **shape, **launch,
    )  # fmt: skip


def _split_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    activation: str | None,
    residual: Tensor | None,
    residual_norm: Norm | None,
    scratch: Scratch,
    tile: Tiles,
) -> None:
    from longspan.kernels.one_token.split_kernel import split_kernel

    B, N, K = x.shape[0], *weight.shape
    split_kernel[(-(-N // tile.columns), -(-B // tile.rows), tile.splits)](
        x, weight, bias, out, residual, *_parts(residual_norm), scratch.parts, scratch.tickets, B,
        N=N, K=K, BN=power(N), COLUMNS=tile.columns, ROWS=tile.rows, INNER=power(-(-K // tile.splits)),
        SPLITS=tile.splits, ACTIVATION=ACTIVATIONS[activation], RESIDUAL=residual is not None,
        RESIDUAL_NORM=kind_of(residual_norm), BIAS=bias is not None, PRECISION=_precision(x),
        num_warps=tile.warps, num_stages=tile.stages, **_launch(x),
    )  # fmt: skip


def rolling_attention(
    qkv: Float[Tensor, "B 3 H D"],
    keys: Float[Tensor, "B H S D"],
    values: Float[Tensor, "B H S D"],
    distance: Float[Tensor, "H C D"],
    u: Float[Tensor, "H D"],
    w: Float[Tensor, "H D"],
    written: Int[Tensor, "..."],
    partial: Float[Tensor, "R P"],
    out: Float[Tensor, "B H D"],
    discount: float = 0.0,
) -> None:
    """Four-term attention of the newest token over a rolling cache of S slots. Its key and value are stored as well.

    `written` counts earlier tokens, one for all rows or one per row. This one goes to slot `written % S`, and the
    slot written `a` steps ago is at distance a. `partial` is a buffer of shape `partial_size`. `discount` is that of
    relative_attention/reference.py.
    """
    from longspan.kernels.one_token.kernels import combine_kernel, rolling_kernel

    B, H, S, D = keys.shape
    plan, width = walk(B * H, S), power(D)
    launch = _launch(qkv)
    rolling_kernel[(B * H, plan.splits)](
        qkv, keys, values, distance, u, w, written, partial, out, H, S, distance.shape[1], distance.stride(0),
        distance.stride(1), written.stride(0) if written.dim() else 0, D**-0.5, discount,
        D=D, BD=width, SLOTS=plan.slots, SPLITS=plan.splits, STAGES=plan.stages,
        DISCOUNT=discount > 0.0 and distance.shape[1] < S, num_warps=plan.warps, **launch,
    )  # fmt: skip
    if plan.splits > 1:
        padded = power(plan.splits)
        combine_kernel[(B * H,)](partial, out, D=D, BD=width, SPLITS=plan.splits, PADDED=padded, num_warps=2, **launch)


def split_count(rows: int, slots: int) -> int:
    """Programs per row and head: enough to use the device, each with at least one block."""
    return max(1, min(MOST_SPLITS, PROGRAMS // rows, -(-slots // SLOTS)))


def partial_size(rows: int, slots: int, head_width: int) -> tuple[int, int]:
    return rows, walk(rows, slots).splits * (head_width + 2)


def _parts(norm: Norm | None) -> tuple[Any, Any, float]:
    return (None, None, 0.0) if norm is None else (norm.gain, norm.shift, norm.eps)


def kind_of(norm: Norm | None) -> int:
    """0 none, 1 layer, 2 RMS."""
    return 0 if norm is None else 1 if norm.shift is not None else 2


def _launch(x: Tensor) -> dict[str, bool]:
    early = PDL and can_start_early(x.device)
    return {"PDL": early, "launch_pdl": early}


def _precision(x: Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 else "tf32"


def power(size: int) -> int:
    return max(16, 1 << (size - 1).bit_length())
