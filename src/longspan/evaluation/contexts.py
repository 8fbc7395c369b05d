"""Losses with exactly c tokens of context: fresh state, memory at least c, the same targets for every c and model."""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from longspan.config import plain
from longspan.contract import LanguageModel
from longspan.data.cache import cache_folder, key, write_whole
from longspan.errors import ConfigError, DataError
from longspan.evaluation.likelihood import Ids, check_positive, check_text
from longspan.evaluation.loss_table import LossTable, check_contexts

_FORMAT = 2
_TOKENS_AT_ONCE = 1 << 14

Places = NDArray[np.int64]
Watch = Callable[[int, int], None]
"""Called with tokens read so far and tokens to read in all; what the cache holds is in neither."""


@dataclass(frozen=True)
class Subject:
    """A model to measure under a name; `hash` is what its losses are remembered by, and without one they are not."""

    name: str
    model: LanguageModel
    hash: str = ""


@dataclass(frozen=True, eq=False)
class Passage:
    """A text as ids and the places in it to be predicted; `fingerprint` names the text in the cache."""

    ids: Ids
    targets: Places
    fingerprint: str = ""


def choose_targets(tokens: int, longest: int, count: int | None = None, *, seed: int = 0) -> Places:
    """Places with `longest` tokens before them, drawn without repetition and in order; 200, or all there are."""
    there = tokens - longest
    if there < 1:
        raise DataError(
            f"the text has {tokens} tokens; a context of {longest} needs at least {longest + 1}, "
            "so give it more text or shorter contexts"
        )
    wanted = min(200, there) if count is None else count
    check_positive("--targets", wanted)
    if wanted > there:
        raise DataError(f"{wanted} targets were asked for; this text has {there} with {longest} tokens before them")
    # Drawn from the whole text, and those with too little before them passed over: a longer context or more targets
    # keep the ones that were measured. Even spacing could fall in step with the text: lines of a table, records.
    random, draws, taken = np.random.default_rng(seed), 1 << 12, np.empty(0, np.int64)
    while len(taken) < wanted:
        drawn = random.integers(0, tokens, draws)
        taken = np.concatenate([taken, drawn[drawn >= longest]])
        taken = taken[np.sort(np.unique(taken, return_index=True)[1])]
        draws *= 2
    return np.sort(taken[:wanted])


def measure(
    subjects: Sequence[Subject],
    passage: Passage,
    contexts: Sequence[int],
    *,
    cache: Path | None = None,
    watch: Watch | None = None,
) -> LossTable:
    """The loss of every model on every target with every length of context; only what the cache lacks is computed."""
    check_contexts(contexts)
    if len(passage.targets) and passage.targets.min() < contexts[-1]:
        raise DataError(f"target {passage.targets.min()} has fewer than {contexts[-1]} tokens before it")
    for subject in subjects:
        check_window(subject.model, contexts[-1], subject.name)
        check_text(subject.model, passage.ids)
    losses = np.full((len(subjects), len(contexts), len(passage.targets)), np.nan)
    files = {}
    for i, subject in enumerate(subjects):
        for k, context in enumerate(contexts):
            files[i, k] = _file(subject, passage, context, cache)
            known = _read(files[i, k])
            losses[i, k] = [known.get(int(target), np.nan) for target in passage.targets]
    lacking = np.isnan(losses)
    total, done = int(lacking.sum(axis=(0, 2)) @ np.array(contexts)), 0
    for i, k in np.argwhere(lacking.any(axis=2)):
        (places,), begin = np.nonzero(lacking[i, k]), 0
        try:
            for found in context_losses(subjects[i].model, passage.ids, passage.targets[places], contexts[k]):
                losses[i, k, places[begin : begin + len(found)]] = found
                begin += len(found)
                done += len(found) * contexts[k]
                if watch is not None:
                    watch(done, total)
        finally:
            _remember(files[i, k], passage.targets, losses[i, k])
    return LossTable(tuple(subject.name for subject in subjects), tuple(contexts), losses)


def context_losses(model: LanguageModel, ids: Ids, targets: Places, context: int) -> Iterator[NDArray[np.float32]]:
    """The losses of the targets in order, some at a time, each given exactly the `context` tokens before it."""
    check_window(model, context)
    device = next(model.parameters()).device
    rows = max(1, _TOKENS_AT_ONCE // context)
    model = remembering(model, context)
    with model.fixed_weights():
        for begin in range(0, len(targets), rows):
            places = targets[begin : begin + rows, None] - context + np.arange(context + 1)
            window = torch.from_numpy(ids[places].astype(np.int64)).to(device)
            with torch.inference_mode():
                state = model.initial_state(len(window))
                *before, last = window[:, :-1].split(model.config.segment, dim=1)
                for piece in before:
                    _, state = model.hidden_states(piece, state)
                losses, _ = model.next_losses(last, window[:, -1], state)
            yield losses.float().cpu().numpy()


def check_window(model: LanguageModel, context: int, name: str = "this model") -> None:
    """A model without memory sees what it reads at once and nothing before it."""
    if not model.has_memory and context > model.config.segment:
        raise ConfigError(
            f"{name} has no memory and a window of {model.config.segment} tokens; a context of {context} is beyond it, "
            f"so let --contexts end at {model.config.segment}"
        )


def remembering(model: LanguageModel, tokens: int) -> LanguageModel:
    """The model with a memory of at least so many positions: itself, or a shallow copy that shares its weights. The
    model is not changed, since other threads may be using it."""
    if not model.has_memory or getattr(model.config, "memory", tokens) >= tokens:
        return model
    longer = copy.copy(model)
    longer.config = dataclasses.replace(model.config, memory=tokens)
    return longer


def _file(subject: Subject, passage: Passage, context: int, cache: Path | None) -> Path | None:
    """Where the losses of one model and one context are kept; a model or text without a name is not remembered."""
    if not subject.hash or not passage.fingerprint:
        return None
    dtype = str(next(subject.model.parameters()).dtype)
    # The hash knows the settings the model was saved with; a clamp given anew makes other losses.
    settings = plain(remembering(subject.model, context).config)
    name = key(_FORMAT, subject.hash, settings, dtype, passage.fingerprint, context)
    return cache_folder(cache) / "contexts" / f"{name}.npy"


def _read(path: Path | None) -> dict[int, float]:
    """Remembered losses by place; none where there are none, or damaged ones."""
    if path is None:
        return {}
    try:
        found = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return {}
    if found.ndim != 2 or len(found) != 2 or found.dtype != np.float64 or not np.isfinite(found).all():
        return {}
    return dict(zip(found[0].astype(int).tolist(), found[1].tolist(), strict=True))


def _remember(path: Path | None, targets: Places, losses: NDArray[np.float64]) -> None:
    """Adds what was found to what is there by now: another process may have measured other targets."""
    if path is None:
        return
    new = {int(target): loss for target, loss in zip(targets, losses, strict=True) if np.isfinite(loss)}
    known = _read(path) | new
    table = np.array([list(known), list(known.values())], np.float64)
    write_whole(path, partial(np.save, arr=table))
