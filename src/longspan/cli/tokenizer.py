"""`longspan tokenizer train`: a subword tokenizer of a text."""

from pathlib import Path
from typing import Annotated

import typer

from longspan.cli.options import print_rows
from longspan.cli.progress import progress
from longspan.cli.text_options import Data, Encoding, Field, data_path
from longspan.errors import ConfigError

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Train tokenizers.")


@app.callback()
def _root() -> None:
    """Without a callback, typer would make the only command the command itself."""


@app.command("train")
def train(
    *,
    data: Data,
    vocabulary: Annotated[int, typer.Option("--vocabulary", metavar="N", help="Size of the vocabulary.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="The folder to write tokenizer.json to.")],
    kind: Annotated[str, typer.Option("--kind", help="bpe, unigram or wordpiece.")] = "bpe",
    byte_fallback: Annotated[
        bool,
        typer.Option(
            "--byte-fallback", help="Build tokens from characters, and encode rare ones as bytes. Default: from bytes."
        ),
    ] = False,
    special: Annotated[
        list[str],
        typer.Option("--special", metavar="TOKEN", help="A special token, which is never split; can be repeated."),
    ] = [],  # noqa: B006 (typer copies it)
    document_end: Annotated[
        str | None, typer.Option("--document-end", metavar="TOKEN", help="A special token to add after every document.")
    ] = None,
    sample: Annotated[
        int,
        typer.Option(
            "--sample", metavar="BYTES", help="Size of the evenly spaced sample to train on; 0 uses the complete split."
        ),
    ] = 200_000_000,
    field: Field = None,
    encoding: Encoding = None,
) -> None:
    """Train a subword tokenizer on the training split of a text. Use it with --set data.tokenizer=DIR."""
    from longspan.data.sample import sample_text
    from longspan.tokenizers.train_subwords import train_subwords

    if out.exists() and any(out.iterdir() if out.is_dir() else [out]):
        raise ConfigError(f"--out {out} exists and is not an empty folder; use another folder")
    if sample < 0:
        raise ConfigError(f"--sample {sample} is negative; use 0 for the complete training split")
    text = sample_text(data_path(data), sample or None, field=field, encoding=encoding)
    with progress("training the tokenizer"):
        found = train_subwords(
            text, vocabulary, kind, byte_fallback=byte_fallback, special=special, document_end=document_end
        )
    found.save(out)
    print_rows({"tokens": found.size, "kind": kind, "tokenizer": out / "tokenizer.json"})
