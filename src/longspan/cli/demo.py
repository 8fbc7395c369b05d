"""`longspan demo`: text from the bundled model, then two models that show the use of a memory."""

import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from longspan.bundled import is_installed
from longspan.cli.options import DeviceName, DtypeName, Threads, machine
from longspan.cli.report import report
from longspan.terminal import unguarded

if TYPE_CHECKING:
    import torch

    from longspan.experiments.demo import Row
    from longspan.text_model import TextModel
    from longspan.training.recipe import Recipe

OPENING = "The carriage had hardly stopped before the door was opened, and"
PROMPT = "def "


def demo(
    out: Annotated[Path | None, typer.Option("--out", help="Keep the runs in this folder.")] = None,
    page: Annotated[Path, typer.Option("--report", help="The HTML report to write.")] = Path("longspan-demo.html"),
    device: DeviceName = "auto",
    dtype: DtypeName = "auto",
    threads: Threads = 0,
) -> None:
    """Generate text with the bundled model; train a small longspan-xl and a vanilla Transformer of the same size;
    score both and write a report."""
    from longspan.experiments.demo import WITH_MEMORY, WITHOUT_MEMORY
    from longspan.experiments.figures.drawing import require_matplotlib
    from longspan.experiments.report.report import check_report_path

    require_matplotlib()  # now, because the report comes last
    check_report_path("--report", page)
    where = machine(device, dtype, threads)
    if is_installed():
        _show_bundled(where.device)
    with tempfile.TemporaryDirectory(prefix="longspan-demo-") as folder:
        runs = Path(folder) if out is None else out
        _show_training(runs, where.device)
        print()
        report([runs / WITH_MEMORY, runs / WITHOUT_MEMORY], page, device, dtype, threads)


def _show_bundled(device: "torch.device") -> None:
    from longspan.experiments.demo import one_thread
    from longspan.text_model import load

    model = load(device=device)
    print(
        f"The bundled model has {model.parameter_count:,} parameters and was trained on 90 English novels.\n"
        f"It reads and generates bytes, with a memory of {model.reading.memory:,} of them. It continues this opening:\n"
    )
    with one_thread():
        _print_continuation(model, OPENING, 300)
    print('\nTry it: longspan generate -p "..." (`longspan docs bundled_model`). Next, two models are trained here.\n')


def _show_training(out: Path, device: "torch.device") -> None:
    from longspan.experiments.demo import WITH_MEMORY, demo_recipes, held_out_text, score_runs
    from longspan.text_model import load

    recipes = demo_recipes(device)
    steps = recipes[WITH_MEMORY].training.steps
    print(f"Training on the source code of Python's standard library, {steps} steps each.\n")
    for name, recipe in recipes.items():
        _train(recipe, out / name, device)
    text = held_out_text()
    print(f"\nScoring {len(text.ids):,} bytes of held-out files.\n")
    rows = score_runs(out, text, device)
    _print_table(rows)
    ratio = (rows[0].bytes_per_second or 0) / (rows[1].bytes_per_second or 1)
    print(
        f"\nWith memory the loss is {rows[1].bits - rows[0].bits:.2f} bits per byte lower and scoring is {ratio:.0f} "
        "times as fast: a sliding\nwindow is computed again for every byte, a memory only once.\n"
    )
    print(f"Generated after {PROMPT!r}:\n")
    _print_continuation(load(out / WITH_MEMORY, device=device), PROMPT, 400)


def _train(recipe: "Recipe", out: Path, device: "torch.device") -> None:
    from longspan.training import run

    began = time.perf_counter()
    print(f"{out.name} ...", flush=True)
    outcome = run.train(recipe, out, resume="auto", device=device)
    if outcome.interrupted is not None:
        print(outcome.sentence, file=sys.stderr)
        raise typer.Exit(128 + int(outcome.interrupted))
    print(f"  {outcome.step} steps in {time.perf_counter() - began:.0f} s")


def _print_table(rows: list["Row"]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table()
    table.add_column("")
    for column in ("parameters", "bits per byte", "bytes/s scored"):
        table.add_column(column, justify="right")
    for row in rows:
        parameters = "" if row.parameters is None else f"{row.parameters:,}"
        speed = "" if row.bytes_per_second is None else f"{row.bytes_per_second:,.0f}"
        table.add_row(row.name, parameters, f"{row.bits:.3f}", speed)
    Console(file=unguarded(sys.stdout), width=100).print(table)


def _print_continuation(model: "TextModel", prompt: str, count: int) -> None:
    from longspan.experiments.demo import continuation

    sys.stdout.write(prompt)
    for text in continuation(model, prompt, count):
        sys.stdout.write(text)
        sys.stdout.flush()
    print()
