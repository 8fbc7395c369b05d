"""`longspan export`: the weights of a run, ready to hand on."""

from pathlib import Path
from typing import Annotated

import typer

from longspan.cli.options import Model, Set
from longspan.errors import ConfigError, DataError, UnknownNameError


def export(
    model: Model,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The model folder to make.")],
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="float32, bfloat16 (half the size) or float64; as it is unless told.")
    ] = None,
    set_: Set = [],  # noqa: B006 (typer copies it)
    notes: Annotated[
        Path | None, typer.Option("--notes", metavar="FILE.md", help="What the card is to begin with.")
    ] = None,
) -> None:
    """Make a model folder of a run's best weights: no optimiser, narrower if asked, the card's notes kept.

    Keys that need no other weights may be set anew, and are then what the model does unless told.
    """
    from longspan.checkpoints.manifest import CARD, read_json
    from longspan.checkpoints.model_folder import CONFIG, DTYPES, find_model, notes_of, open_model, save_model
    from longspan.config import parse_overrides
    from longspan.training.run import origin

    if dtype is not None and dtype not in DTYPES:
        raise UnknownNameError("precision", dtype, DTYPES)
    values = parse_overrides(set_)
    chosen = values.pop("model", {})
    if values or not isinstance(chosen, dict):
        raise ConfigError(f"--set {set_[0]} is no key of a model; write for example --set model.memory=640")
    opening = _text(notes)
    found = find_model(model)
    kind = dtype or str(read_json(found.contents[CONFIG], CONFIG).get("dtype"))
    loaded = open_model(found, overrides=chosen, dtype=DTYPES.get(kind))
    card = (found.path / CARD).read_text(encoding="utf-8", errors="replace")
    told = [*notes_of(card), *origin(found.path.parent)]
    save_model(out, loaded.model, loaded.tokenizer, notes=told, opening=opening)
    print(f"{out}: {loaded.model.parameter_count:,} parameters, {kind}, of {found.path}")


def _text(notes: Path | None) -> str:
    if notes is None:
        return ""
    try:
        return notes.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"the notes {notes} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise DataError(f"the notes {notes} are not UTF-8; a card is Markdown") from None
