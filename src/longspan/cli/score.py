"""`longspan score`: the surprisal of every token, word or line of some files, as a table. docs/evaluation.md"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Annotated

import typer

from longspan.cli.completion import table_values, unit_values
from longspan.cli.options import DeviceName, DtypeName, Threads, machine, note_bundled
from longspan.cli.progress import progress
from longspan.cli.reading_options import Clamp, Discount, Memory, Pointer, SameLength, Segment, given_settings
from longspan.cli.text_options import data_path
from longspan.errors import ConfigError


def score(
    files: Annotated[list[Path], typer.Argument(metavar="FILE", help="Text files; - is standard input.")],
    model: Annotated[
        Path | None,
        typer.Option(
            "--model",
            metavar="MODEL",
            help="A model folder or the folder of a training run. Default: the bundled model.",
        ),
    ] = None,
    per: Annotated[
        str, typer.Option("--per", autocompletion=unit_values, help="One row per token, word, line or document.")
    ] = "token",
    format: Annotated[
        str | None,
        typer.Option(
            "--format",
            autocompletion=table_values,
            help="csv, jsonl or parquet. Default: given by the suffix of --out, or csv.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="The file to write. Default: standard output.")
    ] = None,
    batch: Annotated[int, typer.Option("--batch", help="Number of files to read in parallel.")] = 8,
    segment: Segment = None,
    memory: Memory = None,
    clamp: Clamp = None,
    discount: Discount = None,
    pointer: Pointer = None,
    same_length: SameLength = None,
    temp: Annotated[float | None, typer.Option("--temp", help="Divide logits by this before the softmax.")] = None,
    device: DeviceName = "auto",
    dtype: DtypeName = "auto",
    threads: Threads = 0,
) -> None:
    """Write the surprisal of text files in bits, per token, word, line or document.

    Rows have offsets in bytes and characters. Each file starts without context.
    """
    from longspan.config import convert
    from longspan.scoring.surprisal import Per
    from longspan.scoring.surprisal_files import check_files, format_of, read_files, surprisals, table_writer
    from longspan.text_model import load

    unit = convert(Per, per, "--per")
    kind = format_of(out, format)
    if kind == "parquet" and out is None and sys.stdout.isatty():
        raise ConfigError(
            "--format parquet is binary and cannot be printed to a terminal; use --out FILE, or redirect "
            "standard output"
        )
    paths = [Path(data_path("-")) if str(file) == "-" else file for file in files]
    names = dict(zip(map(str, paths), map(str, files), strict=True))
    size = check_files(paths)
    where = machine(device, dtype, threads)
    context = given_settings(segment=segment, memory=memory, clamp=clamp, discount=discount)
    settings = context | given_settings(same_length=same_length, pointer=pointer, temperature=temp)
    loaded = load(model, device=where.device, dtype=where.dtype, **settings)
    loaded.model.require_next_token()
    note_bundled(model)
    with _opened(out, paths) as file, progress("scoring", in_bytes=True) as bar:
        table = table_writer(kind, file)
        texts = ((names[name], data) for name, data in read_files(paths))
        for name, found in surprisals(
            loaded.model, loaded.tokenizer, texts, unit, batch=batch, total=size, progress=bar
        ):
            table.add(name, found)
        table.close()


@contextmanager
def _opened(out: Path | None, inputs: Sequence[Path]) -> Iterator[IO[bytes]]:
    """Standard output, or a file that appears under its name when it is complete."""
    from longspan.checkpoints.store import new_file

    if out is None:
        sys.stdout.flush()
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    if out.is_dir() or (out.exists() and not out.is_file()):
        raise ConfigError(f"--out {out} is not a regular file; use another path")
    if out.resolve() in [path.resolve() for path in inputs]:
        raise ConfigError(f"--out {out} is one of the files to score; use another path")
    if not out.parent.is_dir():
        raise ConfigError(f"--out {out}: there is no folder {out.parent}; create it first")
    with new_file(out) as file:
        yield file
