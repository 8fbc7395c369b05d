"""Options that change how a model reads a text. Default: the model's own reading."""

from typing import Annotated, Any

import typer

Segment = Annotated[
    int | None, typer.Option("--segment", help="Tokens per segment, or the length of the sliding window.")
]
Memory = Annotated[int | None, typer.Option("--memory", help="Number of earlier positions that a layer can attend to.")]
Clamp = Annotated[
    int | None,
    typer.Option(
        "--clamp",
        help="Distances beyond this share one position key; 0 is off. Turns the discount off unless --discount is set.",
    ),
]
Discount = Annotated[
    float | None,
    typer.Option("--discount", help="Lower attention scores at distances d > clamp by this times log(d / clamp)."),
]
Pointer = Annotated[
    int | None, typer.Option("--pointer", help="Number of earlier positions that the pointer can copy from; 0 is off.")
]
SameLength = Annotated[
    bool | None,
    typer.Option("--same-length/--no-same-length", help="Every token attends to exactly --memory keys."),
]


def given_settings(**settings: Any) -> Any:
    """The settings of a reading whose options were given."""
    return {name: value for name, value in settings.items() if value is not None}
