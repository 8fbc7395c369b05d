"""Published test scores that a run can be compared with; all sizes, where a paper has several."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Published:
    """A result of a paper: `parameters` in millions, `score` in the corpus's unit; lower is better."""

    model: str
    parameters: float | None
    score: float


UNITS = {"enwik8": "bits per character", "text8": "bits per character", "wikitext-103": "perplexity per word"}
UNITS |= {"lm1b": "perplexity per word", "ptb": "perplexity per word"}
# Scores are comparable only if both are per the same kind of token.
COUNTED = {"enwik8": ("byte",), "text8": ("byte", "character")}

SCORES: dict[str, tuple[Published, ...]] = {
    "enwik8": (
        Published("AWD-LSTM", 47, 1.232),
        Published("Al-Rfou et al., 12 layers", 44, 1.11),
        Published("Transformer-XL, 12 layers", 41, 1.06),
        Published("Transformer-XL, 18 layers", 88, 1.03),
        Published("Adaptive span, small", 39, 1.02),
        Published("All-attention", 39, 1.01),
        Published("Transformer-XL, 24 layers", 277, 0.99),
        Published("Compressive Transformer", 277, 0.97),
    ),
    "text8": (Published("Transformer-XL, 24 layers", 277, 1.08),),
    "wikitext-103": (
        Published("Transformer-XL, standard", 151, 24.0),
        Published("Transformer-XL, large", 257, 18.3),
    ),
    "lm1b": (Published("Transformer-XL, base", 460, 23.5), Published("Transformer-XL, large", 800, 21.8)),
    "ptb": (
        Published("AWD-LSTM", 24, 57.3),
        Published("Transformer-XL", 24, 54.52),
        Published("Mogrifier LSTM", 24, 50.1),
    ),
}


def published_for(corpus: str) -> tuple[str, tuple[Published, ...]]:
    """The unit and the scores of a corpus, with any of its tokenizers; empty if none are known."""
    name = corpus.removesuffix("-authors")
    return UNITS.get(name, ""), SCORES.get(name, ())


def comparable(corpus: str, unit: str) -> bool:
    """Whether the published scores of a corpus are per this kind of token: byte, character or word."""
    return unit in COUNTED.get(corpus.removesuffix("-authors"), ("word",))
