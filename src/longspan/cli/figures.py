"""`longspan figures`: the attention of a model's heads, and how much context it uses."""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from longspan.cli.options import DeviceName, DtypeName, ModelOrBundled, Threads, machine, note_bundled
from longspan.cli.parsing import parse_numbers
from longspan.cli.progress import progress
from longspan.cli.reading_options import Clamp, Discount, given_settings
from longspan.cli.text_options import Data, Encoding, Field, Sentences, Split, data_path
from longspan.errors import ConfigError


def figures(
    model: ModelOrBundled = None,
    *,
    data: Data,
    out: Annotated[Path, typer.Option("--out", help="A folder for the figures.")],
    field: Field = None,
    encoding: Encoding = None,
    split: Split = None,
    sentences: Sentences = None,
    memory: Annotated[int | None, typer.Option("--memory", help="Memory length. Default: the model's.")] = None,
    clamp: Clamp = None,
    discount: Discount = None,
    memories: Annotated[
        str,
        typer.Option(
            "--memories", help="Draw only the loss at these memory lengths (memory.svg), for example 64,256,1024."
        ),
    ] = "",
    tokens: Annotated[
        int | None, typer.Option("--tokens", help="Number of tokens of the text to use. Default: all.")
    ] = None,
    device: DeviceName = "auto",
    dtype: DtypeName = "auto",
    threads: Threads = 0,
) -> None:
    """Draw figures 3 to 7 of the Transformer-XL paper for a model.

    Also draws the attention span of every head. Writes PNG, SVG and PDF files.
    """
    from longspan.bundled import model_path
    from longspan.checkpoints.model_folder import load_model
    from longspan.experiments.figures.drawing import require_matplotlib
    from longspan.experiments.figures.memory_figure import memory_figure
    from longspan.experiments.figures.model_figures import draw_figures
    from longspan.training.model_text import open_text_for

    require_matplotlib()
    if tokens is not None and tokens < 3:
        raise ConfigError(f"--tokens {tokens} must be at least 3")
    lengths = parse_numbers("--memories", memories)
    where = machine(device, dtype, threads)
    overrides = given_settings(memory=memory, clamp=clamp, discount=discount)
    loaded = load_model(model_path(model), overrides=overrides, device=where.device, dtype=where.dtype)
    form: Any = {"field": field, "encoding": encoding, "sentences": sentences}
    text = open_text_for([loaded.path], data_path(data), loaded.tokenizer, split, **form)
    note_bundled(model)
    name = (model or loaded.path).resolve().name
    stage = partial(progress, quiet=False)
    draw = partial(memory_figure, memories=lengths) if lengths else draw_figures
    for path in draw(loaded, name, text, out, stage, tokens=tokens):
        print(path)
