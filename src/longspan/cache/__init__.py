"""Typed caches that layers carry from one segment to the next, and which of their positions a query sees."""

from longspan.cache.attention import (
    AttentionCache,
    KeyValueCache,
    Memory,
    empty_cache,
    expanded_zeros,
    extend,
    join_product,
    newest,
    newest_pairs,
)
from longspan.cache.convolution import ConvolutionCache
from longspan.cache.segment import SegmentMask, next_state, open_state
from longspan.cache.window import TokenWindow

__all__ = [
    "AttentionCache",
    "ConvolutionCache",
    "KeyValueCache",
    "Memory",
    "SegmentMask",
    "TokenWindow",
    "empty_cache",
    "expanded_zeros",
    "extend",
    "join_product",
    "newest",
    "newest_pairs",
    "next_state",
    "open_state",
]
