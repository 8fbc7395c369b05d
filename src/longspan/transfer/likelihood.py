"""Tasks without training, by the likelihood of a language model: BLiMP, LAMBADA, COPA and WikiText-2."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from longspan.contract import LanguageModel
from longspan.errors import ConfigError, UnknownNameError
from longspan.reading import Reading
from longspan.scoring.losses import check_stride
from longspan.scoring.score import score
from longspan.text_model import TextModel
from longspan.tokenizers.text import to_bytes
from longspan.transfer.batches import by_length
from longspan.transfer.encoded import encode_texts
from longspan.transfer.tasks.opened import rows_of
from longspan.transfer.tasks.packed import install

Ids = NDArray[np.int64]
NEUTRAL = "This is a sentence."
"""Before a sentence of BLiMP."""
LOGITS = {"cpu": 2**22, "cuda": 2**28}
"""The most logits of a batch, padding included."""


@dataclass(frozen=True)
class Likelihood:
    """log p(continuation | context) in nats, and whether each of its tokens is the most probable one."""

    log_probability: float
    greedy: bool


def likelihoods(model: TextModel, pairs: Sequence[tuple[str, str]], reading: Reading | None = None) -> list[Likelihood]:
    """The likelihood of every continuation after its context. Each text is preceded by the end-of-document token or a
    newline, so its first token has a probability. lm-eval does so only if the context is empty, so its scores of
    LAMBADA and COPA differ slightly.

    A model without memory reads the last tokens that fit into a segment.
    """
    language_model, reading = model.model, reading or model.reading
    language_model.require_next_token()
    texts = [to_bytes(text) for pair in pairs for text in pair]
    encoded = encode_texts(model.tokenizer, texts)
    first = model.first_token().astype(np.int64)
    rows, sizes = [], []
    for context, continuation in zip(encoded[::2], encoded[1::2], strict=True):
        ids = np.concatenate([first, context.astype(np.int64), continuation.astype(np.int64)])
        limit = len(ids) if language_model.has_memory(reading) else reading.segment + 1
        rows.append(ids[-limit:])
        sizes.append(min(len(continuation), limit - 1))
    found: dict[int, Likelihood] = {}
    tokens = LOGITS.get(model.device.type, LOGITS["cpu"]) // language_model.config.vocabulary
    for chosen in by_length([len(row) for row in rows], tokens):
        scored = _score(language_model, [rows[k] for k in chosen], [sizes[k] for k in chosen], reading)
        found |= dict(zip(chosen, scored, strict=True))
    return [found[k] for k in range(len(rows))]


def _score(model: LanguageModel, rows: list[Ids], sizes: list[int], reading: Reading) -> list[Likelihood]:
    """The likelihood of the last `sizes` tokens of every row."""
    width, device = max(len(row) for row in rows), next(model.parameters()).device
    padded = np.zeros((len(rows), width), np.int64)
    counted = np.zeros((len(rows), width - 1), np.bool_)
    for k, (row, size) in enumerate(zip(rows, sizes, strict=True)):
        padded[k, : len(row)] = row
        counted[k, len(row) - 1 - size : len(row) - 1] = True
    ids, mask = torch.from_numpy(padded).to(device), torch.from_numpy(counted).to(device)
    segments = zip(*(part.split(reading.segment, dim=1) for part in (ids[:, :-1], ids[:, 1:], mask)), strict=True)
    total = torch.zeros(len(rows), dtype=torch.float64, device=device)
    greedy = torch.ones(len(rows), dtype=torch.bool, device=device)
    with torch.inference_mode():
        state = model.initial_state(len(rows), reading, trainable=False)
        for tokens, targets, scored in segments:
            logits, state = model(tokens, state)
            logits = logits.float()
            log_probabilities = logits.gather(-1, targets[..., None])[..., 0] - logits.logsumexp(-1)
            total += torch.where(scored, log_probabilities, 0.0).double().sum(1)
            greedy &= ((logits.argmax(-1) == targets) | ~scored).all(1)
    return [Likelihood(*values) for values in zip(total.tolist(), greedy.tolist(), strict=True)]


def blimp(model: TextModel, rows: Sequence[dict[str, Any]], reading: Reading | None = None) -> dict[str, Any]:
    """The share of minimal pairs whose acceptable sentence is more probable: the mean over paradigms, as published.
    A tie is half right.

    Both sentences of a pair are inside a document, after the same neutral one, because documents begin with special
    sentences: those of an encyclopedia define a title. `accuracy_at_start` is for sentences that begin a document, as
    in lm-eval."""
    inside = _paradigms(model, rows, (NEUTRAL, " "), reading)
    start = _paradigms(model, rows, ("", ""), reading)
    return {
        "accuracy": float(np.mean(list(inside.values()))),
        "accuracy_at_start": float(np.mean(list(start.values()))),
        "pairs": len(rows),
        "paradigms": inside,
    }


def _paradigms(
    model: TextModel, rows: Sequence[dict[str, Any]], before: tuple[str, str], reading: Reading | None
) -> dict[str, float]:
    """The accuracy of every paradigm of BLiMP. `before` is the context, and what separates it from a sentence."""
    context, between = before
    pairs = [(context, between + row[key]) for row in rows for key in ("good", "bad")]
    found = likelihoods(model, pairs, reading)
    right: dict[str, list[float]] = defaultdict(list)
    for row, good, bad in zip(rows, found[::2], found[1::2], strict=True):
        difference = good.log_probability - bad.log_probability
        right[row["paradigm"]].append(0.5 + 0.5 * np.sign(difference))
    return {name: float(np.mean(values)) for name, values in right.items()}


def lambada(model: TextModel, rows: Sequence[dict[str, Any]], reading: Reading | None = None) -> dict[str, Any]:
    """The share of last words of which every token is the most probable one, and the perplexity of the words."""
    found = likelihoods(model, [(row["text"], f" {row['target']}") for row in rows], reading)
    nats = -float(np.mean([one.log_probability for one in found]))
    return {
        "accuracy": float(np.mean([one.greedy for one in found])),
        "perplexity": math.exp(min(nats, 700.0)),
        "passages": len(rows),
    }


def copa(model: TextModel, rows: Sequence[dict[str, Any]], reading: Reading | None = None) -> dict[str, Any]:
    """The share of premises after which the right choice is the most probable continuation."""
    choices = ("choice1", "choice2")
    found = likelihoods(model, [(row["premise"], f" {row[key]}") for row in rows for key in choices], reading)
    scores = np.array([one.log_probability for one in found]).reshape(-1, len(choices))
    right = scores.argmax(1) == np.array([int(row["label"]) for row in rows])
    return {"accuracy": float(right.mean()), "questions": len(rows)}


def wikitext2(
    model: TextModel, rows: Sequence[dict[str, Any]], reading: Reading | None = None, stride: int | None = None
) -> dict[str, Any]:
    """The perplexity per word of WikiText-2, of articles as prose. Every article is read from its start.

    A family without memory reads windows of a segment, and `stride` tokens of each are scored. Default: half of them.
    """
    reading = reading or model.reading
    model.model.require_next_token()
    step = find_stride(model.model, reading, stride)
    texts, first = [to_bytes(row["text"]) for row in rows], model.first_token()
    encoded = encode_texts(model.tokenizer, texts)
    scores = [score(model.model, np.concatenate([first, ids]), reading, stride=step or 1) for ids in encoded]
    nats, words = sum(one.nats * one.scored for one in scores), sum(row["words"] for row in rows)
    stated = {} if step is None else {"stride": step}
    return stated | {
        "perplexity": math.exp(min(nats / words, 700.0)),
        "bits_per_byte": nats / math.log(2) / sum(map(len, texts)),
        "words": words,
        "articles": len(rows),
    }


def find_stride(model: LanguageModel, reading: Reading, stride: int | None) -> int | None:
    """The tokens that are scored per window; None for a family with memory, which reads a text as a stream."""
    if model.has_memory(reading):
        if stride is not None:
            raise ConfigError(f"stride={stride} has an effect only on families without memory; leave it out")
        return None
    stride = max(1, reading.segment // 2) if stride is None else stride
    check_stride(stride, reading)
    return stride


Score = Callable[..., dict[str, Any]]
TASKS: dict[str, tuple[Score, tuple[str, ...]]] = {
    "blimp": (blimp, ("test",)),
    "lambada": (lambada, ("dev", "test")),
    "copa": (copa, ("dev",)),
    "wikitext2": (wikitext2, ("test",)),
}
"""How each task is scored, and its splits."""


def evaluate_tasks(
    model: TextModel,
    tasks: Iterable[str] = tuple(TASKS),
    *,
    source: str | Path | None = None,
    limit: int | None = None,
    reading: Reading | None = None,
    stride: int | None = None,
    announce: Callable[[str], object] = lambda _: None,
) -> dict[str, dict[str, Any]]:
    """The scores of some tasks, as `task` or `task/split`. `limit` is the most rows of each, evenly spaced.
    `stride` is that of `wikitext2`. `announce` gets a line before each."""
    chosen = list(tasks)
    if not chosen:
        raise ConfigError(f"--tasks is empty; choose from {', '.join(TASKS)}")
    for name in chosen:
        if name not in TASKS:
            raise UnknownNameError("task scored by likelihood", name, TASKS)
    if limit is not None and limit < 1:
        raise ConfigError(f"limit={limit} must be at least 1")
    if stride is not None:
        if "wikitext2" not in chosen:
            raise ConfigError(f"stride={stride} has an effect on wikitext2 only; leave it out")
        find_stride(model.model, reading or model.reading, stride)
    results = {}
    for name in chosen:
        scored, splits = TASKS[name]
        folder = install(name, source)
        for split in splits:
            rows = list(rows_of(folder / f"{split}.jsonl"))
            title = name if len(splits) == 1 else f"{name}/{split}"
            chosen_rows = spaced(rows, limit)
            announce(f"scoring {title}: {len(chosen_rows):,} rows")
            options = {"stride": stride} if name == "wikitext2" else {}
            results[title] = scored(model, chosen_rows, reading, **options)
    return results


def spaced(rows: list[dict[str, Any]], limit: int | None) -> list[dict[str, Any]]:
    """At most `limit` rows, evenly spaced over all."""
    count = min(limit or len(rows), len(rows))
    return [rows[k * len(rows) // count] for k in range(count)]
