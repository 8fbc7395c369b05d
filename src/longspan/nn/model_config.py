"""The config keys that all families share: shape, embedding and softmax, with their checks."""

from dataclasses import dataclass
from itertools import pairwise

from longspan import config
from longspan.errors import ConfigError
from longspan.nn.adaptive_softmax import AdaptiveSoftmax
from longspan.nn.embedding import AdaptiveEmbedding

# The largest value of every key of every family, far above any useful model. A test checks that every key has one.
LARGEST: dict[str, config.Bound] = {"vocabulary": 2**24, "cutoffs": 2**24, "layers": 2**12, "steps": 2**12}
# Sizes of weights.
LARGEST |= dict.fromkeys(
    ("width", "heads", "head_width", "inner", "embedding_width", "pointer_width", "div_val"), 2**20
)
LARGEST |= {"convolution": 2**10, "rate": 2**10, "buckets": 2**20, "rounds": 2**6}
# Positions.
LARGEST |= dict.fromkeys(("compressed", "span", "ramp", "chunk", "pieces"), 2**20)
LARGEST |= dict.fromkeys(("window", "dilation", "global_tokens", "stride", "summary", "block"), 2**20)
LARGEST |= dict.fromkeys(("window_blocks", "random_blocks", "global_blocks"), 2**20)
LARGEST |= {"targets": 2**12}  # a head each, so a million of them would fill the memory
LARGEST |= dict.fromkeys(("mask", "classify", "separator"), 2**24) | {"masked": 1}
LARGEST |= dict.fromkeys(("characters", "character_width", "filters"), 2**12)
LARGEST |= dict.fromkeys(("positions", "predict_every"), 2**20)
LARGEST |= {"max_distance": 2**21}  # a segment and a memory
# Rates, and factors of terms of the loss.
LARGEST |= dict.fromkeys(("dropout", "attention_dropout", "embedding_dropout", "input_dropout", "hidden_dropout"), 1)
LARGEST |= dict.fromkeys(("output_dropout", "projection_dropout", "weight_dropout", "zoneout", "threshold"), 1)
LARGEST |= dict.fromkeys(("ar", "tar", "ponder", "span_penalty"), 1e6)


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape, dropout, token embedding and softmax; families add the keys of their layers."""

    vocabulary: int = 256
    layers: int = 6
    width: int = 256
    dropout: float = 0.1
    embedding_width: int | None = None
    cutoffs: tuple[int, ...] = ()
    div_val: int = 1
    tie_embedding: bool = True
    tie_projections: bool = False

    def __post_init__(self) -> None:
        config.require_bounds(self, "model", LARGEST)
        for name in ("vocabulary", "layers", "width", "div_val"):
            require(getattr(self, name) >= 1, f"model.{name}={getattr(self, name)} must be at least 1")
        self.require_width("embedding_width")
        self.require_rate("dropout")
        increasing = all(a < b for a, b in pairwise((0, *self.cutoffs, self.vocabulary)))
        require(
            increasing,
            f"model.cutoffs={list(self.cutoffs)} must increase between 0 and the vocabulary of {self.vocabulary}; "
            "use fewer or smaller ones, or a tokenizer with more tokens",
        )
        narrowest = (self.embedding_width or self.width) // self.div_val ** min(len(self.cutoffs), 64)
        require(
            narrowest >= 1,
            f"model.div_val={self.div_val} leaves no width for the last of {len(self.cutoffs) + 1} clusters; "
            "try a smaller div_val or fewer cutoffs",
        )

    @property
    def far_discount(self) -> float:
        """The discount that a trained model is read with by default. It affects distances beyond those of training."""
        return 0.0

    def require_width(self, name: str) -> None:
        """An optional width is at least 1."""
        value = getattr(self, name)
        require(value is None or value >= 1, f"model.{name}={value} must be at least 1")

    def require_rate(self, name: str) -> None:
        """A dropout rate, which may be optional, is at least 0 and below 1."""
        value = getattr(self, name)
        require(value is None or 0 <= value < 1, f"model.{name}={value} must be in [0, 1)")

    def require_not_negative(self, name: str) -> None:
        value = getattr(self, name)
        require(value >= 0, f"model.{name}={value} must not be negative; 0 turns it off")

    def make_embedding(self, *, scaled: bool = True) -> AdaptiveEmbedding:
        return AdaptiveEmbedding(
            self.vocabulary, self.width, self.embedding_width or self.width, self.cutoffs, self.div_val, scaled=scaled
        )

    def make_head(
        self, embedding: AdaptiveEmbedding, *, tied: bool = True, kind: type[AdaptiveSoftmax] = AdaptiveSoftmax
    ) -> AdaptiveSoftmax:
        """The softmax, tied to the embedding as the config says; with `tied=False`, never."""
        return kind(
            embedding,
            self.vocabulary,
            self.cutoffs,
            tie_embedding=tied and self.tie_embedding,
            tie_projections=tied and self.tie_projections,
        )


class HeadsConfig(ModelConfig):
    """Sizes of attention heads and feed-forward layers, with their checks.

    It is no dataclass, so its annotations are not keys: every family declares its own, and some have no `head_width`.
    """

    heads: int
    head_width: int | None
    """Default: width / heads."""
    inner: int | None
    """Width of the feed-forward layer. Default: 4 * width."""
    attention_dropout: float

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.heads >= 1, f"model.heads={self.heads} must be at least 1")
        for name in ("head_width", "inner"):
            self.require_width(name)
        self.require_rate("attention_dropout")
        if self.head_width is None and self.width % self.heads:
            below = self.width // self.heads * self.heads
            options = f"{below} or {below + self.heads}" if below else f"{below + self.heads}"
            raise ConfigError(f"model.width={self.width} is not divisible by heads={self.heads}; try {options}")

    @property
    def head_size(self) -> int:
        return self.head_width or self.width // self.heads

    @property
    def inner_size(self) -> int:
        return self.inner or 4 * self.width
