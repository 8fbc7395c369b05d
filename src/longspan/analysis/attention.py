"""What every head attends to, by distance, over a text of any length and in memory that does not grow with it.

A layer's attention is computed anew from what the contract gives (its inputs and the memory it had), a block of
queries at a time, laid out by distance, added to running sums and let go.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from longspan.contract import LanguageModel, State, read_segments
from longspan.errors import ConfigError
from longspan.evaluation.contexts import Watch
from longspan.evaluation.likelihood import Ids, check_text
from longspan.layers.attention import no_biases
from longspan.layers.positions import place_in_document
from longspan.memory.segments import first_visible
from longspan.models.transformer_xl import TransformerXL
from longspan.models.vanilla import Vanilla
from longspan.shapes import Bool, Float, Int, Tensor

TERMS = ("a", "b", "c", "d")
_SCORES_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class Look:
    """What the attention of one layer is made from: one row, queries of a segment, keys of memory and segment.

    `r`, `u` and `w` are as in `kernels.relative_attention`; None where scores have no position term.
    """

    query: Float[Tensor, "H L D"]
    key: Float[Tensor, "H K D"]
    r: Float[Tensor, "H C D"] | None
    u: Float[Tensor, "H D"] | None
    w: Float[Tensor, "H D"] | None
    window: int | None
    first_key: Int[Tensor, "L"] | None

    def part(self, begin: int, end: int) -> "Look":
        """Some of the queries, with the keys up to the last of them."""
        L, K = self.query.shape[1], self.key.shape[1]
        first = None if self.first_key is None else self.first_key[begin:end]
        return dataclasses.replace(
            self, query=self.query[:, begin:end], key=self.key[:, : K - L + end], first_key=first
        )

    def seen(self) -> Bool[Tensor, "L K"]:
        """Whether query i sees the key at distance d, as [i, d]."""
        L, K = self.query.shape[1], self.key.shape[1]
        place = torch.arange(K - L, K, device=self.query.device)[:, None]
        distance = torch.arange(K, device=self.query.device)
        first = 0 if self.first_key is None else self.first_key[:, None]
        seen = distance <= place - first
        return seen if self.window is None else seen & (distance < self.window)

    def terms(self) -> dict[str, Float[Tensor, "H L K"]]:
        """The terms of the score by distance, [h, i, d]: a q.k, b q.r, c u.k, d w.r, each over sqrt(D)."""
        L, K, scale = self.query.shape[1], self.key.shape[1], self.query.shape[2] ** -0.5
        key = self.key.transpose(1, 2)
        found = {"a": by_distance(self.query @ key) * scale}
        if self.r is None or self.u is None or self.w is None:
            return found
        # Columns of r descend to distance 0; distances beyond the clamp look like the last it knows.
        far = torch.arange(K, device=key.device).clamp(max=self.r.shape[1] - 1)
        r = self.r.flip(1)[:, far].transpose(1, 2)
        found["b"] = self.query @ r * scale
        found["c"] = by_distance((self.u[:, None] @ key).expand(-1, L, -1)) * scale
        found["d"] = (self.w[:, None] @ r).expand(-1, L, -1) * scale
        return found


def by_distance(scores: Float[Tensor, "H L K"]) -> Float[Tensor, "H L K"]:
    """[h, i, j] over keys as [h, i, d] over distances; what lies before the first key must be hidden."""
    L, K = scores.shape[1:]
    place = torch.arange(K - L, K, device=scores.device)[:, None]
    key = (place - torch.arange(K, device=scores.device)).clamp(min=0)
    return scores.gather(2, key.expand(scores.shape[0], -1, -1))


def softmax_seen(scores: Float[Tensor, "H L K"], seen: Bool[Tensor, "L K"]) -> Float[Tensor, "H L K"]:
    return torch.softmax(scores.float().masked_fill(~seen, float("-inf")), dim=-1)


def can_be_drawn(model: LanguageModel) -> bool:
    return isinstance(model, TransformerXL | Vanilla)


def require_attention(model: LanguageModel) -> None:
    if not can_be_drawn(model):
        raise ConfigError("pictures of attention are drawn for transformer-xl and vanilla; this model is neither")


def looks(model: LanguageModel, tokens: Int[Tensor, "1 T"], state: State) -> tuple[Iterator[Look], State]:
    """One `Look` per layer at a segment of a single row, and the state after it."""
    require_attention(model)
    hidden, after = model.hidden_states(tokens, state)
    if isinstance(model, TransformerXL):
        return _looks_of_xl(model, hidden, state), after
    return _looks_of_vanilla(cast(Vanilla, model), hidden), after


def _looks_of_xl(model: TransformerXL, hidden: tuple[Tensor, ...], state: State) -> Iterator[Look]:
    remembered = state.parts["keys"][0].shape[2]
    T = hidden[0].shape[1]
    first = first_visible(state.length, remembered, T, None)[0]
    position = model.positions(remembered + T)
    layers: Any = model.layers
    for n, layer in enumerate(layers):
        query = layer.attention.queries(layer.attention_residual.inputs(hidden[n]))[0]
        key = torch.cat([state.parts["keys"][n], layer.keys_values(hidden[n])[0]], dim=2)[0]
        r, u, w = (part.to(query.dtype) for part in position(layer))
        yield Look(query, key, r, u, w, model.config.window, first)


def _looks_of_vanilla(model: Vanilla, hidden: tuple[Tensor, ...]) -> Iterator[Look]:
    T = hidden[0].shape[1]
    layers: Any = model.layers
    for n, layer in enumerate(layers):
        h = hidden[n]
        if hasattr(layer, "places"):
            h = h + layer.places[place_in_document(None, T, h.device)]
        inputs = layer.attention_residual.inputs(h)
        r, u, w = no_biases(layer.distances(T)) if hasattr(layer, "distances") else (None, None, None)
        query, (key, _) = layer.attention.queries(inputs), layer.attention.keys_values(inputs)
        yield Look(query[0], key[0], r, u, w, None, None)


@dataclass(frozen=True, eq=False)
class AttentionByDistance:
    """Means over queries. `attention[n, h, d]`: how much head h of layer n gives to what lies d tokens back, over the
    queries that see that far; `terms[x]` the same for each term of the score alone, softmaxed over what is seen."""

    attention: NDArray[np.float64]
    terms: dict[str, NDArray[np.float64]]
    queries: int

    @property
    def distances(self) -> int:
        return self.attention.shape[2]

    def spans(self, share: float) -> NDArray[np.int64]:
        """For each layer and head, the tokens back (itself the first) within which that share of attention lies."""
        total = self.attention.sum(axis=2, keepdims=True)
        return (self.attention.cumsum(axis=2) < share * total).sum(axis=2) + 1

    def mean_distances(self) -> NDArray[np.float64]:
        """For each layer and head, the mean distance of what it attends to."""
        return self.attention @ np.arange(self.distances) / self.attention.sum(axis=2)


def attention_by_distance(
    model: LanguageModel, ids: Ids, *, with_terms: bool = True, watch: Watch | None = None
) -> AttentionByDistance:
    """Read a text as one stream and average what every head attends to.

    Queries that came before the memory was full are left out, as long as the text is longer than the memory.
    """
    require_attention(model)
    check_text(model, ids)
    config, device = model.config, next(model.parameters()).device
    memory = config.memory if isinstance(model, TransformerXL) else 0
    farthest = min(len(ids), config.window or memory + config.segment if memory else config.segment)
    warm = memory if len(ids) > memory + config.segment else 0
    kinds = ("attention", *(TERMS if with_terms and has_terms(model) else ()))
    shape = (config.layers, config.heads, farthest)
    sums = {kind: torch.zeros(shape, dtype=torch.float64, device=device) for kind in kinds}
    counts = torch.zeros(farthest, dtype=torch.float64, device=device)
    queries, state = 0, model.initial_state(1)
    for begin in range(0, len(ids), config.segment):
        piece = torch.from_numpy(ids[begin : begin + config.segment].astype(np.int64)).to(device)[None]
        with torch.inference_mode():
            layers, state = looks(model, piece, state)
            if begin >= warm:
                queries += piece.shape[1]
                for n, look in enumerate(layers):
                    for kind, weights in _weights(look, kinds, farthest):
                        sums[kind][n, :, : weights.shape[2]] += weights.sum(dim=1, dtype=torch.float64)
                seen = look.seen()[:, :farthest]
                counts[: seen.shape[1]] += seen.sum(dim=0)
        if watch is not None:
            watch(min(begin + config.segment, len(ids)), len(ids))
    means = {kind: (found / counts.clamp(min=1)).cpu().numpy() for kind, found in sums.items()}
    return AttentionByDistance(means.pop("attention"), means, queries)


def has_terms(model: LanguageModel) -> bool:
    """Whether the score is the four-term one of Dai et al. 2019."""
    return isinstance(model, TransformerXL) and model.config.position == "relative"


def _weights(look: Look, kinds: tuple[str, ...], farthest: int) -> Iterator[tuple[str, Float[Tensor, "H R K"]]]:
    """The softmax of each kind of score, for a block of queries at a time, up to a distance."""
    (H, L, _), K = look.query.shape, look.key.shape[1]
    block = max(1, _SCORES_AT_ONCE // (H * K))
    for begin in range(0, L, block):
        part = look.part(begin, min(begin + block, L))
        terms, seen = part.terms(), part.seen()
        for kind in kinds:
            scores = sum_of(terms) if kind == "attention" else terms[kind]
            yield kind, softmax_seen(scores, seen)[:, :, :farthest]


def attention_at(model: LanguageModel, ids: Ids, rows: int) -> Float[Tensor, "N H R K"]:
    """Every head's attention by distance at the last `rows` tokens of a text, read as one stream."""
    check_text(model, ids)
    device = next(model.parameters()).device
    tokens = torch.from_numpy(ids.astype(np.int64)).to(device)[None]
    before = max(0, len(ids) - (rows if model.has_memory else max(rows, model.config.segment)))
    state = model.initial_state(1)
    with torch.inference_mode():
        if model.has_memory:
            state = read_segments(model, tokens[:, :before], state)
        layers, _ = looks(model, tokens[:, before:], state)
        found = [softmax_seen(sum_of(look.terms()), look.seen()) for look in layers]
    return torch.stack(found)[:, :, -rows:].cpu()


def sum_of(terms: dict[str, Tensor]) -> Tensor:
    return torch.stack(list(terms.values())).sum(dim=0)
