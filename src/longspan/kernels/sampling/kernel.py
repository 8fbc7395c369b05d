"""The Triton kernel that samples one token per program."""

import triton
import triton.language as tl

# Where random numbers come from.
NONE = tl.constexpr(0)
GIVEN = tl.constexpr(1)
PHILOX = tl.constexpr(2)


@triton.jit
def random_words(seed, draw, row):
    """Philox4x32-10 (Salmon et al. 2011) with the counter of cuRAND: the draw in the low half, the row in the high
    one. Both and the seed are 64-bit."""
    low, high = (draw & 0xFFFFFFFF).to(tl.uint32), ((draw >> 32) & 0xFFFFFFFF).to(tl.uint32)
    row_low, row_high = (row & 0xFFFFFFFF).to(tl.uint32), ((row >> 32) & 0xFFFFFFFF).to(tl.uint32)
    return tl.philox(seed, low, high, row_low, row_high)


@triton.jit
def uniform_number(seed, draw, row):
    """A float64 number, 0 <= u < 1, with 53 bits: what `torch.rand` of a CUDA generator has in place `row`."""
    x, y, _, _ = random_words(seed, draw, row)
    bits = x.to(tl.int64) ^ (y.to(tl.int64) << 21)
    number = bits.to(tl.float64) * 2.0**-53 + 2.0**-54
    return tl.where(number >= 1.0, 0.0, number)


@triton.jit
def penalised(z, n, presence, frequency, repetition):
    """The logits z of tokens that were generated n times."""
    z = z.to(tl.float64)
    z = tl.where(n > 0, tl.where(z > 0, z / repetition, z * repetition), z)
    return (z - frequency * n - tl.where(n > 0, presence, 0.0)).to(tl.float32)


@triton.jit
def ordered(z, v, BV: tl.constexpr):
    """The values z, largest first and equal ones by index, and their indices."""
    bits = z.to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # compares like the number
    packed = (bits.to(tl.int64) << 32) | (BV - 1 - v).to(tl.int64)
    packed = tl.sort(packed, descending=True)
    bits = (packed >> 32).to(tl.int32)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return bits.to(tl.float32, bitcast=True), BV - 1 - (packed & 0xFFFFFFFF).to(tl.int32)


@triton.jit(do_not_specialize=["top_k", "V"])
def choose_kernel(
    logits, uniform, counts, chosen, places, found, stride, V, B, temperature, top_k, top_p, min_p, presence, frequency,
    repetition, BV: tl.constexpr, RANDOM: tl.constexpr, ORDERED: tl.constexpr, COUNTS: tl.constexpr,
    PLACES: tl.constexpr, FOUND: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    v = tl.arange(0, BV)
    z = tl.load(logits + row * stride + v, mask=v < V, other=float("-inf")).to(tl.float32)
    if PLACES:
        place = places + row * 3
        seed, draw, turn = tl.load(place), tl.load(place + 1), tl.load(place + 2)
    if COUNTS:
        n = tl.load(counts + row * V + v, mask=v < V, other=0.0)
        z = penalised(z, n, presence, frequency, repetition)
    largest = tl.max(z, 0)
    unusable = (tl.sum((z != z).to(tl.int32), 0) > 0) | (tl.abs(largest) == float("inf"))
    if RANDOM == NONE:
        choice = tl.argmax(z, 0)
    else:
        token = v
        if ORDERED:
            z, token = ordered(z, v, BV)
        chance = tl.exp((z - largest).to(tl.float64) / temperature)
        if ORDERED:
            least = tl.sum(tl.where(v == top_k - 1, z, 0.0), 0)
            chance = tl.where(z >= least, chance, 0.0)
            # A token is dropped if the tokens before it already sum to top_p.
            before = tl.cumsum(chance, 0) - chance
            chance = tl.where((before < top_p * tl.sum(chance, 0)) | (v == 0) | (top_p >= 1), chance, 0.0)
        chance = tl.where(chance >= min_p, chance, 0.0)  # the largest is 1
        total = tl.cumsum(chance, 0)
        if RANDOM == PHILOX:
            number = uniform_number(seed, draw, row.to(tl.int64))
        else:
            number = tl.load(uniform + row)
        # Rounding must not lift the limit to the total: then no token would be above it.
        limit = number * tl.max(total, 0) * (1 - 2.0**-50)
        at = tl.min(tl.where((total > limit) & (chance > 0), v, BV), 0)
        choice = tl.sum(tl.where(v == at, token, 0), 0)
    result = tl.where(unusable, -1, choice).to(tl.int64)
    if FOUND:
        # The next step reads a token in any case; the host finds the -1.
        tl.store(found + (turn % 2) * B + row, result)
        result = tl.maximum(result, 0)
    tl.store(chosen + row, result)
    if PLACES:
        tl.debug_barrier()  # all warps have loaded what is overwritten here
        tl.store(place + 1, draw + 1)
        tl.store(place + 2, turn + 1)
        if COUNTS:
            fed = tl.maximum(result, 0)
            tl.store(counts + row * V + fed, tl.sum(tl.where(v == fed, n, 0.0), 0) + 1.0)
