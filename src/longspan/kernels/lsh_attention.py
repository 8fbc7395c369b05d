"""Causal attention among positions with the same hash (Kitaev et al. 2020), in time and memory linear in L.

    score(i, j) = q_i . q_j / |q_j|                                       one projection for queries and keys
    P_i^r = the last `chunk` earlier positions in the bucket of i in round r;  P_i = their union over the rounds
    o_i = softmax over P_i of score(i, j), times v_j;  i itself only where P_i is empty

Positions are sorted by bucket and cut into chunks, so all of P_i^r is in the chunk of i or the one before it.
Axes: R rounds, N columns of a rotation.
"""

import torch
from torch.nn import functional as F

from longspan.shapes import Float, Int, Tensor

# The score of a position for itself, as in the paper: finite, but lower than that of any other position.
ITSELF = -1e5


def hash_buckets(
    vectors: Float[Tensor, "B H L D"], rotations: Float[Tensor, "R D N"], factors: tuple[int, ...]
) -> Int[Tensor, "B H R L"]:
    """h(x) = argmax([x R ; -x R]) (Andoni et al. 2015). With several factors, each gives one digit of the bucket.

    A digit with f values takes f/2 columns, so two digits need about sqrt(b) columns for b buckets. The authors' code
    does the same.
    """
    B, H, L, _ = vectors.shape
    bucket = torch.zeros(B, H, rotations.shape[0], L, dtype=torch.int64, device=vectors.device)
    if factors:
        rotated = torch.einsum("bhld,rdn->bhrln", vectors, rotations.to(vectors.dtype))
        for factor, part in zip(factors, rotated.split([f // 2 for f in factors], dim=-1), strict=True):
            bucket = bucket * factor + torch.cat([part, -part], dim=-1).argmax(-1)
    return bucket


def sort_by_bucket(bucket: Int[Tensor, "B H R L"], chunk: int) -> tuple[Int[Tensor, "B H R L"], Int[Tensor, "B H R L"]]:
    """Positions sorted by bucket and then by position, and a code for each position (in the original order).

    Codes of positions in the same bucket differ by the difference in rank, those of different buckets by more than
    `chunk`. So j is in P_i^r if and only if 0 < code_i - code_j <= chunk.
    """
    ordered, order = bucket.sort(dim=-1, stable=True)
    L = bucket.shape[-1]
    bucket_starts = F.pad(ordered[..., 1:] != ordered[..., :-1], (1, 0))
    code = torch.arange(L, device=bucket.device) + chunk * bucket_starts.cumsum(-1)
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
    """Every round is computed separately. A key found in n rounds counts 1/n in each, so the sum is over the union.

    The caller separates documents by giving them different buckets.

    Deviation: in the paper, the chunk of a position depends on how many later positions share its bucket. Here a query
    always sees the last `chunk` positions of its bucket, so nothing depends on the future.
    """
    chunk = min(chunk, query.shape[2])
    order, code = sort_by_bucket(bucket, chunk)
    keys = _with_chunk_before(_chunks(F.normalize(query, dim=-1), order, chunk))
    values = _with_chunk_before(_chunks(value, order, chunk))
    scores = _wide(_chunks(query, order, chunk) @ keys.transpose(-1, -2))
    scores = scores + _bias(order, code, chunk, scores.dtype)

    # All rounds use the same offset, the largest score of the query in any round, so that their sums can be added.
    original = order.argsort(dim=-1)
    largest = _pick(scores.detach().amax(-1, keepdim=True).flatten(3, 4), original).amax(dim=2)
    weights = (scores - _chunks(largest, order, chunk)).exp()
    total = weights.sum(-1, keepdim=True)
    output = F.dropout(weights, dropout, training=dropout > 0).to(value.dtype) @ values
    output, total = (_pick(t.flatten(3, 4), original).sum(dim=2) for t in (output, total))
    return output / total.to(output.dtype)


@torch.no_grad()
def _bias(order: Int[Tensor, "B H R L"], code: Int[Tensor, "B H R L"], chunk: int, dtype: torch.dtype) -> Tensor:
    """Added to scores [B, H, R, chunks, chunk, keys]: -log(n) for a key found in n rounds, ITSELF, or -inf."""
    far = torch.iinfo(code.dtype).max // 2  # the code of padding: after every position
    mine = _chunks(code.transpose(2, 3), order, chunk, far)  # codes of all rounds, in each round's order
    theirs = _with_chunk_before(mine, far)
    gap = _own_round(mine)[..., :, None] - _own_round(theirs)[..., None, :]
    found = torch.zeros(gap.shape, dtype=torch.int8, device=gap.device)  # the number of rounds
    for r in range(mine.shape[-1]):
        other = mine[..., :, None, r] - theirs[..., None, :, r]
        found += (other >= 0).logical_and_(other <= chunk).view(torch.int8)
    bias = found.clamp_(min=1).to(dtype).log_().neg_()
    return bias.masked_fill_(gap == 0, ITSELF).masked_fill_((gap < 0).logical_or_(gap > chunk), -torch.inf)


def _pick(x: Tensor, index: Int[Tensor, "B H R L"]) -> Tensor:
    """Rows of x [B, H, R, ..., D] in the order of the index."""
    return x.gather(3, index[..., None].expand(*index.shape, x.shape[-1]))


def _chunks(x: Tensor, order: Int[Tensor, "B H R L"], chunk: int, fill: int = 0) -> Tensor:
    """x [B, H, L, D] in the order of each round, in chunks: [B, H, R, chunks, chunk, D]; the last one is padded."""
    B, H, R, L = order.shape
    rows = _pick(x[:, :, None].expand(B, H, R, L, x.shape[-1]), order)
    return F.pad(rows, (0, 0, 0, -L % chunk), value=fill).unflatten(3, (-1, chunk))


def _with_chunk_before(x: Tensor, fill: int = 0) -> Tensor:
    """[..., chunks, chunk, D] to [..., chunks, 2 chunk, D]; the first chunk gets padding, a single one stays as it
    is."""
    if x.shape[-3] == 1:
        return x
    before = F.pad(x, (0, 0, 0, 0, 1, 0), value=fill)[..., :-1, :, :]
    return torch.cat([before, x], dim=-2)


def _own_round(codes: Tensor) -> Tensor:
    """From codes [B, H, R, chunks, n, R], those of the round that sorted them: [B, H, R, chunks, n]."""
    return codes.diagonal(dim1=2, dim2=-1).movedim(-1, 2)


def _wide(scores: Tensor) -> Tensor:
    return scores if scores.dtype in (torch.float32, torch.float64) else scores.float()
