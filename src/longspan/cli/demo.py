"""`longspan demo`: the model in the box writes, then what a memory buys, in under five minutes on two cores."""

import bz2
import dataclasses
import lzma
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from longspan.box import is_filled
from longspan.cli.options import DeviceName, DtypeName, Threads, machine
from longspan.cli.report import report
from longspan.errors import ConfigError
from longspan.terminal import unguarded

if TYPE_CHECKING:
    import torch

    from longspan.text_model import TextModel
    from longspan.training.recipe import Recipe

TRAINING_SECONDS = 95.0  # for the first model; the second takes the same steps, and fewer seconds
HELD_OUT = 12_288
OPENING = "The carriage had hardly stopped before the door was opened, and"


@dataclass(frozen=True)
class Row:
    name: str
    parameters: int | None
    bits: float
    speed: float | None


def demo(
    out: Annotated[Path | None, typer.Option("--out", help="Keep the runs in this folder.")] = None,
    page: Annotated[Path, typer.Option("--report", help="The HTML file that ends it.")] = Path("longspan-demo.html"),
    device: DeviceName = "auto",
    dtype: DtypeName = "auto",
    threads: Threads = 0,
) -> None:
    """Let the model in the box write, train a small Transformer-XL and a vanilla Transformer of as many parameters,
    score both, write some text."""
    from longspan.analysis.drawing import require_matplotlib

    require_matplotlib()  # the report comes last
    if page.is_dir() or not page.parent.is_dir():
        raise ConfigError(f"--report {page}: it is a folder, or there is no folder {page.parent}")
    where = machine(device, dtype, threads)
    if is_filled():
        _open_box(where.device)
    with tempfile.TemporaryDirectory(prefix="longspan-demo-") as folder:
        runs = Path(folder) if out is None else out
        _show(runs, where.device)
        print()
        report([runs / "transformer-xl", runs / "vanilla"], page, device, dtype, threads)


def _open_box(device: "torch.device") -> None:
    import torch

    from longspan.text_model import load

    model = load(device=device)
    count, memory = f"{model.parameter_count:,}", f"{model.config.memory:,}"
    print(
        f"First the model that comes with longspan, {count} parameters trained on 90 English novels.\n"
        f"It reads and writes bytes and remembers the last {memory} of them. After an opening line of ours:\n"
    )
    # One thread is enough for steps this small; where others work too, two would wait for each other.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    _continue(model, OPENING, 300)
    torch.set_num_threads(threads)
    print('\nMore of it: longspan generate -p "..." (docs/box.md). Now two models of your own.\n')


def _show(out: Path, device: "torch.device") -> None:
    from longspan.data import open_corpus

    first, rival = _recipes(device)
    print(f"Training on the source of this Python's standard library, {first.training.steps} steps each.\n")
    _train(first, "Transformer-XL", out / "transformer-xl", device)
    _train(rival, "vanilla Transformer", out / "vanilla", device)
    text = bytes(open_corpus("stdlib", "test").ids[:HELD_OUT])
    print(f"\nScoring {len(text):,} bytes of files neither has seen.\n")
    rows = _scores(out, text, device)
    _print_table(rows)
    ratio = (rows[0].speed or 0) / (rows[1].speed or 1)
    gained = rows[1].bits - rows[0].bits
    print(
        f"\nThe memory is worth {gained:.2f} bits per byte here, and makes scoring {ratio:.0f} times as fast: "
        "a window\nhas to be read anew for every byte, a memory only once.\n"
    )
    _write(out / "transformer-xl", device)


def _recipes(device: "torch.device") -> tuple["Recipe", "Recipe"]:
    """Both recipes with as many steps as this machine has time for."""
    from longspan.training.dry_run import dry_run
    from longspan.training.recipe import load_recipe
    from longspan.training.run import open_text

    first, rival = load_recipe("demo"), load_recipe("demo-vanilla")
    cost = dry_run(first, open_text(first, "train"), device)
    steps = first.training.steps or 1
    steps = max(60, min(steps, int(steps * TRAINING_SECONDS / max(cost.seconds, 1e-3))))
    return tuple(dataclasses.replace(r, training=dataclasses.replace(r.training, steps=steps)) for r in (first, rival))  # type: ignore[return-value]


def _train(recipe: "Recipe", name: str, out: Path, device: "torch.device") -> None:
    from longspan.training import run

    began = time.perf_counter()
    print(f"{name} ...", flush=True)
    outcome = run.train(recipe, out, resume="auto", device=device)
    if outcome.interrupted is not None:
        print(outcome.sentence, file=sys.stderr)
        raise typer.Exit(128 + int(outcome.interrupted))
    print(f"  {outcome.step} steps in {time.perf_counter() - began:.0f} s")


def _scores(out: Path, text: bytes, device: "torch.device") -> list[Row]:
    """Transformer-XL with a long memory, the vanilla model at its best, and two compressors on the same bytes."""
    import numpy as np

    from longspan.evaluation.likelihood import Tally, sliding_losses, stream_losses
    from longspan.text_model import load

    ids = np.frombuffer(text, np.uint8)
    xl = load(out / "transformer-xl", device=device, **_far_memory())
    vanilla = load(out / "vanilla", device=device)
    window = vanilla.config.segment
    ways = [
        (f"Transformer-XL, memory {xl.config.memory}", xl, stream_losses(xl.model, ids, segment=128)),
        (f"vanilla, sliding window {window}", vanilla, sliding_losses(vanilla.model, ids, segment=window)),
    ]
    rows = []
    for name, model, stretches in ways:
        tally, began = Tally(), time.perf_counter()
        for stretch in stretches:
            tally.add(stretch)
        seconds = time.perf_counter() - began
        rows.append(Row(name, model.parameter_count, tally.bits, tally.count / seconds))
    for name, packed in (("xz -9", lzma.compress(text, preset=9)), ("bzip2 -9", bz2.compress(text, 9))):
        rows.append(Row(name, None, 8 * len(packed) / len(text), None))
    return rows


def _print_table(rows: list[Row]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table()
    table.add_column("")
    for column in ("parameters", "bits per byte", "bytes/s scored"):
        table.add_column(column, justify="right")
    for row in rows:
        parameters = "" if row.parameters is None else f"{row.parameters:,}"
        speed = "" if row.speed is None else f"{row.speed:,.0f}"
        table.add_row(row.name, parameters, f"{row.bits:.3f}", speed)
    Console(file=unguarded(sys.stdout), width=100).print(table)


def _write(run_folder: Path, device: "torch.device") -> None:
    from longspan.text_model import load

    prompt = "def "
    print(f"What it writes after {prompt!r}:\n")
    _continue(load(run_folder, device=device, **_far_memory()), prompt, 400)


def _far_memory() -> dict[str, Any]:
    """How the recipe would have its model read: a memory far longer than in training."""
    from longspan.training.recipe import load_recipe

    return load_recipe("demo").evaluation.settings


def _continue(model: "TextModel", prompt: str, count: int) -> None:
    from longspan.generation.sampling import Sampling

    sys.stdout.write(prompt)
    for piece in model.stream(model.session(prompt), count, Sampling(temperature=0.7, top_p=0.95)):
        sys.stdout.write(piece)
        sys.stdout.flush()
    print()
