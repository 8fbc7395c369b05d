"""`longspan export`: a model folder, or a folder for transformers or onnxruntime."""

from pathlib import Path
from typing import Annotated, Any

import typer

from longspan.cli.options import ModelOrBundled, SetReading
from longspan.cli.text_options import Encoding, Field, Split, data_path
from longspan.errors import ConfigError, DataError, UnknownNameError, not_read

FORMATS = ("longspan", "hf", "onnx")


def export(
    model: ModelOrBundled = None,
    folder: Annotated[Path | None, typer.Argument(metavar="OUT", help="The folder to create.")] = None,
    to: Annotated[
        str, typer.Option("--to", help="longspan (a model folder), hf (transformers) or onnx (one decoding step).")
    ] = "longspan",
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="The folder to create.")] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            help="float32, bfloat16 or float64. Default: the dtype of MODEL, or float32 with --to hf or onnx.",
        ),
    ] = None,
    int8: Annotated[
        bool,
        typer.Option(
            "--int8", help="Store matrices as int8 with a scale per row, and print how much the loss rises in bits."
        ),
    ] = False,
    data: Annotated[
        str | None,
        typer.Option("--data", help="The text on which --int8 measures the loss. Default: a page of English prose."),
    ] = None,
    field: Field = None,
    encoding: Encoding = None,
    split: Split = None,
    set_: SetReading = [],  # noqa: B006 (typer copies it)
    notes: Annotated[
        Path | None, typer.Option("--notes", metavar="FILE.md", help="Markdown for the start of the model card.")
    ] = None,
) -> None:
    """Create a model folder with the best weights of a run, without optimizer state.

    --to hf writes a folder for AutoModelForCausalLM, --to onnx a decoding step for onnxruntime. --dtype converts the
    weights. --int8 takes a quarter of the space of float32. --set changes reading settings (for example
    reading.memory), which become the defaults of the exported model. Notes in the model card are kept.
    """
    from longspan.bundled import model_path
    from longspan.checkpoints.model_folder import DTYPES
    from longspan.config import parse_overrides
    from longspan.training.export import export_model

    if to not in FORMATS:
        raise UnknownNameError("format", to, FORMATS)
    if int8 and dtype is not None:
        raise ConfigError(f"--int8 and --dtype {dtype} cannot be combined; use only one of them")
    if data is not None and not int8:
        raise ConfigError(f"--data {data} has an effect only with --int8; add --int8 or leave out --data")
    if int8 and to != "longspan":
        raise ConfigError(f"--int8 cannot be combined with --to {to}; leave out one of them")
    if dtype is not None and dtype not in DTYPES:
        raise UnknownNameError("dtype", dtype, DTYPES)
    target = _target(out, folder)
    if to != "longspan" and notes is not None:
        raise ConfigError(f"--notes {notes} cannot be combined with --to {to}; leave out one of them")
    values = parse_overrides(set_)
    overrides = values.pop("reading", {})
    if values or not isinstance(overrides, dict):
        raise ConfigError(
            f"--set {_rejected(set_)} is not a reading setting; write for example --set reading.memory=640"
        )
    if to == "hf":
        _write_hf(model, target, dtype or "float32", overrides)
    elif to == "onnx":
        _write_onnx(model, target, dtype, overrides)
    else:
        source = model_path(model)
        made = export_model(source, target, dtype=dtype, reading=overrides, opening=_read_notes(notes), int8=int8)
        print(f"{target}: {made.parameters:,} parameters, {made.dtype}, {made.bytes:,} bytes, from {made.source}")
        if int8:
            _print_cost(source, target, data and data_path(data), split=split, field=field, encoding=encoding)


def _print_cost(model: Path, out: Path, data: str | None, **form: str | None) -> None:
    from longspan.training.export import export_cost

    try:
        cost = export_cost(model, out, data, **form)
    except ConfigError as error:  # the export is complete
        print(f"cost: not measured, because {error}")
        return
    except DataError as error:
        if data is not None:
            raise
        print(f"cost: not measured, because the model cannot read the default text ({error}); add --data")
        return
    unit = f"bits per {cost.unit}"
    change = cost.after - cost.before
    print(f"cost: {change:+.5f} {unit} ({cost.before:.5f} to {cost.after:.5f}, {cost.scored:,} {cost.unit}s scored)")


def _write_hf(model: Path | None, out: Path, dtype: str, reading: dict[str, Any]) -> None:
    from longspan.hf import export_hf

    made = export_hf(model, out, dtype=dtype, reading=reading)
    print(f"{out}: {made.parameters:,} parameters, {made.dtype}, for transformers, from {made.source}")


def _write_onnx(model: Path | None, out: Path, dtype: str | None, reading: dict[str, Any]) -> None:
    from longspan.interop.onnx import export_onnx

    if dtype not in (None, "float32"):
        raise ConfigError(
            f"--dtype {dtype} cannot be combined with --to onnx, which always writes float32; leave out --dtype"
        )
    made = export_onnx(model, out, reading=reading)
    print(f"{out}: {made.parameters:,} parameters, one step with {len(made.inputs)} inputs, from {made.source}")


def _target(out: Path | None, folder: Path | None) -> Path:
    """The folder to create, given by --out or as the second argument."""
    if out is not None and folder is not None:
        raise ConfigError(f"the folder to create is given twice, as {folder} and as --out {out}; use only one")
    chosen = out or folder
    if chosen is None:
        raise ConfigError("the folder to create is missing; add OUT or --out DIR")
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
        raise not_read(f"--notes {notes}", error) from None
    except UnicodeDecodeError:
        raise DataError(f"--notes {notes} is not UTF-8; use a Markdown file in UTF-8") from None
