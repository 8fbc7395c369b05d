"""c_t = a_t c_{t-1} + b_t for every unit: the definition, and a scan of depth log T."""

from typing import Any

import torch

from longspan.shapes import Float, Tensor


def stepped_recurrence(
    a: Float[Tensor, "B T D"], b: Float[Tensor, "B T D"], c: Float[Tensor, "B D"]
) -> Float[Tensor, "B T D"]:
    """The definition: one step per token."""
    steps = []
    for a_t, b_t in zip(a.unbind(1), b.unbind(1), strict=True):
        c = a_t * c + b_t
        steps.append(c)
    return torch.stack(steps, dim=1)


def recurrence(a: Float[Tensor, "B T D"], b: Float[Tensor, "B T D"], c: Float[Tensor, "B D"]) -> Float[Tensor, "B T D"]:
    """The same as a scan: about 2 log T operations on the complete segment, with twice the multiplications of the loop.

    It uses products and sums only and never divides by cumulative products. So nothing overflows for a in [0, 1], and
    a = 0 (a document start) is allowed.
    """
    return _Recurrence.apply(a, b, c)


class _Recurrence(torch.autograd.Function):
    """The gradient is the same recurrence backwards in time: g_t = dc_t + a_{t+1} g_{t+1}, da_t = g_t c_{t-1},
    db_t = g_t. So only a and c are saved, not the levels of the scan."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        # Not in place: the ONNX exporter would lose the change of a view.
        first = torch.addcmul(b[:, :1], a[:, :1], c[:, None])
        states = _scan(a, torch.cat([first, b[:, 1:]], dim=1))
        ctx.save_for_backward(a, c, states)
        return states

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a, c, states = ctx.saved_tensors
        following = torch.cat([a[:, 1:], torch.zeros_like(a[:, :1])], dim=1)
        g = _scan(following.flip(1), gradients[0].flip(1)).flip(1)
        before = torch.cat([c[:, None], states[:, :-1]], dim=1)
        return g * before, g, g[:, 0] * a[:, 0]


def _scan(a: Tensor, b: Tensor) -> Tensor:
    """The recurrence from zero (Blelloch 1990). Steps 2k and 2k+1 are one step of a recurrence of half the length,

        c_{2k+1} = (a_{2k+1} a_{2k}) c_{2k-1} + (a_{2k+1} b_{2k} + b_{2k+1}),

    and its result gives all even steps in one operation.
    """
    T = b.shape[1]
    if T == 1:
        return b
    first, second = slice(0, T - 1, 2), slice(1, T, 2)
    odd = _scan(a[:, second] * a[:, first], torch.addcmul(b[:, second], a[:, second], b[:, first]))
    states = torch.empty_like(b)
    states[:, 0] = b[:, 0]
    states[:, 1::2] = odd
    if T > 2:
        states[:, 2::2] = torch.addcmul(b[:, 2::2], a[:, 2::2], odd[:, : (T - 1) // 2])
    return states
