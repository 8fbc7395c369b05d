"""`longspan import`: convert a Transformer-XL of another implementation to a model folder."""

from pathlib import Path
from typing import Annotated

import typer

from longspan.cli.options import DeviceName, DtypeName, Threads, machine
from longspan.errors import ConfigError


def import_model(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SRC", help="A folder of TransfoXL (transformers), or a state dict of the authors' code."
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The model folder to create.")],
    tokens: Annotated[
        str,
        typer.Option(
            "--tokens",
            help="bytes, characters (id = code point), a VOCAB.txt (id = line number), or a vocab.pkl of transformers.",
        ),
    ],
    config: Annotated[
        Path | None, typer.Option("--config", help="The arguments of the authors' code as JSON, for a state dict.")
    ] = None,
    device: DeviceName = "auto",
    dtype: DtypeName = "auto",
    threads: Threads = 0,
) -> None:
    """Convert a Transformer-XL saved by `transformers` 4.x or by the authors' code. Pickles are not executed."""
    from longspan.checkpoints.model_folder import save_model
    from longspan.interop.transfo_xl import import_transfo_xl
    from longspan.interop.vocabulary import tokenizer_for

    where = machine(device, dtype, threads)
    model = import_transfo_xl(source, config_path=config)
    if dtype != "auto":
        model = model.to(where.dtype)
    tokenizer = tokenizer_for(tokens, model.config.vocabulary)
    if tokenizer.size != model.config.vocabulary:
        raise ConfigError(
            f"--tokens {tokens} has {tokenizer.size} tokens, {source} has {model.config.vocabulary}; "
            "give the vocabulary it was trained with, as the vocab.pkl of transformers or a VOCAB.txt"
        )
    save_model(out, model, tokenizer, notes=[f"Imported from {source.name}."])
    vocabulary = f"{model.config.vocabulary:,} tokens ({tokenizer.kind})"
    print(f"{out}: transformer-xl, {model.parameter_count:,} parameters, {vocabulary}")
