"""Context measurements (RECL and ECL): defaults, and the losses of model folders on one text. docs/recl.md"""

from collections.abc import Sequence
from pathlib import Path

import torch

from longspan.checkpoints.model_folder import load_model
from longspan.errors import ConfigError
from longspan.scoring.contexts import Passage, Subject, check_window, choose_targets, measure
from longspan.scoring.loss_table import LossTable
from longspan.scoring.losses import Progress
from longspan.training.model_text import open_text_for

SHARES = {"0.1": 0.1, "0.5": 0.5, "1.0": 1.0}
"""Values of r by name: the share of hardest targets."""
THRESHOLD = 0.01
LONGEST = 1000
STEPS = 10


def even_contexts(longest: int) -> tuple[int, ...]:
    """Ten evenly spaced context lengths up to about `longest`; none if that is less than one token per step."""
    step = longest // STEPS
    return tuple(range(step, step * STEPS + 1, step)) if step else ()


def measure_folders(
    paths: Sequence[Path],
    data: str,
    contexts: tuple[int, ...],
    targets: int | None = None,
    split: str | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    *,
    field: str | None = None,
    encoding: str | None = None,
    progress: Progress | None = None,
) -> LossTable:
    """The losses of the models in these folders on one text. Cached losses are reused."""
    names = unique_names(paths)
    loaded = [load_model(path, device=device, dtype=dtype) for path in paths]
    for one in loaded:
        one.model.require_next_token()
    for name, other in zip(names, loaded, strict=True):
        check_window(other.model, contexts[-1], name)
        if other.tokenizer.fingerprint != loaded[0].tokenizer.fingerprint:
            raise ConfigError(
                f"{names[0]} and {name} have different tokenizers ({loaded[0].tokenizer.kind} and "
                f"{other.tokenizer.kind}), so their losses cannot be compared; measure them separately"
            )
    found = [one.path for one in loaded]
    text = open_text_for(found, data, loaded[0].tokenizer, split, field=field, encoding=encoding)
    passage = Passage(text.ids, choose_targets(len(text.ids), contexts[-1], targets), text.fingerprint)
    subjects = [Subject(name, one.model, one.hash) for name, one in zip(names, loaded, strict=True)]
    return measure(subjects, passage, contexts, progress=progress)


def unique_names(paths: Sequence[Path]) -> list[str]:
    """The names of the folders if they are different, else the given paths."""
    short = [path.resolve().name or str(path) for path in paths]
    if len(set(short)) == len(short):
        return short
    resolved = [path.resolve() for path in paths]
    for path, own in zip(paths, resolved, strict=True):
        if resolved.count(own) > 1:
            raise ConfigError(f"{path} is given twice; list it only once")
    return [str(path) for path in paths]
