"""The tensors of a layer by their addresses."""

import triton
import triton.language as tl

# Entries of a layer in the table of addresses.
QKV = tl.constexpr(0)
OUTPUT = tl.constexpr(1)
UP = tl.constexpr(2)
UP_BIAS = tl.constexpr(3)
DOWN = tl.constexpr(4)
DOWN_BIAS = tl.constexpr(5)
ATTENTION_GAIN = tl.constexpr(6)
ATTENTION_SHIFT = tl.constexpr(7)
FEED_FORWARD_GAIN = tl.constexpr(8)
FEED_FORWARD_SHIFT = tl.constexpr(9)
KEYS = tl.constexpr(10)
VALUES = tl.constexpr(11)
DISTANCE = tl.constexpr(12)
U = tl.constexpr(13)
W = tl.constexpr(14)
QUERY_GAIN = tl.constexpr(15)
KEY_GAIN = tl.constexpr(16)
ENTRIES = tl.constexpr(17)


@triton.jit
def entry(table, n, which: tl.constexpr, like):
    """The address of a tensor of layer n, as a pointer to the model's dtype."""
    address = tl.load(table + n * ENTRIES + which)
    return tl.multiple_of(address.to(like.dtype), 16)
