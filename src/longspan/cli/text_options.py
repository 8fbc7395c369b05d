"""Options that name a text and say how it is read. Every command that reads a text takes them from here."""

from typing import Annotated

import typer

WHAT = "A file, a folder, - (standard input), or a corpus from `longspan data list`."
Data = Annotated[str, typer.Option("--data", metavar="NAME|PATH", help=WHAT)]
OptionalData = Annotated[str | None, typer.Option("--data", metavar="NAME|PATH", help=WHAT)]
DataArgument = Annotated[str, typer.Argument(metavar="DATA", help=WHAT)]
Field = Annotated[
    str | None,
    typer.Option(
        "--field",
        metavar="NAME",
        help="Key with the text in JSON lines (a.b if nested), or column with the text in tables. Default: text.",
    ),
]
Encoding = Annotated[
    str | None, typer.Option("--encoding", metavar="NAME", help="Text encoding of the files. Default: UTF-8.")
]
Split = Annotated[str | None, typer.Option("--split", help="train, valid or test. Default: the complete text.")]
Sentences = Annotated[
    bool | None,
    typer.Option(
        "--sentences/--no-sentences",
        help="Reset the memory before every sentence of a corpus such as lm1b, or read all sentences as one stream. "
        "Default: as in training, if the model was trained on this text.",
    ),
]


def data_path(data: str) -> str:
    """The value of --data, with standard input (-) copied to a file."""
    from longspan.data.sources import read_standard_input

    return str(read_standard_input()) if data == "-" else data


def data_overrides(field: str | None, encoding: str | None) -> list[str]:
    """--field and --encoding as keys of a recipe."""
    from longspan import config

    given = {"data.field": field, "data.encoding": encoding}
    return [f"{key}={config.show(value)}" for key, value in given.items() if value is not None]
