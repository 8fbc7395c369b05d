"""Values that programs of one kernel send to each other through memory.

A value is stored together with the number of the step in one 64-bit word, and a reader polls the words it needs until
all have that number.
"""

import triton
import triton.language as tl

PATIENCE = tl.constexpr(200000)
"""Polls before a reader gives up, about 0.2 s: a wait without an end would block the device."""


@triton.jit
def send(box, at, inside, value, epoch):
    """Store values with the number of the step."""
    bits = value.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    tl.store(box + at, (epoch << 32) | bits, mask=inside)


@triton.jit
def missing(words, inside, epoch):
    """How many words are not of this step."""
    return tl.sum(tl.ravel(((words >> 32) != epoch) & inside).to(tl.int32), 0)


@triton.jit
def value_of(words):
    return (words & 0xFFFFFFFF).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def receive(box, at, inside, epoch, failed):
    """Values of this step, as soon as all have been sent; 0 outside."""
    words = tl.load(box + at, mask=inside, other=0, volatile=True)
    polls = 0
    while (missing(words, inside, epoch) > 0) & (polls < PATIENCE):
        words = tl.load(box + at, mask=inside, other=0, volatile=True)
        polls += 1
    if polls == PATIENCE:
        tl.store(failed, 1)
    return value_of(words)


@triton.jit
def missing_of_three(a, b, c, inside, epoch):
    lost = ((a >> 32) != epoch) | ((b >> 32) != epoch) | ((c >> 32) != epoch)
    return tl.sum(tl.ravel(lost & inside).to(tl.int32), 0)


@triton.jit
def receive_three(box, first, second, third, inside, epoch, failed):
    """Three tiles of values, whose words are loaded together: one trip to the L2 cache instead of three."""
    a = tl.load(box + first, mask=inside, other=0, volatile=True)
    b = tl.load(box + second, mask=inside, other=0, volatile=True)
    c = tl.load(box + third, mask=inside, other=0, volatile=True)
    polls = 0
    while (missing_of_three(a, b, c, inside, epoch) > 0) & (polls < PATIENCE):
        a = tl.load(box + first, mask=inside, other=0, volatile=True)
        b = tl.load(box + second, mask=inside, other=0, volatile=True)
        c = tl.load(box + third, mask=inside, other=0, volatile=True)
        polls += 1
    if polls == PATIENCE:
        tl.store(failed, 1)
    return value_of(a), value_of(b), value_of(c)


@triton.jit
def receive_vector(box, epoch, failed, K: tl.constexpr, BK: tl.constexpr):
    k = tl.arange(0, BK)
    return receive(box, k, k < K, epoch, failed)
