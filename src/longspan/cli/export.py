"""`longspan export`: a model folder, or a folder for transformers or onnxruntime."""

from pathlib import Path
from typing import Annotated, Any

import typer

from longspan.cli.options import ModelOrBundled, SetReading
from longspan.errors import ConfigError, DataError, UnknownNameError

FORMATS = ("longspan", "hf", "onnx")


def export(
    model: ModelOrBundled = None,
    folder: Annotated[Path | None, typer.Argument(metavar="[OUT]", help="The folder to create.")] = None,
    to: Annotated[
        str, typer.Option("--to", help="longspan (a model folder), hf (transformers) or onnx (one decoding step).")
    ] = "longspan",
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="The folder to create.")] = None,
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", help="float32, bfloat16 or float64. Default: that of MODEL; float32 with --to."),
    ] = None,
    set_: SetReading = [],  # noqa: B006 (typer copies it)
    notes: Annotated[
        Path | None, typer.Option("--notes", metavar="FILE.md", help="Markdown for the start of the model card.")
    ] = None,
) -> None:
    """Create a model folder with the best weights of a run, without optimizer state.

    --to hf writes a folder for AutoModelForCausalLM, --to onnx a decoding step for onnxruntime; without MODEL they
    export the bundled model. --dtype converts the weights. --set changes the reading (for example reading.memory),
    which becomes the default of the exported model. The notes in the card are kept.
    """
    from longspan.checkpoints.model_folder import DTYPES
    from longspan.config import parse_overrides

    if to not in FORMATS:
        raise UnknownNameError("format", to, FORMATS)
    if dtype is not None and dtype not in DTYPES:
        raise UnknownNameError("dtype", dtype, DTYPES)
    target = _target(out, folder)
    if model is None and to == "longspan":
        raise ConfigError("no MODEL is given; name a model folder or a run")
    if to != "longspan" and notes is not None:
        raise ConfigError(f"--notes {notes} belongs to a model folder; leave it out with --to {to}")
    values = parse_overrides(set_)
    overrides = values.pop("reading", {})
    if values or not isinstance(overrides, dict):
        raise ConfigError(
            f"--set {_rejected(set_)} is not a reading setting; write for example --set reading.memory=640"
        )
    _write(to, model, target, dtype, overrides, notes)


def _write(
    to: str, model: Path | None, out: Path, dtype: str | None, reading: dict[str, Any], notes: Path | None
) -> None:
    if to == "hf":
        from longspan.hf import export_hf

        hf = export_hf(model, out, dtype=dtype or "float32", reading=reading)
        print(f"{out}: {hf.parameters:,} parameters, {hf.dtype}, for transformers, from {hf.source}")
    elif to == "onnx":
        from longspan.interop.onnx import export_onnx

        if dtype not in (None, "float32"):
            raise ConfigError(f"--dtype {dtype} is not possible with --to onnx, which writes float32; leave it out")
        onnx = export_onnx(model, out, reading=reading)
        print(f"{out}: {onnx.parameters:,} parameters, one step with {len(onnx.inputs)} inputs, from {onnx.source}")
    else:
        from longspan.training.export import export_model

        assert model is not None
        made = export_model(model, out, dtype=dtype, reading=reading, opening=_read_notes(notes))
        print(f"{out}: {made.parameters:,} parameters, {made.dtype}, from {made.source}")


def _target(out: Path | None, folder: Path | None) -> Path:
    """The folder to create, given by --out or as the second argument."""
    if out is not None and folder is not None:
        raise ConfigError(f"the folder to create is given twice, {folder} and --out {out}; give one")
    chosen = out or folder
    if chosen is None:
        raise ConfigError("no OUT is given; name the folder to create, or add --out DIR")
    return chosen


def _rejected(settings: list[str]) -> str:
    """The first --set that does not start with `reading.`, the one to name in an error."""
    return next((setting for setting in settings if not setting.strip().startswith("reading.")), settings[0])


def _read_notes(notes: Path | None) -> str:
    if notes is None:
        return ""
    try:
        return notes.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"--notes {notes} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise DataError(f"--notes {notes} is not UTF-8; give a Markdown file") from None
