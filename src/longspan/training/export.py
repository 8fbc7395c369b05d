"""A model folder made from a run or from another model folder."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longspan.checkpoints.manifest import CARD, read_json
from longspan.checkpoints.model_folder import CONFIG, DTYPES, find_model, notes_of, open_model, save_model
from longspan.training.run import origin


@dataclass(frozen=True)
class Exported:
    """What was written, and the folder it came from."""

    source: Path
    parameters: int
    dtype: str


def export_model(
    model: Path, out: Path, *, dtype: str | None = None, reading: Mapping[str, Any] | None = None, opening: str = ""
) -> Exported:
    """Write the weights of a run or model folder to the model folder `out`, without optimizer state.

    `dtype` converts the weights; `reading` changes the default reading; `opening` is Markdown for the start of the
    card. The notes of the source's card are kept.
    """
    found = find_model(model)
    kind = dtype or str(read_json(found.contents[CONFIG], CONFIG).get("dtype"))
    loaded = open_model(found, overrides=reading, dtype=DTYPES.get(kind))
    card = (found.path / CARD).read_text(encoding="utf-8", errors="replace")
    notes = [*notes_of(card), *origin(found.path.parent)]
    save_model(out, loaded.model, loaded.tokenizer, notes=notes, opening=opening)
    return Exported(found.path, loaded.model.parameter_count, kind)
