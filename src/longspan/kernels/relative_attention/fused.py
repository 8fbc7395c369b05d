"""Relative attention in one pass over the keys (Triton), without an [L, K] matrix outside a tile.

The position term needs one more product per tile than plain attention, and a shift from distances to keys
(fused_slide.py). All sums have a fixed order except one: the gradient of the position table, to which every row of the
batch and every block of queries adds, uses float32 atomics.
"""

# ruff: noqa: ARG001 (fake implementations of custom operations take all arguments)

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch

from longspan.kernels.relative_attention import split, stored
from longspan.shapes import Float, Int, Tensor

LOG2E = 1.4426950408889634
GATHER, BLOCK, WARP, HALF, STILL = range(5)  # fused_slide.py


def relative_attention(
    query: Float[Tensor, "B H L D"],
    key: Float[Tensor, "B H K D"],
    value: Float[Tensor, "B H K D"],
    distance: Float[Tensor, "H C D"],
    u: Float[Tensor, "H D"],
    w: Float[Tensor, "H D"],
    *,
    window: int | None = None,
    first_key: Int[Tensor, "B L"] | None = None,
    dropout: float = 0.0,
    discount: float = 0.0,
    seed: int | Tensor | None = None,
) -> Float[Tensor, "B H L D"]:
    """The function of reference.py. `first_key` must not decrease along a row; `seed` fixes the dropout."""
    if dropout > 0.0:
        if seed is None:
            seed = torch.randint(2**31, (1,), device=query.device)
        elif isinstance(seed, int):
            seed = torch.full((1,), seed, dtype=torch.int64, device=query.device)
    else:
        seed = None
    inputs = query, key, value, distance, u, w, first_key, seed, window or 0, dropout, discount
    if torch.compiler.is_compiling() or type(query) is not Tensor:
        return _forward(*inputs)[0]
    differentiable = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs[:6])
    return (_Eager.apply(*inputs) if differentiable else forward_pass(*inputs))[0]


@dataclass(frozen=True)
class Launch:
    """The launch options of a kernel: tile size, warps, pipeline stages, method of the shift, registers per thread.

    For the forward kernel also whether a tile ends with the scores of the next one, so that loads are under way during
    the softmax (`ahead`), and whether position keys are loaded with a descriptor, as keys and values are (`table`).
    """

    T: int
    num_warps: int
    num_stages: int
    slide: int
    registers: int | None = None
    ahead: bool = False
    table: bool = False


def launch(kernel: str, query: Tensor, keys: int, *, plain: bool = True) -> Launch:
    """The launch options of `kernel` ("forward", "query" or "key") for queries like these and so many keys. `plain` is
    without documents and dropout."""
    if query.device.type != "cuda":
        return Launch(16, 4, 1, GATHER)
    if torch.version.hip is not None:
        return Launch(32, 4, 1, GATHER)
    if query.dtype == torch.float32:
        return Launch(32, 4, 1, BLOCK)
    hopper, wide = is_hopper(query.device), query.shape[-1] > 64
    if kernel == "forward":
        if not hopper:
            return Launch(64, 4, 2 if wide else 3, BLOCK)
        if wide:  # two programs per multiprocessor
            return Launch(64, 4, 2, STILL, ahead=True)
        return Launch(64, 4, 2, HALF, 168, ahead=True, table=True)  # 168 registers: three programs
    registers = 168 if hopper and not wide and kernel == "query" and plain else None  # others would spill
    return Launch(64, 4, 1 if wide else 2, HALF if hopper else BLOCK, registers)


@functools.cache
def is_hopper(device: torch.device) -> bool:
    """Cached, because it is called three times per layer and small models are launch-bound."""
    return torch.cuda.get_device_capability(device)[0] == 9


def forward_pass(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    distance: Tensor,
    u: Tensor,
    w: Tensor,
    first_key: Tensor | None,
    seed: Tensor | None,
    window: int,
    dropout: float,
    discount: float,
) -> tuple[Tensor, Tensor]:
    from longspan.kernels.relative_attention.fused_forward import forward_kernel

    query, key, value, distance = rows(query), rows(key), rows(value), rows(distance.to(query.dtype))
    B, H, L, D = query.shape
    M, C = key.shape[2] - L, distance.shape[1]
    out = empty_heads(query, L)
    lse = query.new_empty(B, H, L, dtype=torch.float32)
    how = launch("forward", query, min(M + L, window) if window else M + L)
    parts = split.parts_of(query, M + L, window, how.T)
    to, lse_to = (out, lse) if parts == 1 else (split.partial(query, parts), lse.new_empty(parts, *lse.shape))
    strides = (*key.stride()[:3], *value.stride()[:3], *distance.stride()[:2])
    tma = how.slide == HALF and all(has_descriptor(tensor) for tensor in (key, value))
    if tma:
        key, value = descriptor(key, how.T), descriptor(value, how.T)
    # The kernel clamps distances to the table, which a descriptor cannot.
    table = tma and how.table and has_descriptor(distance[None]) and min(window or M + L, M + L) <= C
    if table:
        distance = descriptor(distance[None], how.T)
    forward_kernel[(-(-L // how.T), B * H, parts)](
        query, key, value, distance, u.contiguous(), w.contiguous(), contiguous(first_key), seed, to, lse_to,
        *query.stride()[:3], *strides, *to.stride()[-4:-1],
        H, L, M, C, window, LOG2E * D**-0.5, dropout, discount * D**0.5 / LOG2E,
        **shape_of(how, D, window, first_key, dropout, query.dtype), TMA=tma, DISCOUNT=discount > 0.0,
        AHEAD=how.ahead and parts == 1, TABLE=table, SPLIT=parts > 1,
    )  # fmt: skip
    if parts > 1:
        split.join_outputs(out, lse, to, lse_to)
    return out, lse


def backward_pass(
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    distance: Tensor,
    u: Tensor,
    w: Tensor,
    first_key: Tensor | None,
    seed: Tensor | None,
    window: int,
    dropout: float,
    discount: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    from longspan.kernels.relative_attention.fused_backward import key_kernel, prepare_kernel, query_kernel

    table = distance
    query, key, value, grad = rows(query), rows(key), rows(value), rows(grad)
    distance = rows(distance.to(query.dtype))
    B, H, L, D = query.shape
    K, C = key.shape[2], distance.shape[1]
    first_key = contiguous(first_key)
    plan = None if discount else stored.chosen(query, K, first_key, window)
    if plan is not None:
        *same, grad_distance, grad_biases, grad_u = plan.backward(
            grad, out, lse, query, key, value, distance, u, w, seed, window, dropout
        )
        return *same, *finish(grad_biases, grad_u, grad_distance, table, u, w)  # type: ignore[return-value]
    scale = D**-0.5
    sizes = (H, L, K - L, C, window, scale, LOG2E * scale, dropout, discount / (LOG2E * scale))

    with_u, with_w = (query.new_empty(B, H, L, D) for _ in range(2))
    delta, u, w = torch.empty_like(lse), u.contiguous(), w.contiguous()
    prepare_kernel[(-(-L // 64), B * H)](
        query, u, w, out, grad, with_u, with_w, delta,
        *query.stride()[:3], *out.stride()[:3], *grad.stride()[:3],
        H, L, D=D, BD=padded(D), T=64,
    )  # fmt: skip

    strides = (*key.stride()[:3], *value.stride()[:3], *distance.stride()[:2], *grad.stride()[:3])
    given = (with_w, key, value, distance, grad, lse, delta, first_key, seed)
    how = launch("query", query, K, plain=first_key is None and dropout == 0.0)
    blocks = -(-L // how.T)
    grad_query = empty_heads(query, L)
    grad_distance = query.new_zeros(H, C, D, dtype=torch.float32)
    parts = split.parts_of(query, K, window, how.T)
    grad_biases = query.new_empty(parts, B, H, blocks, D, dtype=torch.float32)
    to = grad_query if parts == 1 else split.partial(query, parts)
    if parts > 1:  # two programs per multiprocessor, which have all the registers that they need
        how = replace(how, registers=None)
    query_kernel[(blocks, B * H, parts)](
        query, u, *given, to, grad_distance, grad_biases, *query.stride()[:3], *strides, *to.stride()[-4:-1], *sizes,
        **shape_of(how, D, window, first_key, dropout, query.dtype), DISCOUNT=discount > 0.0, SPLIT=parts > 1,
    )  # fmt: skip

    how = launch("key", query, K)
    grad_key, grad_value = empty_heads(key, K), empty_heads(value, K)
    blocks = -(-K // how.T)
    grad_u = query.new_empty(B, H, blocks, D, dtype=torch.float32)
    key_kernel[(blocks, B * H)](
        with_u, *given, grad_key, grad_value, grad_u,
        *strides, *grad_key.stride()[:3], *grad_value.stride()[:3], *sizes,
        **shape_of(how, D, window, first_key, dropout, query.dtype), DISCOUNT=discount > 0.0,
    )  # fmt: skip
    if parts > 1:
        rest = split.join_gradients(grad_query, to, grad_biases, grad_u, grad_distance, table, u, w)
        return grad_query, grad_key, grad_value, *rest
    return grad_query, grad_key, grad_value, *finish(grad_biases[0], grad_u, grad_distance, table, u, w)


def finish(
    grad_biases: Float[Tensor, "B H N D"],
    grad_u: Float[Tensor, "B H J D"],
    grad_distance: Float[Tensor, "H C D"],
    table: Float[Tensor, "H C D"],
    u: Float[Tensor, "H D"],
    w: Float[Tensor, "H D"],
) -> tuple[Float[Tensor, "H C D"], Float[Tensor, "H D"], Float[Tensor, "H D"]]:
    """The gradients of distance, u and w in the dtypes and the layout of `table`, `u` and `w`. `grad_biases` are the
    shares of u + w."""
    from longspan.kernels.relative_attention.last_sum_kernels import finish_kernel

    B, H, N, D = grad_biases.shape
    J, C = grad_u.shape[2], table.shape[1]
    group, rows, table_rows = (4, 256, 16) if table.is_cuda else (16, 16, 16)
    of_distance, of_u, of_w = torch.empty_like(table), u.new_empty(H, D), w.new_empty(H, D)
    programs = max(H * -(-D // group), min(-(-H * C // table_rows), 528))  # at least four per multiprocessor
    finish_kernel[(programs,)](
        grad_biases, grad_u, grad_distance, of_distance, of_u, of_w, *of_distance.stride(),
        H, C, B * N, N, B * J, J, D=D, BD=padded(D), GROUP=group, ROWS=rows, TABLE_ROWS=table_rows, num_warps=4,
    )  # fmt: skip
    return of_distance, of_u, of_w


def shape_of(
    how: Launch, D: int, window: int, first_key: Tensor | None, dropout: float, dtype: torch.dtype
) -> dict[str, Any]:
    """The compile-time constants of a kernel."""
    return {
        "D": D,
        "BD": padded(D),
        "T": how.T,
        "WINDOW": window > 0,
        "FIRST": first_key is not None,
        "DROPOUT": dropout > 0.0,
        "SLIDE": how.slide,
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
        "num_warps": how.num_warps,
        "num_stages": how.num_stages,
    } | ({} if how.registers is None else {"maxnreg": how.registers})


def padded(D: int) -> int:
    return max(16, 1 << (D - 1).bit_length())


def has_descriptor(tensor: Tensor) -> bool:
    """Whether the tensor memory accelerator can copy its tiles: 16-byte alignment of the address and the strides."""
    aligned = all(stride > 0 and stride * tensor.element_size() % 16 == 0 for stride in tensor.stride()[:3])
    return aligned and tensor.data_ptr() % 16 == 0 and tensor.shape[3] == padded(tensor.shape[3])


def descriptor(tensor: Tensor, T: int) -> Any:
    """For tiles of T rows of a [B, H, K, D] tensor. Rows outside are zero."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [1, 1, T, padded(tensor.shape[3])])


def rows(tensor: Tensor) -> Tensor:
    """The kernels need contiguous rows; the other axes may have any stride."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def empty_heads(tensor: Tensor, length: int) -> Tensor:
    """An empty [B, H, length, D] with interleaved heads, the layout that the next projection reads."""
    B, H, _, D = tensor.shape
    return tensor.new_empty(B, length, H, D).transpose(1, 2)


_forward = torch.library.custom_op("longspan::relative_attention", forward_pass, mutates_args=())
_backward = torch.library.custom_op("longspan::relative_attention_backward", backward_pass, mutates_args=())


@_forward.register_fake
def _(query, key, value, distance, u, w, first_key, seed, window, dropout, discount):  # type: ignore[no-untyped-def]
    B, H, L, _ = query.shape
    return empty_heads(query, L), query.new_empty(B, H, L, dtype=torch.float32)


@_backward.register_fake
def _(grad, out, lse, query, key, value, distance, u, w, first_key, seed, window, dropout, discount):  # type: ignore[no-untyped-def]
    L, K = query.shape[2], key.shape[2]
    return (
        empty_heads(query, L),
        empty_heads(key, K),
        empty_heads(value, K),
        torch.empty_like(distance),
        u.new_empty(u.shape),
        w.new_empty(w.shape),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.window, ctx.dropout, ctx.discount = inputs
    ctx.save_for_backward(*output, *tensors)


def _differentiate(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    grads = _backward(grad, *ctx.saved_tensors, ctx.window, ctx.dropout, ctx.discount)
    return (*grads, None, None, None, None, None)


_forward.register_autograd(_differentiate, setup_context=_save)


class _Eager(torch.autograd.Function):
    """`_forward` for calls that are not compiled: the checks of a custom operation take a third of the host's time."""

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, Tensor]:
        return forward_pass(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        _save(ctx, inputs, output)
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)  # a gradient of zeros for output[1] would be a launch

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # with `create_graph=True` the operation reports that there is no second derivative
            return _differentiate(ctx, grad, _)
        options = {"window": ctx.window, "dropout": ctx.dropout, "discount": ctx.discount}
        grads = backward_pass(grad, *ctx.saved_tensors, **options)
        return (*grads, None, None, None, None, None)
