"""What every family's config has: its shape, how tokens become vectors and back, and checks that tell in a sentence."""

from dataclasses import dataclass
from itertools import pairwise

from longspan import config
from longspan.errors import ConfigError
from longspan.layers.adaptive_softmax import AdaptiveSoftmax
from longspan.layers.embedding import AdaptiveEmbedding

# The largest value of every key of every family: beyond any model that is of use. A test holds every key to have one.
LARGEST: dict[str, config.Bound] = {"vocabulary": 2**24, "cutoffs": 2**24, "layers": 2**12, "steps": 2**12}
# Sizes of weights.
LARGEST |= dict.fromkeys(("width", "heads", "head_width", "inner", "embedding_width", "copy_width", "div_val"), 2**20)
LARGEST |= {"convolution": 2**10, "rate": 2**10, "buckets": 2**20, "rounds": 2**6}
# Positions.
LARGEST |= dict.fromkeys(("segment", "memory", "clamp", "compressed", "span", "ramp", "copy", "chunk", "pieces"), 2**20)
LARGEST |= dict.fromkeys(("window", "dilation", "global_tokens", "stride", "summary", "block", "targets"), 2**20)
LARGEST |= dict.fromkeys(("window_blocks", "random_blocks", "global_blocks"), 2**20)
LARGEST |= {"max_distance": 2**21}  # by default a segment and a memory
# Rates, and factors of what joins a loss.
LARGEST |= dict.fromkeys(("dropout", "attention_dropout", "embedding_dropout", "input_dropout", "hidden_dropout"), 1)
LARGEST |= dict.fromkeys(("output_dropout", "projection_dropout", "weight_dropout", "zoneout", "threshold"), 1)
LARGEST |= dict.fromkeys(("ar", "tar", "ponder", "span_penalty"), 1e6)

# What no weight depends on, so that a model may be scored with another than it was trained with.
WEIGHTLESS = ("memory", "clamp", "same_length", "copy")


def require(holds: bool, sentence: str) -> None:
    if not holds:
        raise ConfigError(sentence)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape, dropout, token embedding and softmax; a kind of model adds what its layers are made of."""

    vocabulary: int = 256
    layers: int = 6
    width: int = 256
    segment: int = 128
    dropout: float = 0.1
    embedding_width: int | None = None
    cutoffs: tuple[int, ...] = ()
    div_val: int = 1
    tie_embedding: bool = True
    tie_projections: bool = False

    def __post_init__(self) -> None:
        config.require_bounds(self, "model", LARGEST)
        for name in ("vocabulary", "layers", "width", "segment", "div_val"):
            require(getattr(self, name) >= 1, f"model.{name}={getattr(self, name)} must be at least 1")
        self.require_width("embedding_width")
        self.require_rate("dropout")
        rising = all(a < b for a, b in pairwise((0, *self.cutoffs, self.vocabulary)))
        require(
            rising,
            f"model.cutoffs={list(self.cutoffs)} must rise and lie between 0 and the vocabulary of {self.vocabulary}",
        )
        narrowest = (self.embedding_width or self.width) // self.div_val ** min(len(self.cutoffs), 64)
        require(
            narrowest >= 1,
            f"model.div_val={self.div_val} leaves the rarest of {len(self.cutoffs) + 1} clusters no width; "
            "try a smaller div_val or fewer cutoffs",
        )

    def require_width(self, name: str) -> None:
        """A width that may be left out is at least 1 where it is given."""
        value = getattr(self, name)
        require(value is None or value >= 1, f"model.{name}={value} must be at least 1")

    def require_rate(self, name: str) -> None:
        """A rate of dropout lies below 1; one that may be left out, where it is given."""
        value = getattr(self, name)
        require(value is None or 0 <= value < 1, f"model.{name}={value} must lie in [0, 1)")

    def require_penalty(self, name: str) -> None:
        value = getattr(self, name)
        require(value >= 0, f"model.{name}={value} must not be negative; 0 turns it off")

    def make_embedding(self, *, scaled: bool = True) -> AdaptiveEmbedding:
        return AdaptiveEmbedding(
            self.vocabulary, self.width, self.embedding_width or self.width, self.cutoffs, self.div_val, scaled=scaled
        )

    def make_head(self, embedding: AdaptiveEmbedding, *, tied: bool = True) -> AdaptiveSoftmax:
        """The softmax; where it may be `tied` to the embedding, it is what the config says."""
        return AdaptiveSoftmax(
            embedding,
            self.vocabulary,
            self.cutoffs,
            tie_embedding=tied and self.tie_embedding,
            tie_projections=tied and self.tie_projections,
        )
