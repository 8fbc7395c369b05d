"""Generation: decoders that process one token per step, sampling, and sessions."""

from longspan.decoding.open import open_decoder

__all__ = ["open_decoder"]
