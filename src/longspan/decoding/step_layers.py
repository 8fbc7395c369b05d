"""Layers in the form that the fast path needs. Models it does not support are decoded by `StreamDecoder`."""

from typing import Any, NamedTuple

import torch
from torch import nn

from longspan.cache import KeyValueCache, SegmentMask
from longspan.cache.convolution import ConvolutionCache
from longspan.config import keys
from longspan.contract import LanguageModel, State
from longspan.models.longspan_xl import LongspanXL
from longspan.models.transformer_xl import TransformerXL
from longspan.nn.feed_forward import FeedForward
from longspan.shapes import Float, Tensor

_TRANSFORMER_XL_KEYS = frozenset(
    [
        "vocabulary",
        "layers",
        "width",
        "dropout",
        "embedding_width",
        "cutoffs",
        "div_val",
        "tie_embedding",
        "tie_projections",
        "heads",
        "head_width",
        "inner",
        "norm",
        "shared_biases",
        "attention_dropout",
    ]
)
_LONGSPAN_XL_KEYS = _TRANSFORMER_XL_KEYS | frozenset(
    [
        "norm_type",
        "final_norm",
        "activation",
        "biases",
        "qk_norm",
        "convolution",
        "pointer_width",
        "log_distances",
        "position",
        "max_distance",
        "embedding_dropout",
        "input_dropout",
        "output_dropout",
        "projection_dropout",
        "ar",
        "tar",
    ]
)
COVERED_KEYS: dict[type, frozenset[str]] = {TransformerXL: _TRANSFORMER_XL_KEYS, LongspanXL: _LONGSPAN_XL_KEYS}
"""The config keys that the fast path applies, or that only training uses. It would ignore any other, so a model with
one is left to `StreamDecoder`."""


class StepLayer(NamedTuple):
    """A layer of four-term attention and feed-forward, for one token."""

    qkv: Float[Tensor, "P E"]
    """Wq, Wk and Wv as one matrix."""
    output: Float[Tensor, "E I"]
    r: Float[Tensor, "H C D"]
    u: Float[Tensor, "H D"]
    w: Float[Tensor, "H D"]
    attention_norm: nn.Module
    feed_forward_norm: nn.Module
    head_norms: tuple[Any, ...]
    """Norms of queries and keys, if any."""
    feed_forward: Any
    """The feed-forward layer as a function."""
    up: nn.Linear | None
    down: nn.Linear | None
    activation: str | None
    convolution: Any
    pre_norm: bool


def cache_size(state: State) -> int:
    """Slots of a rolling cache: the keys visible to the newest token, itself included."""
    return state.reading.window or state.reading.memory + 1


def step_layers(model: LanguageModel, state: State) -> list[StepLayer] | None:
    """The layers of a model that the fast path supports. None for other models, for trainable states (hidden states
    instead of keys and values) and with a pointer."""
    covered = COVERED_KEYS.get(type(model))
    if covered is None or not covered.issuperset(keys(type(model.config))):
        return None
    kind = ConvolutionCache if getattr(model, "taps", 0) else KeyValueCache
    if len(state.caches) != model.config.layers or not all(
        isinstance(cache, kind) and not cache.trainable for cache in state.caches
    ):
        return None
    size = cache_size(state)
    mask = SegmentMask(size - 1, 1, state.reading.memory, state.reading.window, None, None)
    with torch.no_grad():
        if type(model) is TransformerXL:
            table, _ = model.position_keys(state, size)
            biases = [model if model.config.shared_biases else block for block in model.layers]
            return [_from_block(*parts) for parts in zip(model.layers, table, biases, strict=True)]
        if type(model) is LongspanXL and not state.reading.pointer:
            positions, _ = model.positions(state, mask)
            layers: Any = model.layers
            return [_from_layer(layer, layer.with_biases(p)) for layer, p in zip(layers, positions, strict=True)]
    return None


def final_norm(model: LanguageModel) -> nn.Module:
    """The norm before the head; transformer-xl has none."""
    return model.final_norm if isinstance(model, LongspanXL) else nn.Identity()


def _from_block(block: Any, r: Tensor, biases: Any) -> StepLayer:
    return StepLayer(
        torch.cat([block.query.weight, block.key.weight, block.value.weight]),
        block.output.weight,
        r,
        biases.u,
        biases.w,
        block.attention_norm,
        block.feed_forward_norm,
        (),
        block.feed_forward,
        block.up,
        block.down,
        "relu",
        None,
        block.pre_norm,
    )


def _from_layer(layer: Any, position: tuple[Tensor, Tensor, Tensor]) -> StepLayer:
    attention, dense = layer.attention, layer.feed_forward
    plain = isinstance(dense, FeedForward)
    norms = (attention.query_norm, attention.key_norm)
    return StepLayer(
        torch.cat([attention.query.weight, attention.key.weight, attention.value.weight]),
        attention.output.weight,
        *position,
        layer.attention_residual.norm,
        layer.feed_forward_residual.norm,
        () if isinstance(attention.query_norm, nn.Identity) else norms,
        dense.forward,
        dense.up if plain else None,
        dense.down if plain else None,
        dense.name if plain else None,
        layer.convolution,
        layer.attention_residual.pre_norm,
    )
