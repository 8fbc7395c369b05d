"""Random words of the sampling kernel, for its test."""

import triton
import triton.language as tl

from longspan.kernels.sampling.kernel import random_words, uniform_number


@triton.jit
def words_kernel(given, words, numbers):
    """`given` has a seed, a draw and a row per program."""
    at = tl.program_id(0)
    seed, draw, row = tl.load(given + 3 * at), tl.load(given + 3 * at + 1), tl.load(given + 3 * at + 2)
    a, b, c, d = random_words(seed, draw, row)
    tl.store(words + 4 * at, a.to(tl.int64))
    tl.store(words + 4 * at + 1, b.to(tl.int64))
    tl.store(words + 4 * at + 2, c.to(tl.int64))
    tl.store(words + 4 * at + 3, d.to(tl.int64))
    tl.store(numbers + at, uniform_number(seed, draw, row))
