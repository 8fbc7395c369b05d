"""`longspan data list` and `longspan data get`."""

from dataclasses import asdict
from typing import Annotated

import typer

from longspan.cli.options import Json, print_json
from longspan.cli.progress import progress

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Known corpora: what there is, and getting it.")


@app.command("list")
def list_known(json: Json = False) -> None:
    """The corpora that are known by name. Any file or folder is a corpus too."""
    from longspan.data import list_corpora

    rows = list_corpora()
    if json:
        print_json({"corpora": [asdict(row) for row in rows]})
        return
    width = max(len(row.name) for row in rows)
    for row in rows:
        size = f"{row.bytes:>13,}" if row.bytes else f"{'':>13}"
        print(f"{'*' if row.here else ' '} {row.name:<{width}} {size}  {row.title}; {row.reading}; {row.licence}")
    print("\n* is on this machine; `longspan data get NAME` fetches the others")


@app.command("get")
def get(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A name that `longspan data list` shows.")],
    source: Annotated[
        str | None, typer.Option("--from", metavar="FILE", help="Take it from this file, folder, archive or address.")
    ] = None,
) -> None:
    """Fetch a corpus, verify it by its SHA-256 and keep it. A download that broke off goes on where it stopped."""
    from longspan.data import get

    with progress(name, in_bytes=True) as watch:
        folder = get(name, source, progress=watch)
    print(f"{name} is in {folder}")
