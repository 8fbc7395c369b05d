"""`longspan data list` and `longspan data get`."""

from dataclasses import asdict
from typing import Annotated

import typer

from longspan.cli.options import Json, print_json
from longspan.cli.progress import progress

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="List and fetch known corpora.")


@app.command("list")
def list_known(json: Json = False) -> None:
    """List the corpora that can be used by name. Any file or folder can be used as well."""
    from longspan.data import list_corpora

    rows = list_corpora()
    if json:
        print_json({"corpora": [asdict(row) for row in rows]})
        return
    width = max(len(row.name) for row in rows)
    for row in rows:
        size = f"{row.bytes:>13,}" if row.bytes else f"{'':>13}"
        mark = "*" if row.installed else " "
        print(f"{mark} {row.name:<{width}} {size}  {row.title}; {row.tokenizer}; {row.licence}")
    print("\n* is installed; `longspan data get NAME` fetches the others")


@app.command("get")
def get(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A name listed by `longspan data list`.")],
    source: Annotated[
        str | None, typer.Option("--from", metavar="FILE", help="Use this file, folder, archive or URL.")
    ] = None,
) -> None:
    """Fetch a corpus, verify its SHA-256 and install it in the cache. An interrupted download is resumed."""
    from longspan.data import get

    with progress(name, in_bytes=True) as watch:
        folder = get(name, source, progress=watch)
    print(f"{name} is in {folder}")
