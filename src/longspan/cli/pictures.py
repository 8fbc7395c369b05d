"""`longspan pictures`: what the heads of a model look at, and how far it sees."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from longspan.cli.options import DeviceName, DtypeName, ModelOrBox, Threads, machine, tell_of_box
from longspan.cli.progress import progress
from longspan.errors import ConfigError

if TYPE_CHECKING:
    from longspan.contract import LanguageModel

ROWS = 40
STEPS = 10
TARGETS = 100


def pictures(
    model: ModelOrBox = None,
    *,
    data: Annotated[str, typer.Option("--data", help="A file or folder, or a corpus that `longspan data list` names.")],
    out: Annotated[Path, typer.Option("--out", help="A folder for the pictures.")],
    split: Annotated[
        str | None, typer.Option("--split", help="train, valid or test; the whole text unless told.")
    ] = None,
    memory: Annotated[int | None, typer.Option("--memory", help="Positions remembered.")] = None,
    tokens: Annotated[int | None, typer.Option("--tokens", help="Read this many tokens of the text; all.")] = None,
    device: DeviceName = "auto",
    dtype: DtypeName = "auto",
    threads: Threads = 0,
) -> None:
    """Figures 3 to 7 of Dai et al. 2019 for a model on a text, and the span of every head, as PNG and SVG."""
    from longspan.analysis.attention import attention_by_distance
    from longspan.analysis.attention_figures import (
        draw_attention,
        draw_spans,
        draw_terms,
        draw_wide_head,
        widest_heads,
    )
    from longspan.analysis.context_figures import draw_gains, draw_perplexity
    from longspan.analysis.drawing import make_folder, require_matplotlib
    from longspan.analysis.passages import take_passage
    from longspan.box import box
    from longspan.checkpoints.model_folder import load_model
    from longspan.data.encoded import open_corpus
    from longspan.evaluation.contexts import Passage, Subject, choose_targets, measure

    require_matplotlib()
    if tokens is not None and tokens < 3:
        raise ConfigError(f"--tokens {tokens} must be at least 3")
    where = machine(device, dtype, threads)
    overrides = {} if memory is None else {"memory": memory}
    loaded = load_model(box(model), overrides=overrides, device=where.device, dtype=where.dtype)
    text = open_corpus(data, split, loaded.tokenizer)
    tell_of_box(model)
    ids = text.ids[:tokens]
    contexts = default_contexts(loaded.model, len(ids))
    make_folder(out)
    with progress("looking", quiet=False) as watch:
        found = attention_by_distance(loaded.model, ids, watch=watch)
    draw_attention(found, out)
    draw_spans(found, out)
    if found.terms:
        draw_terms(found, out)
    passage = take_passage(loaded.model, ids, loaded.tokenizer, ROWS)
    for rank, (layer, head) in enumerate(widest_heads(found), start=1):
        draw_wide_head(passage, layer, head, f"figure6-{rank}", out)
    if contexts:
        targets = choose_targets(len(ids), contexts[-1], min(TARGETS, len(ids) - contexts[-1]))
        subject = Subject((model or loaded.path).resolve().name, loaded.model, loaded.hash)
        with progress("measuring", quiet=False) as watch:
            table = measure([subject], Passage(text.ids, targets, text.fingerprint), contexts, watch=watch)
        draw_gains(table, {"0.1": 0.1, "0.5": 0.5, "1.0": 1.0}, 0.01, out)
        draw_perplexity(table, out)
    for path in sorted(out.glob("*.png")):
        print(path)


def default_contexts(model: "LanguageModel", tokens: int, longest: int = 1000) -> tuple[int, ...]:
    """Ten even steps to 1000 tokens, or to a window or half a text that is shorter; none where that is no walk."""
    last = min(longest, tokens // 2, longest if model.has_memory else model.config.segment)
    step = last // STEPS
    return tuple(range(step, step * STEPS + 1, step)) if step else ()
