"""Losses with exactly c tokens of context: empty state, memory of at least c, equal targets for every c and model."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from longspan.config import plain
from longspan.contract import LanguageModel
from longspan.data.cache import cache_folder, key, write_atomic
from longspan.errors import ConfigError, DataError, counted
from longspan.reading import Reading
from longspan.scoring.loss_table import LossTable, check_contexts
from longspan.scoring.losses import Ids, Progress, check_text
from longspan.segments import read_segments

_FORMAT = 3
_TOKENS_PER_BATCH = 1 << 14

Targets = NDArray[np.int64]


@dataclass(frozen=True)
class Subject:
    """A named model to measure. Its losses are cached under `hash`; without one they are not cached."""

    name: str
    model: LanguageModel
    hash: str = ""


@dataclass(frozen=True, eq=False)
class Passage:
    """A text as token ids, and the positions to predict. `fingerprint` identifies the text in the cache."""

    ids: Ids
    targets: Targets
    fingerprint: str = ""


def choose_targets(tokens: int, longest: int, count: int | None = None, *, seed: int = 0) -> Targets:
    """Random positions with at least `longest` tokens before them, without repetition, sorted. Default: 200 of them, or
    all if there are fewer."""
    available = tokens - longest
    if available < 1:
        raise DataError(
            f"the text has {counted(tokens, 'token')}, but a context of {longest} needs at least {longest + 1}; "
            "use a longer text or shorter contexts"
        )
    count = min(200, available) if count is None else count
    if count < 1:
        raise ConfigError(f"targets={count} must be at least 1")
    if count > available:
        raise DataError(
            f"targets={count} is more than the {available} tokens of this text that have a context of "
            f"{longest}; use fewer targets, shorter contexts or a longer text"
        )
    # Drawn from the complete text, skipping those with too few tokens before them, so that a longer context or more
    # targets keep earlier targets. Even spacing could align with the structure of a text: lines of a table, records.
    random, draws, chosen = np.random.default_rng(seed), 1 << 12, np.empty(0, np.int64)
    while len(chosen) < count:
        drawn = random.integers(0, tokens, draws)
        chosen = np.concatenate([chosen, drawn[drawn >= longest]])
        chosen = chosen[np.sort(np.unique(chosen, return_index=True)[1])]
        draws *= 2
    return np.sort(chosen[:count])


def measure(
    subjects: Sequence[Subject],
    passage: Passage,
    contexts: Sequence[int],
    *,
    cache: Path | None = None,
    progress: Progress | None = None,
) -> LossTable:
    """The loss of every model on every target with every length of context. Only losses missing from the cache are
    computed; `progress` counts those."""
    check_contexts(contexts)
    if len(passage.targets) and passage.targets.min() < contexts[-1]:
        raise DataError(
            f"target {passage.targets.min()} has fewer than {contexts[-1]} tokens before it; use shorter contexts"
        )
    for subject in subjects:
        check_window(subject.model, contexts[-1], subject.name)
        check_text(subject.model, passage.ids)
    losses = np.full((len(subjects), len(contexts), len(passage.targets)), np.nan)
    files = {}
    for i, subject in enumerate(subjects):
        for k, context in enumerate(contexts):
            files[i, k] = _file(subject, passage, context, cache)
            known = _load_cached(files[i, k])
            losses[i, k] = [known.get(int(target), np.nan) for target in passage.targets]
    missing = np.isnan(losses)
    total, done = int(missing.sum(axis=(0, 2)) @ np.array(contexts)), 0
    for i, k in np.argwhere(missing.any(axis=2)):
        (places,), begin = np.nonzero(missing[i, k]), 0
        try:
            for found in context_losses(subjects[i].model, passage.ids, passage.targets[places], contexts[k]):
                losses[i, k, places[begin : begin + len(found)]] = found
                begin += len(found)
                done += len(found) * contexts[k]
                if progress is not None:
                    progress(done, total)
        finally:
            _store(files[i, k], passage.targets, losses[i, k])
    names = tuple(subject.name for subject in subjects)
    return LossTable(names, tuple(contexts), losses, _identity(passage))


def _identity(passage: Passage) -> str:
    """The hash of a text and its targets."""
    found = hashlib.sha256(passage.fingerprint.encode())
    found.update(passage.targets.astype(np.int64).tobytes() + passage.ids[passage.targets].astype(np.int64).tobytes())
    return found.hexdigest()


def context_losses(model: LanguageModel, ids: Ids, targets: Targets, context: int) -> Iterator[NDArray[np.float32]]:
    """The losses of the targets in order, in batches, each given exactly the `context` tokens before it."""
    check_window(model, context)
    device = next(model.parameters()).device
    rows = max(1, _TOKENS_PER_BATCH // context)
    reading = reading_for(model, context)
    for begin in range(0, len(targets), rows):
        places = targets[begin : begin + rows, None] - context + np.arange(context + 1)
        window = torch.from_numpy(ids[places].astype(np.int64)).to(device)
        with torch.inference_mode():
            state = model.initial_state(len(window), reading, trainable=False)
            before = (context - 1) // reading.segment * reading.segment
            state = read_segments(model, window[:, :before], state)
            losses, _ = model.losses(window[:, before:-1], window[:, -1:], state, last=1)
        yield losses[:, 0].float().cpu().numpy()


def check_window(model: LanguageModel, context: int, name: str = "this model") -> None:
    """Refuse a context that is longer than the window of a model without memory."""
    window = model.reading.segment
    if not model.has_memory() and context > window:
        raise ConfigError(
            f"{name} has no memory and a window of {window} tokens, shorter than a context of {context}; "
            f"end the contexts at {window}"
        )


def reading_for(model: LanguageModel, context: int) -> Reading:
    """The model's reading, with a memory of at least `context` positions if it has a memory."""
    reading = model.reading
    if "memory" not in model.settings or not model.has_memory(reading):
        return reading
    return replace(reading, memory=max(reading.memory, context))


def _file(subject: Subject, passage: Passage, context: int, cache: Path | None) -> Path | None:
    """The cache file of one model and one context. None without a model hash or a fingerprint of the text."""
    if not subject.hash or not passage.fingerprint:
        return None
    dtype = str(next(subject.model.parameters()).dtype)
    settings = [plain(subject.model.config), plain(reading_for(subject.model, context))]
    name = key(_FORMAT, subject.hash, settings, dtype, passage.fingerprint, context)
    return cache_folder(cache) / "contexts" / f"{name}.npy"


def _load_cached(path: Path | None) -> dict[int, float]:
    """Cached losses by target. A missing or damaged file gives none."""
    if path is None:
        return {}
    try:
        found = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return {}
    if found.ndim != 2 or len(found) != 2 or found.dtype != np.float64 or not np.isfinite(found).all():
        return {}
    return dict(zip(found[0].astype(int).tolist(), found[1].tolist(), strict=True))


def _store(path: Path | None, targets: Targets, losses: NDArray[np.float64]) -> None:
    """Merge new losses into the file: another process may have added other targets in the meantime."""
    if path is None:
        return
    new = {int(target): loss for target, loss in zip(targets, losses, strict=True) if np.isfinite(loss)}
    known = _load_cached(path) | new
    table = np.array([list(known), list(known.values())], np.float64)
    write_atomic(path, partial(np.save, arr=table))
