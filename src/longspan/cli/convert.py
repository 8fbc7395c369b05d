"""`longspan import`: convert a model of another implementation to a model folder."""

from pathlib import Path
from typing import Annotated

import typer

from longspan.cli.options import DeviceName, DtypeName, FormerTokens, Threads, machine
from longspan.errors import ConfigError


def import_model(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SRC", help="A folder saved by transformers, or a state dict saved by the authors' code."
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The model folder to create.")],
    tokenizer: Annotated[
        str | None,
        typer.Option(
            "--tokenizer",
            help="bytes, characters (id = code point), a VOCAB.txt (id = line number), or a vocab.pkl of transformers. "
            "GPT, BERT and XLNet: a tokenizer.json or its folder; default: that of SRC.",
        ),
    ] = None,
    tokens: FormerTokens = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", help="For a state dict: a JSON file with the arguments of the authors' code."),
    ] = None,
    device: DeviceName = "auto",
    dtype: DtypeName = "auto",
    threads: Threads = 0,
) -> None:
    """Convert a model from `transformers` or the authors' code to a model folder.

    Reads a Transformer-XL saved by `transformers` 4.x or by the authors' code, or a GPT, GPT-2, BERT or XLNet
    folder of `transformers` with safetensors. Pickles are not executed."""
    from longspan import api
    from longspan.interop.huggingface import KINDS, kind_of
    from longspan.models.families import name_of

    where = machine(device, dtype, threads)
    name = tokenizer or tokens
    if name is None and kind_of(source) not in KINDS:
        raise ConfigError("--tokenizer is missing; use bytes, characters, a VOCAB.txt or a vocab.pkl")
    model = api.import_model(source, name, config=config, device=where.device)
    if dtype != "auto":
        model.to(dtype=where.dtype)
    model.save(out, notes=[f"Imported from {source.name}."])
    vocabulary = f"{model.config.vocabulary:,} tokens ({model.tokenizer.kind})"
    print(f"{out}: {name_of(model.model)}, {model.parameter_count:,} parameters, {vocabulary}")
