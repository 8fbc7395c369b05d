"""`longspan data list`, `longspan data get` and `longspan data info`."""

from dataclasses import asdict
from typing import Annotated, Any

import typer

from longspan.cli.options import Json, print_json, print_rows
from longspan.cli.progress import progress
from longspan.cli.text_options import DataArgument, Encoding, Field, data_path
from longspan.errors import DataError, UnknownNameError

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="List, download and describe corpora and texts.")


@app.command("list")
def list_known(json: Json = False) -> None:
    """List the corpora and tasks that can be used by name. Any file or folder can be used as well."""
    from longspan.data import list_corpora
    from longspan.transfer.tasks import list_tasks

    corpora, tasks = list_corpora(), list_tasks()
    if json:
        print_json({"corpora": [asdict(row) for row in corpora], "tasks": [asdict(row) for row in tasks]})
        return
    width = max(len(name) for name in [row.name for row in corpora] + [task.name for task in tasks])
    print("corpora:")
    for row in corpora:
        size = f"{row.bytes:>13,}" if row.bytes else f"{'':>13}"
        print(f"{_mark(row.installed)} {row.name:<{width}} {size}  {row.title}; {row.tokenizer}; {row.licence}")
    print("\ntasks:")
    for task in tasks:
        only = "" if task.trainable else "; for evaluate-tasks only"
        print(f"{_mark(task.installed)} {task.name:<{width}}  {task.title}{only}")
    print("\n* is installed; `longspan data get NAME` downloads the others (tasks need `--from FOLDER`)")


def _mark(installed: bool) -> str:
    return "*" if installed else " "


@app.command("get")
def get(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A name listed by `longspan data list`.")],
    source: Annotated[
        str | None,
        typer.Option(
            "--from", metavar="FILE", help="Install from this file, folder, archive or URL instead of downloading."
        ),
    ] = None,
) -> None:
    """Download a corpus or task, verify its SHA-256 and install it in the cache.

    An interrupted download is resumed.
    """
    from longspan.data import CORPORA, get
    from longspan.transfer.tasks import KNOWN, install

    if name in KNOWN:
        print(f"{name} is in {install(name, source)}")
        return
    if name not in CORPORA:
        raise UnknownNameError("corpus or task", name, [*CORPORA, *KNOWN])
    with progress(name, in_bytes=True) as watch:
        folder = get(name, source, progress=watch)
    print(f"{name} is in {folder}")


@app.command("info")
def info(
    *,
    data: DataArgument,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            "--tokenizer", metavar="NAME|PATH", help="A tokenizer name or path. Default: the tokenizer of the corpus."
        ),
    ] = None,
    valid: Annotated[
        str | None, typer.Option("--valid", metavar="PATH", help="A file or folder to validate on.")
    ] = None,
    test: Annotated[str | None, typer.Option("--test", metavar="PATH", help="A file or folder to test on.")] = None,
    field: Field = None,
    encoding: Encoding = None,
    json: Json = False,
) -> None:
    """Encode a text and count the files, tokens, documents, bytes and words of each split."""
    from longspan.data import CORPORA, open_corpus
    from longspan.data.encoded import Encoded, describe_each, files_of, open_any_split, open_each

    given = {name: path for name, path in (("valid", valid), ("test", test)) if path is not None}
    path = data_path(data)
    found: dict[str | None, Encoded] = {}

    def open_split(split: str | None) -> Encoded:
        chosen = next(iter(found.values())).tokenizer if found else tokenizer
        if split is None and chosen is None and path in CORPORA:  # named, it has the vocabulary of the complete text
            chosen = CORPORA[path].tokenizer
        with progress(split or "text", quiet=json, in_bytes=True) as bar:
            opened = open_corpus(path, split, chosen, held_out=given, field=field, encoding=encoding, progress=bar)
        return found.setdefault(split, opened)

    text = open_any_split(open_split)
    each = open_each(text, open_split)
    divided = {split: one for split, one in each.items() if isinstance(one, Encoded)} or {"unused": text}
    failed = {split: one for split, one in each.items() if isinstance(one, DataError) and files_of(text, split, one)}
    if json:
        facts: dict[str, Any] = {
            name: {"tokens": len(one), "documents": len(one.starts), "bytes": one.bytes, "words": one.words}
            | {"files": list(one.splits[name])}
            for name, one in divided.items()
        }
        facts |= {name: {"error": str(e), "files": list(files_of(text, name, e))} for name, e in failed.items()}
        print_json({"name": text.name, "vocabulary": text.tokenizer.size, "splits": facts})
    else:
        for line in describe_each(text, each):
            print(line)
        counts = {
            "tokenizer": text.tokenizer.kind,
            "vocabulary": text.tokenizer.size,
            "documents": sum(len(one.starts) for one in divided.values()),
            "bytes": sum(one.bytes for one in divided.values()),
            "words": sum(one.words for one in divided.values()),
        }
        print_rows(counts)
    for error in failed.values():
        raise error
