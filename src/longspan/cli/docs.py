"""`longspan docs`: the manual in the terminal."""

from typing import Annotated

import typer

from longspan.cli.completion import page_values


def docs(
    page: Annotated[
        str | None,
        typer.Argument(
            metavar="PAGE",
            autocompletion=page_values,
            help="The name of a page, for example training or docs/training.md. Default: list all pages.",
        ),
    ] = None,
) -> None:
    """Print a page of the manual, or list the pages."""
    from longspan import manual

    if page is not None:
        print(manual.page(page).rstrip("\n"))
        return
    known = manual.pages()
    width = max(map(len, known), default=0)
    for name, text in known.items():
        print(f"{name.ljust(width)}  {manual.title(text)}")
