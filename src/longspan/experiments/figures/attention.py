"""Attention of every head by distance, over a text of any length. Only the tokens take memory that grows with the text.

Queries and keys come from the model's own attention calls (`kernels/observe.py`). Weights are computed from them for a
block of queries at a time, arranged by distance, and added to running sums.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from longspan.contract import LanguageModel, State
from longspan.errors import ConfigError
from longspan.kernels.observe import AttentionCall, observe
from longspan.kernels.relative_attention.reference import far_discount
from longspan.models.longspan_xl import LongspanXL
from longspan.models.transformer_xl import TransformerXL
from longspan.scoring.losses import Ids, Progress, check_text
from longspan.segments import map_segments, read_segments
from longspan.shapes import Bool, Float, Int, Tensor

TERMS = ("a", "b", "c", "d")
_SCORES_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class LayerAttention:
    """The inputs of one layer's attention for one row: queries of a segment, keys of memory and segment.

    `r`, `u` and `w` are as in `kernels.relative_attention`, or None if the scores have no position term.
    """

    query: Float[Tensor, "H L D"]
    key: Float[Tensor, "H K D"]
    r: Float[Tensor, "H C D"] | None
    u: Float[Tensor, "H D"] | None
    w: Float[Tensor, "H D"] | None
    window: int | None
    first_key: Int[Tensor, "L"] | None
    discount: float = 0.0

    def queries(self, begin: int, end: int) -> "LayerAttention":
        """The same for some of the queries, with the keys up to the last of them."""
        L, K = self.query.shape[1], self.key.shape[1]
        first = None if self.first_key is None else self.first_key[begin:end]
        return dataclasses.replace(
            self, query=self.query[:, begin:end], key=self.key[:, : K - L + end], first_key=first
        )

    def head(self, index: int) -> "LayerAttention":
        """The same for one head."""
        one = slice(index, index + 1)
        r, u, w = (None if part is None else part[one] for part in (self.r, self.u, self.w))
        return dataclasses.replace(self, query=self.query[one], key=self.key[one], r=r, u=u, w=w)

    def visible(self) -> Bool[Tensor, "L K"]:
        """Whether query i may attend to the key at distance d, as [i, d]."""
        L, K = self.query.shape[1], self.key.shape[1]
        position = torch.arange(K - L, K, device=self.query.device)[:, None]
        distance = torch.arange(K, device=self.query.device)
        first = 0 if self.first_key is None else self.first_key[:, None]
        visible = distance <= position - first
        return visible if self.window is None else visible & (distance < self.window)

    def terms(self) -> dict[str, Float[Tensor, "H L K"]]:
        """The terms of the score by distance, [h, i, d]: a q.k, b q.r, c u.k, d w.r, each divided by sqrt(D)."""
        L, K, scale = self.query.shape[1], self.key.shape[1], self.query.shape[2] ** -0.5
        key = self.key.transpose(1, 2)
        terms = {"a": by_distance(self.query @ key) * scale}
        if self.r is None or self.u is None or self.w is None:
            return terms
        # r descends to distance 0. Distances beyond the clamp share the key of the largest distance it has.
        distance = torch.arange(K, device=key.device).clamp(max=self.r.shape[1] - 1)
        r = self.r.flip(1)[:, distance].transpose(1, 2)
        terms["b"] = self.query @ r * scale
        terms["c"] = by_distance((self.u[:, None] @ key).expand(-1, L, -1)) * scale
        terms["d"] = (self.w[:, None] @ r).expand(-1, L, -1) * scale
        if self.discount:
            far = far_discount(torch.arange(K, device=key.device), self.r.shape[1] - 1, self.discount)
            terms["d"] = terms["d"] - far.to(key.dtype)
        return terms

    def weights(self) -> Float[Tensor, "H L K"]:
        """The attention weights by distance, [h, i, d]."""
        return masked_softmax(sum_terms(self.terms()), self.visible())


def by_distance(scores: Float[Tensor, "H L K"]) -> Float[Tensor, "H L K"]:
    """Scores [h, i, j] of keys, rearranged as [h, i, d] of distances. Distances before the first key must be masked."""
    L, K = scores.shape[1:]
    position = torch.arange(K - L, K, device=scores.device)[:, None]
    key = (position - torch.arange(K, device=scores.device)).clamp(min=0)
    return scores.gather(2, key.expand(scores.shape[0], -1, -1))


def masked_softmax(scores: Float[Tensor, "H L K"], visible: Bool[Tensor, "L K"]) -> Float[Tensor, "H L K"]:
    return torch.softmax(scores.float().masked_fill(~visible, float("-inf")), dim=-1)


def sum_terms(terms: dict[str, Tensor]) -> Tensor:
    return torch.stack(list(terms.values())).sum(dim=0)


def has_attention(model: LanguageModel) -> bool:
    """Whether every layer makes one attention call with one key per token, so that a key's index gives its distance.

    Compressed memories, sparse patterns and layers that are applied several times do not. A two-sided model attends to
    later tokens too.
    """
    if not model.predicts_next:
        return False
    device = next(model.parameters()).device
    state = model.initial_state(1, filled=True, trainable=False)
    with torch.inference_mode():
        layers, _ = layer_attentions(model, torch.zeros(1, 2, dtype=torch.int64, device=device), state)
    keys = 2 + (state.reading.memory if model.has_memory(state.reading) else 0)
    return [layer.key.shape[1] for layer in layers] == [keys] * model.config.layers


def require_attention(model: LanguageModel) -> None:
    if not has_attention(model):
        raise ConfigError(
            f"{type(model).__name__} has no attention with one key per token, so its attention cannot be drawn; "
            "use a model of the family transformer-xl, longspan-xl, vanilla or rotary"
        )


def layer_attentions(
    model: LanguageModel, tokens: Int[Tensor, "1 T"], state: State | None
) -> tuple[list[LayerAttention], State]:
    """The attention inputs of every layer for a segment of a single row, and the state after it."""
    with recorded() as layers:
        _, after = model.hidden_states(tokens, state)
    return layers, after


@contextmanager
def recorded() -> Iterator[list[LayerAttention]]:
    """A list of the attention calls within this block, first row only."""
    layers: list[LayerAttention] = []

    def add(call: AttentionCall) -> None:
        first = None if call.first_key is None else call.first_key[0]
        row = (call.query[0], call.key[0], call.r, call.u, call.w, call.window, first, call.discount)
        layers.append(LayerAttention(*row))

    with observe(add):
        yield layers


@dataclass(frozen=True, eq=False)
class AttentionByDistance:
    """Mean attention weights by distance.

    `attention[n, h, d]` is the mean weight that head h of layer n gives to the token d positions back, over the
    `visible[d]` queries that can attend that far. `terms[x]` is the same for the softmax of one term of the score.
    """

    attention: NDArray[np.float64]
    terms: dict[str, NDArray[np.float64]]
    queries: int
    visible: NDArray[np.float64]

    @property
    def distances(self) -> int:
        return self.attention.shape[2]

    def spans(self, share: float) -> NDArray[np.int64]:
        """Per layer and head: the number of newest tokens, the query's own included, that get `share` of the weight."""
        total = self._total
        return (total.cumsum(axis=2) < share * total.sum(axis=2, keepdims=True)).sum(axis=2) + 1

    def mean_distances(self) -> NDArray[np.float64]:
        """Per layer and head: the mean distance, weighted by attention."""
        return self._total @ np.arange(self.distances) / self._total.sum(axis=2)

    @property
    def _total(self) -> NDArray[np.float64]:
        """The weight of each distance summed over queries: few queries reach far, so means must not be added up."""
        return self.attention * self.visible


def attention_by_distance(
    model: LanguageModel, ids: Ids, *, with_terms: bool = True, progress: Progress | None = None
) -> AttentionByDistance:
    """Read a text as one stream and average the attention weights of every head.

    Queries before the memory is full are left out, provided that the text is longer than the memory.
    """
    require_attention(model)
    check_text(model, ids)
    config, reading, device = model.config, model.reading, next(model.parameters()).device
    memory = reading.memory if model.has_memory(reading) else 0
    distances = min(len(ids), reading.window or memory + reading.segment if memory else reading.segment)
    warm_up = memory if len(ids) > memory + reading.segment else 0
    kinds = ("attention", *(TERMS if with_terms and has_terms(model) else ()))
    shape = (config.layers, config.heads, distances)
    sums = {kind: torch.zeros(shape, dtype=torch.float64, device=device) for kind in kinds}
    counts = torch.zeros(distances, dtype=torch.float64, device=device)
    tokens = torch.from_numpy(ids.astype(np.int64)).to(device)[None]
    done, queries, state = 0, 0, model.initial_state(1, trainable=False)
    with torch.inference_mode():
        for layers, _ in map_segments(partial(layer_attentions, model), state, tokens):
            length = layers[0].query.shape[1]
            if done >= warm_up:
                queries += length
                for n, layer in enumerate(layers):
                    for kind, weights in _weights(layer, kinds, distances):
                        sums[kind][n, :, : weights.shape[2]] += weights.sum(dim=1, dtype=torch.float64)
                visible = layers[-1].visible()[:, :distances]
                counts[: visible.shape[1]] += visible.sum(dim=0)
            done += length
            if progress is not None:
                progress(done, len(ids))
    means = {kind: (total / counts.clamp(min=1)).cpu().numpy() for kind, total in sums.items()}
    return AttentionByDistance(means.pop("attention"), means, queries, counts.cpu().numpy())


def has_terms(model: LanguageModel) -> bool:
    """Whether the score is the four-term score of Dai et al. 2019."""
    return isinstance(model, TransformerXL) or (isinstance(model, LongspanXL) and model.config.position == "relative")


def _weights(
    layer: LayerAttention, kinds: tuple[str, ...], distances: int
) -> Iterator[tuple[str, Float[Tensor, "H R K"]]]:
    """The softmax of each kind of score for a block of queries at a time, up to a distance."""
    (H, L, _), K = layer.query.shape, layer.key.shape[1]
    block = max(1, _SCORES_AT_ONCE // (H * K))
    for begin in range(0, L, block):
        part = layer.queries(begin, min(begin + block, L))
        terms, visible = part.terms(), part.visible()
        for kind in kinds:
            scores = sum_terms(terms) if kind == "attention" else terms[kind]
            yield kind, masked_softmax(scores, visible)[:, :, :distances]


def last_attention(model: LanguageModel, ids: Ids, rows: int) -> Float[Tensor, "N H R K"]:
    """Attention weights by distance of the last `rows` tokens of a text, read as one stream: [layer, head, row, d]."""
    require_attention(model)
    check_text(model, ids)
    device = next(model.parameters()).device
    tokens = torch.from_numpy(ids.astype(np.int64)).to(device)[None]
    before = max(0, len(ids) - (rows if model.has_memory() else max(rows, model.reading.segment)))
    state = model.initial_state(1, trainable=False)
    with torch.inference_mode():
        if model.has_memory():
            state = read_segments(model, tokens[:, :before], state)
        layers, _ = layer_attentions(model, tokens[:, before:], state)
        weights = [layer.weights() for layer in layers]
    return torch.stack(weights)[:, :, -rows:].cpu()
