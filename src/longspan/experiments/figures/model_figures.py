"""All figures of one model on one text: figures 3 to 7 of Dai et al. 2019 and the attention spans."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from longspan.checkpoints.model_folder import Loaded
from longspan.contract import LanguageModel
from longspan.data.encoded import Encoded
from longspan.experiments.contexts import LONGEST, SHARES, THRESHOLD, even_contexts
from longspan.experiments.figures.attention import attention_by_distance
from longspan.experiments.figures.attention_figures import (
    draw_attention,
    draw_head,
    draw_spans,
    draw_terms,
    widest_heads,
)
from longspan.experiments.figures.attention_sample import sample_attention
from longspan.experiments.figures.context_figures import draw_gains, draw_perplexity
from longspan.experiments.figures.drawing import make_folder
from longspan.scoring.contexts import Passage, Progress, Subject, choose_targets, measure

ROWS = 40
TARGETS = 100
Stage = Callable[[str], AbstractContextManager[Progress | None]]
"""Opens the progress display of a named stage."""


def draw_figures(
    loaded: Loaded, name: str, text: Encoded, folder: Path, stage: Stage, *, tokens: int | None = None
) -> list[Path]:
    """Draw every figure of a model in `folder`, from the first `tokens` of a text (default: all). Returns the PNGs."""
    model, ids = loaded.model, text.ids[:tokens]
    contexts = default_contexts(model, len(ids))
    make_folder(folder)
    with stage("attention") as watch:
        means = attention_by_distance(model, ids, progress=watch)
    draw_attention(means, folder)
    draw_spans(means, folder)
    if means.terms:
        draw_terms(means, folder)
    sample = sample_attention(model, ids, loaded.tokenizer, ROWS)
    for rank, (layer, head) in enumerate(widest_heads(means), start=1):
        draw_head(sample, layer, head, f"figure6-{rank}", folder)
    if contexts:
        targets = choose_targets(len(ids), contexts[-1], min(TARGETS, len(ids) - contexts[-1]))
        with stage("contexts") as watch:
            passage = Passage(text.ids, targets, text.fingerprint)
            table = measure([Subject(name, model, loaded.hash)], passage, contexts, progress=watch)
        draw_gains(table, SHARES, THRESHOLD, folder)
        draw_perplexity(table, folder)
    return sorted(folder.glob("*.png"))


def default_contexts(model: LanguageModel, tokens: int) -> tuple[int, ...]:
    """Ten even steps up to 1000 tokens, half the text or the window, whichever is shortest."""
    return even_contexts(min(LONGEST, tokens // 2, LONGEST if model.has_memory() else model.reading.segment))
