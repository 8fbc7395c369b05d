"""Attention among the positions that hash alike (Kitaev et al. 2020), causal, in time and memory linear in L.

    score(i, j) = q_i . q_j / |q_j|                                       one projection for queries and keys
    P_i^r = earlier positions of i's bucket in round r, the last `chunk`;  P_i = their union over the rounds
    o_i = softmax over P_i of score(i, j), times v_j;  i itself only where P_i is empty

Positions are sorted by bucket and the sorted row is cut into chunks: all of P_i^r lies in i's chunk or the one before.
The letter R is for rounds, N for the columns of a rotation.
"""

import torch
from torch.nn import functional as F

from longspan.shapes import Float, Int, Tensor

# The paper's finite score of a position for itself: any other position outweighs it.
ITSELF = -1e5


def hash_buckets(
    vectors: Float[Tensor, "B H L D"], rotations: Float[Tensor, "R D N"], factors: tuple[int, ...]
) -> Int[Tensor, "B H R L"]:
    """h(x) = argmax([x R ; -x R]) (Andoni et al. 2015); several factors are the digits of one number.

    A digit of f values takes f/2 columns, so b buckets cost sqrt(b) columns instead of b: the paper's implementation
    factors them too.
    """
    B, H, L, _ = vectors.shape
    bucket = torch.zeros(B, H, rotations.shape[0], L, dtype=torch.int64, device=vectors.device)
    if factors:
        turned = torch.einsum("bhld,rdn->bhrln", vectors, rotations.to(vectors.dtype))
        for factor, part in zip(factors, turned.split([f // 2 for f in factors], dim=-1), strict=True):
            bucket = bucket * factor + torch.cat([part, -part], dim=-1).argmax(-1)
    return bucket


def sort_by_bucket(bucket: Int[Tensor, "B H R L"], chunk: int) -> tuple[Int[Tensor, "B H R L"], Int[Tensor, "B H R L"]]:
    """Positions ordered by bucket, then by place; and a code for each position (not sorted).

    Codes differ by the difference in rank where two positions share a bucket, and by more than `chunk` where not: so
    0 < code_i - code_j <= chunk says that j is in P_i^r.
    """
    ordered, order = bucket.sort(dim=-1, stable=True)
    L = bucket.shape[-1]
    begins = F.pad(ordered[..., 1:] != ordered[..., :-1], (1, 0))
    code = torch.arange(L, device=bucket.device) + chunk * begins.cumsum(-1)
    code = code.to(torch.int32 if L * (chunk + 1) < 2**30 else torch.int64)
    return order, torch.empty_like(code).scatter_(-1, order, code)


def lsh_attention(
    query: Float[Tensor, "B H L D"],
    value: Float[Tensor, "B H L D"],
    bucket: Int[Tensor, "B H R L"],
    *,
    chunk: int,
    dropout: float = 0.0,
) -> Float[Tensor, "B H L D"]:
    """Each round attends by itself; a key met in n rounds counts 1/n in each, so the rounds add up to the union.

    Documents are told apart by the caller, who gives them different buckets.

    As published, which chunk a position falls into depends on how many later positions share its bucket. Here a query
    sees the last `chunk` of its bucket wherever the cuts fall, so that nothing depends on the future.
    """
    chunk = min(chunk, query.shape[2])
    order, code = sort_by_bucket(bucket, chunk)
    keys = _with_chunk_before(_chunks(F.normalize(query, dim=-1), order, chunk))
    values = _with_chunk_before(_chunks(value, order, chunk))
    scores = _wide(_chunks(query, order, chunk) @ keys.transpose(-1, -2))
    scores = scores + _bias(order, code, chunk, scores.dtype)

    # One exponential for all rounds: each is taken relative to the largest score a query has in any of them.
    back = order.argsort(dim=-1)
    largest = _pick(scores.detach().amax(-1, keepdim=True).flatten(3, 4), back).amax(dim=2)
    weights = (scores - _chunks(largest, order, chunk)).exp()
    total = weights.sum(-1, keepdim=True)
    read = F.dropout(weights, dropout, training=dropout > 0).to(value.dtype) @ values
    read, total = (_pick(t.flatten(3, 4), back).sum(dim=2) for t in (read, total))
    return read / total.to(read.dtype)


@torch.no_grad()
def _bias(order: Int[Tensor, "B H R L"], code: Int[Tensor, "B H R L"], chunk: int, dtype: torch.dtype) -> Tensor:
    """What is added to scores [B, H, R, chunks, chunk, keys]: -log of the rounds that find a key, ITSELF or -inf."""
    far = torch.iinfo(code.dtype).max // 2  # the code of what fills up a chunk: behind every position
    mine = _chunks(code.transpose(2, 3), order, chunk, far)  # codes of all rounds, in each round's order
    theirs = _with_chunk_before(mine, far)
    gap = _own_round(mine)[..., :, None] - _own_round(theirs)[..., None, :]
    found = torch.zeros(gap.shape, dtype=torch.int8, device=gap.device)  # in so many rounds
    for r in range(mine.shape[-1]):
        other = mine[..., :, None, r] - theirs[..., None, :, r]
        found += (other >= 0).logical_and_(other <= chunk).view(torch.int8)
    bias = found.clamp_(min=1).to(dtype).log_().neg_()
    return bias.masked_fill_(gap == 0, ITSELF).masked_fill_((gap < 0).logical_or_(gap > chunk), -torch.inf)


def _pick(x: Tensor, index: Int[Tensor, "B H R L"]) -> Tensor:
    """Rows of x [B, H, R, ..., D] in the order of the index."""
    return x.gather(3, index[..., None].expand(*index.shape, x.shape[-1]))


def _chunks(x: Tensor, order: Int[Tensor, "B H R L"], chunk: int, fill: int = 0) -> Tensor:
    """x [B, H, L, D] in each round's order, cut up: [B, H, R, chunks, chunk, D]; the last chunk is filled up."""
    B, H, R, L = order.shape
    rows = _pick(x[:, :, None].expand(B, H, R, L, x.shape[-1]), order)
    return F.pad(rows, (0, 0, 0, -L % chunk), value=fill).unflatten(3, (-1, chunk))


def _with_chunk_before(x: Tensor, fill: int = 0) -> Tensor:
    """[..., chunks, chunk, D] to [..., chunks, 2 chunk, D]; before the first there is nothing; one alone stays."""
    if x.shape[-3] == 1:
        return x
    before = F.pad(x, (0, 0, 0, 0, 1, 0), value=fill)[..., :-1, :, :]
    return torch.cat([before, x], dim=-2)


def _own_round(codes: Tensor) -> Tensor:
    """Of codes [B, H, R, chunks, n, R] those of the round that ordered them: [B, H, R, chunks, n]."""
    return codes.diagonal(dim1=2, dim2=-1).movedim(-1, 2)


def _wide(scores: Tensor) -> Tensor:
    return scores if scores.dtype in (torch.float32, torch.float64) else scores.float()
