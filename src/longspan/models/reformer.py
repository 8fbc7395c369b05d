"""Reformer (Kitaev et al. 2020): attention among positions with the same hash, reversible layers. docs/reformer.md

y1 = x1 + Attention(norm(x2))       y2 = x2 + FeedForward(norm(y1))       x1 = x2 = embedding
h = (y1 + y2) / 2
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from longspan.contract import State
from longspan.hints import Hints
from longspan.kernels.lsh_attention import hash_buckets, lsh_attention
from longspan.kernels.untraced import untraced
from longspan.nn.attention import merge_heads, split_heads
from longspan.nn.model_config import require
from longspan.nn.positions import position_in_document, position_sinusoid
from longspan.nn.reversible import ReversibleLayer, Streams, run_reversible
from longspan.nn.transformer import TransformerConfig, initialise
from longspan.nn.window_transformer import WindowModel
from longspan.segments import check_segment
from longspan.shapes import Bool, Float, Int, Tensor

Context = tuple[Float[Tensor, "R D N"], Int[Tensor, "B T"] | None]
"""The rotations for the hashes of a layer, and the first position of each token's document."""

# Up to this many buckets one argmax is used, beyond it two.
MOST_AT_ONCE = 64


@dataclass(frozen=True, kw_only=True)
class ReformerConfig(TransformerConfig):
    """In each of `rounds`, a query sees the last `chunk` keys of its bucket. `buckets` is a power of two; the
    feed-forward layer is computed in `pieces`. Only pre-norm: post-norm layers are not reversible."""

    norm: Literal["pre"] = "pre"
    final_norm: bool = True
    rounds: int = 2
    chunk: int = 64
    buckets: int | None = None
    pieces: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("rounds", "chunk", "pieces"):
            require(getattr(self, name) >= 1, f"model.{name}={getattr(self, name)} must be at least 1")
        require(
            not self.qk_norm,
            "model.qk_norm=true does not apply to a reformer, which normalises its keys already; use false",
        )
        # As in the paper, chunks are twice as long as the mean bucket: 2 * segment / chunk buckets, here for 128
        # tokens.
        buckets = 2 ** (max(2 * 128 // self.chunk, 2) - 1).bit_length() if self.buckets is None else self.buckets
        require(
            1 <= buckets <= 2**20 and buckets & (buckets - 1) == 0,
            f"model.buckets={buckets} is not a power of two between 1 and {2**20}; "
            f"use {2 ** min(max(buckets, 1).bit_length() - 1, 20)}",
        )
        object.__setattr__(self, "buckets", buckets)

    @property
    def factors(self) -> tuple[int, ...]:
        """The number of buckets as factors: 128 is (8, 16)."""
        bits = (self.buckets or 1).bit_length() - 1
        if bits == 0:
            return ()
        return (2**bits,) if 2**bits <= MOST_AT_ONCE else (2 ** (bits // 2), 2 ** (bits - bits // 2))

    def rotations(self, generator: torch.Generator | None = None) -> Float[Tensor, "R D N"]:
        """Random rotations of one layer, on the CPU. With more rounds, the first ones stay the same."""
        columns = sum(self.factors) // 2
        return torch.randn(self.rounds, self.head_size, columns, generator=generator, device="cpu")


class HashedAttention(nn.Module):
    """drop(Wo attend(norm(x))). Queries and keys share one projection."""

    def __init__(self, config: ReformerConfig) -> None:
        super().__init__()
        self.config = config
        size = config.heads * config.head_size
        self.norm = config.make_norm()
        self.query = nn.Linear(config.width, size, bias=False)
        self.value = nn.Linear(config.width, size, bias=False)
        self.output = nn.Linear(size, config.width, bias=False)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, x: Float[Tensor, "B T E"], context: Context, plan: Int[Tensor, "B H R T"] | None
    ) -> tuple[Float[Tensor, "B T E"], Int[Tensor, "B H R T"]]:
        c, (rotations, document) = self.config, context
        x = self.norm(x)
        query, value = split_heads(self.query(x), c.heads), split_heads(self.value(x), c.heads)
        if plan is None:
            plan = hash_buckets(query.detach(), rotations, c.factors).to(smallest_type(c.buckets or 1))
        bucket = plan.long()
        if document is not None:
            bucket = bucket + (c.buckets or 1) * document[:, None, None]
        dropout = c.attention_dropout if self.training else 0.0
        output = lsh_attention(query, value, bucket, chunk=c.chunk, dropout=dropout)
        return self.dropout(self.output(merge_heads(output))), plan


class Reformer(WindowModel):
    Config: ClassVar[type] = ReformerConfig
    rotations: Float[Tensor, "Y R D N"]

    def __init__(self, config: ReformerConfig) -> None:
        super().__init__(config)
        self.embedding = config.make_embedding()
        self.layers = nn.ModuleList(
            ReversibleLayer(
                HashedAttention(config),
                nn.Sequential(config.make_norm(), config.make_feed_forward()),
                config.pieces,
            )
            for _ in range(config.layers)
        )
        self.final_norm = config.make_final_norm()
        self.head = config.make_head(self.embedding)
        self.dropout = nn.Dropout(config.dropout)
        initialise(self)
        # Training draws new rotations in every call, as in the paper. These are for evaluation and decoding, and saved
        # with the weights.
        fixed = [config.rotations(torch.Generator().manual_seed(n)) for n in range(config.layers)]
        self.register_buffer("rotations", torch.stack(fixed))

    @property
    def hints(self) -> Hints:  # type: ignore[override]
        return Hints(shard_layers=False)  # the backward pass computes the halves of layers again

    def hidden_states(
        self, tokens: Int[Tensor, "B T"], state: State | None = None, starts: Bool[Tensor, "B T"] | None = None
    ) -> tuple[tuple[Tensor, ...], State]:
        """Stores the activations of every layer; `losses` does not."""
        h, contexts, state = self._begin(tokens, state, starts)
        hidden, streams = [h], (h, h)
        for layer, context in zip(self.layers, contexts, strict=True):
            streams = layer(*streams, context)
            hidden.append(_mean(streams))
        hidden[-1] = self.dropout(self.final_norm(hidden[-1]))
        return tuple(hidden), state

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
        # torch.compile cannot trace recomputation with restored random states.
        h, state = untraced(self._run_layers)(tokens, state, starts)
        h = self.dropout(self.final_norm(h))[:, -targets.shape[1] :]
        return self.head.losses(h, targets, state.reading.temperature), state

    def _run_layers(
        self, tokens: Int[Tensor, "B T"], state: State | None, starts: Bool[Tensor, "B T"] | None
    ) -> tuple[Float[Tensor, "B T E"], State]:
        h, contexts, state = self._begin(tokens, state, starts)
        layers: list[Any] = list(self.layers)
        return _mean(run_reversible(layers, h, h, contexts)), state

    def _begin(
        self, tokens: Int[Tensor, "B T"], state: State | None, starts: Bool[Tensor, "B T"] | None
    ) -> tuple[Float[Tensor, "B T E"], list[Context], State]:
        state, mask = self.begin(tokens, state, starts)
        h = self.embedding(tokens)
        position = position_in_document(mask.first_key, mask.tokens, tokens.device)
        h = h + position_sinusoid(position, self.config.width).to(h.dtype)
        rotations = self.rotations
        if self.training:
            rotations = torch.stack([self.config.rotations() for _ in self.layers]).to(h.device, non_blocking=True)
        return self.dropout(h), [(layer, mask.first_key) for layer in rotations], state


def _mean(streams: Streams) -> Float[Tensor, "B T E"]:
    return (streams[0] + streams[1]) / 2


def smallest_type(buckets: int) -> torch.dtype:
    """The smallest dtype for buckets, which are stored for the backward pass."""
    if buckets <= 2**7:
        return torch.int8
    return torch.int16 if buckets <= 2**15 else torch.int32
