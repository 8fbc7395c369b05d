"""Which earlier tokens of a text were attended to, which later tokens attended to one, and what the model expected.

Token t is predicted by the query at t - 1, so the weights and candidates of token t are those of that query.
"""

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from longspan.contract import LanguageModel
from longspan.errors import ConfigError, DataError
from longspan.experiments.figures.attention import LayerAttention, has_attention, recorded
from longspan.reading import Reading
from longspan.scoring.losses import Ids, check_text
from longspan.shapes import Float, Tensor

PIECE = 128
"""Tokens per call, where the result does not depend on it: a caller sees progress, and fewer masked keys are kept."""
KEPT = 4
"""Choices of layer and head whose weights are kept."""
Weights = NDArray[np.float32]


@dataclass(frozen=True)
class Segment:
    """The attention of the queries from `begin` on."""

    begin: int
    layers: tuple[LayerAttention, ...]

    def weights(self, first: int, last: int, layer: int | None, head: int | None) -> Float[Tensor, "L K"]:
        """Weights by distance of queries `first` to `last` of the segment: the mean over one layer or all, one head or
        all."""
        chosen = self.layers if layer is None else self.layers[layer : layer + 1]
        parts = [(one if head is None else one.head(head)).queries(first, last).weights() for one in chosen]
        return torch.stack([part.mean(dim=0) for part in parts]).mean(dim=0)


class AttentionLinks:
    """The attention of a text. `read` fills it; what was read can be asked for meanwhile, also by other threads."""

    def __init__(self, model: LanguageModel, ids: Ids, reading: Reading | None = None, *, candidates: int = 10) -> None:
        check_text(model, ids)
        self.model, self.ids, self.reading = model, ids, reading or model.reading
        model.check_reading(self.reading)
        if self.reading.same_length:
            self.reading = replace(self.reading, segment=min(self.reading.segment, PIECE))
        self.has_attention = has_attention(model)
        self.read_tokens = 0
        """Tokens with a loss, candidates and earlier tokens, the first (which has none of them) included."""
        self.nats = np.full(len(ids), np.nan, np.float32)
        count = min(candidates, model.config.vocabulary)
        self.candidates = np.zeros((len(ids), count), np.int64)
        self.probabilities = np.zeros((len(ids), count), np.float32)
        self._segments: list[Segment] = []
        self._keys: list[Tensor] = []
        self._kept: OrderedDict[tuple[int | None, int | None], Weights] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def layers(self) -> int:
        return self.model.config.layers if self.has_attention else 0

    @property
    def heads(self) -> int:
        return self.model.config.heads if self.has_attention else 0

    def read(self) -> Iterator[int]:
        """Read the text as one stream; yields the tokens read so far after every segment."""
        device, size = next(self.model.parameters()).device, self.reading.segment
        tokens = torch.from_numpy(self.ids.astype(np.int64)).to(device)[None]
        state = None
        for begin in range(0, len(self.ids) - 1, size):
            end = min(begin + size, len(self.ids) - 1)
            with torch.inference_mode():
                state = self.model.initial_state(1, self.reading, trainable=False) if state is None else state
                with recorded() as layers:
                    logits, state = self.model(tokens[:, begin:end], state)
                self._add_predictions(begin, logits[0].float().log_softmax(-1))
            if self.has_attention:
                self._segments.append(
                    Segment(begin, tuple(self._share_keys(n, end, one) for n, one in enumerate(layers)))
                )
            self.read_tokens = end + 1
            yield self.read_tokens

    def _share_keys(self, n: int, end: int, layer: LayerAttention) -> LayerAttention:
        """The same with its keys in a buffer of the whole text, if those in memory are the keys of before (a rotary
        layer turns them): segments overlap, and a copy for each would take many times the space."""
        (H, K, D), L = layer.key.shape, layer.query.shape[1]
        if n == len(self._keys):
            self._keys.append(layer.key.new_zeros(H, len(self.ids), D))
        self._keys[n][:, end - L : end] = layer.key[:, K - L :]
        shared = self._keys[n][:, max(end - K, 0) : end]
        return replace(layer, key=shared) if torch.equal(shared, layer.key) else layer

    def _add_predictions(self, begin: int, logs: Float[Tensor, "L V"]) -> None:
        place = slice(begin + 1, begin + 1 + len(logs))
        targets = torch.from_numpy(self.ids[place].astype(np.int64)).to(logs.device)
        self.nats[place] = -logs.gather(1, targets[:, None])[:, 0].cpu().numpy()
        values, tokens = logs.topk(self.candidates.shape[1])
        self.candidates[place] = tokens.cpu().numpy()
        self.probabilities[place] = values.exp().cpu().numpy()

    def earlier(self, token: int, layer: int | None = None, head: int | None = None) -> Weights:
        """The weights of tokens 0 to `token` - 1 when `token` was predicted. They sum to 1."""
        self._check(token, layer, head)
        if token == 0:
            return np.zeros(0, np.float32)
        with torch.inference_mode():
            by_distance = self._segment(token).weights(*self._place(token), layer, head)[0, :token].cpu().numpy()
        found = np.zeros(token, np.float32)
        found[token - len(by_distance) :] = by_distance[::-1]
        return found

    def far_shares(self, token: int, beyond: int) -> NDArray[np.float32]:
        """Per layer and head: the share of the attention that went to tokens more than `beyond` before `token`."""
        self._check(token, None, None)
        if token == 0:
            return np.zeros((self.layers, self.heads), np.float32)
        with torch.inference_mode():
            part = [layer.queries(*self._place(token)).weights()[:, 0] for layer in self._segment(token).layers]
            return torch.stack(part)[:, :, beyond:].sum(dim=2).cpu().numpy()

    def _segment(self, token: int) -> Segment:
        return self._segments[bisect_right(self._segments, token - 1, key=lambda one: one.begin) - 1]

    def _place(self, token: int) -> tuple[int, int]:
        """The query of a token in its segment."""
        query = token - 1 - self._segment(token).begin
        return query, query + 1

    def later(self, token: int, layer: int | None = None, head: int | None = None) -> Weights:
        """The weight that `token` got when `token` + 1, `token` + 2, ... were predicted. Needs the complete text."""
        self._check(token, layer, head)
        if self.read_tokens < len(self.ids):
            raise DataError(f"{self.read_tokens} of {len(self.ids)} tokens were read; wait for the complete text")
        weights = self._known(layer, head)
        if weights is None:
            weights = self._no_weights()
            for _ in self._compute(weights, layer, head):
                pass
        distances = np.arange(min(weights.shape[1], len(weights) - token))
        found = np.zeros(len(weights) - token, np.float32)
        found[distances] = weights[token + distances, distances]
        return found

    def prepare(self, layer: int | None = None, head: int | None = None) -> Iterator[int]:
        """Compute what `later` needs, one segment at a time; yields the queries done so far."""
        self._check(0, layer, head)
        yield from self._compute(self._no_weights(), layer, head)

    def _no_weights(self) -> Weights:
        longest = max(one.layers[0].key.shape[1] for one in self._segments)
        return np.zeros((len(self.ids) - 1, min(longest, self.reading.window or longest)), np.float32)

    def _compute(self, found: Weights, layer: int | None, head: int | None) -> Iterator[int]:
        """Fill in the weights by query and distance, and keep them."""
        for segment in self._segments:
            begin, count = segment.begin, segment.layers[0].query.shape[1]
            end = begin + count
            with torch.inference_mode():
                weights = segment.weights(0, count, layer, head).cpu().numpy()[:, : found.shape[1]]
            found[begin:end, : weights.shape[1]] = weights
            yield end
        with self._lock:
            self._kept[layer, head] = found
            self._kept.move_to_end((layer, head))
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)

    def _known(self, layer: int | None, head: int | None) -> Weights | None:
        """The weights if they are kept; those used longest ago are dropped first."""
        with self._lock:
            found = self._kept.get((layer, head))
            if found is not None:
                self._kept.move_to_end((layer, head))
            return found

    def is_prepared(self, layer: int | None = None, head: int | None = None) -> bool:
        return (layer, head) in self._kept

    def _check(self, token: int, layer: int | None, head: int | None) -> None:
        if not self.has_attention:
            raise ConfigError(
                f"{type(self.model).__name__} has no attention with one key per token, so it cannot be shown; use "
                "another family, for example transformer-xl"
            )
        if not 0 <= token < max(self.read_tokens, 1):
            raise DataError(f"token={token} must be between 0 and {self.read_tokens - 1}, the tokens read so far")
        for name, value, count in (("layer", layer, self.layers), ("head", head, self.heads)):
            if value is not None and not 0 <= value < count:
                raise ConfigError(f"{name}={value} must be between 0 and {count - 1}")
