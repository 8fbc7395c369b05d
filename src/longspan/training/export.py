"""A model folder made from a run or from another model folder."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from longspan.bundled import PAGE
from longspan.checkpoints.int8 import DTYPE as INT8
from longspan.checkpoints.manifest import CARD, read_json
from longspan.checkpoints.model_folder import (
    CONFIG,
    DTYPES,
    WEIGHTS,
    find_model,
    load_model,
    notes_of,
    open_model,
    save_model,
)
from longspan.scoring.score import score
from longspan.training.model_text import open_text_for
from longspan.training.run import origin

COST_TOKENS = 20_000
"""Tokens that an export is scored on."""


@dataclass(frozen=True)
class Exported:
    """What was written, and the folder it came from."""

    source: Path
    parameters: int
    dtype: str
    bytes: int
    """The size of the weights file."""


def export_model(
    model: Path,
    out: Path,
    *,
    dtype: str | None = None,
    reading: Mapping[str, Any] | None = None,
    opening: str = "",
    int8: bool = False,
) -> Exported:
    """Write the weights of a run or model folder to the model folder `out`, without optimizer state.

    `dtype` converts the weights; `int8` stores matrices as int8 with a scale per row (default: as they are stored);
    `reading` changes the default reading; `opening` is Markdown for the start of the card. The notes of the source's
    card are kept.
    """
    found = find_model(model)
    kind = INT8 if int8 else dtype or str(read_json(found.contents[CONFIG], CONFIG).get("dtype"))
    loaded = open_model(found, overrides=reading, dtype=DTYPES.get(kind))
    card = (found.path / CARD).read_text(encoding="utf-8", errors="replace")
    notes = dict.fromkeys([*notes_of(card), *origin(found.path.parent)])
    save_model(out, loaded.model, loaded.tokenizer, notes=notes, opening=opening, int8=kind == INT8)
    size = (out / WEIGHTS).stat().st_size
    return Exported(found.path, loaded.model.parameter_count, kind, size)


@dataclass(frozen=True)
class Cost:
    """Bits per token of a text with the weights before and after an export."""

    before: float
    after: float
    scored: int
    unit: str


def export_cost(
    source: Path,
    out: Path,
    text: str | Path | None = None,
    split: str | None = None,
    *,
    field: str | None = None,
    encoding: str | None = None,
) -> Cost:
    """What an export costs, on the first tokens of a text. Default text: a page of English prose."""
    one, other = load_model(source, dtype=torch.float32), load_model(out, dtype=torch.float32)
    one.model.require_next_token()
    opened = open_text_for([one.path], text or PAGE, one.tokenizer, split, field=field, encoding=encoding)
    ids = opened.ids[:COST_TOKENS]
    # The reading of the export, so that only the weights differ.
    before, after = (score(each.model, ids, other.model.reading) for each in (one, other))
    return Cost(before.bits, after.bits, after.scored, one.tokenizer.unit)
