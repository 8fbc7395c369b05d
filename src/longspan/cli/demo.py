"""`longspan demo`: what memory is worth to the bundled model, and a small model that learns in a minute."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from longspan.bundled import is_installed
from longspan.cli.options import DeviceName, DtypeName, Threads, machine
from longspan.cli.progress import progress

if TYPE_CHECKING:
    import torch

    from longspan.experiments.demo import Moment, Row
    from longspan.experiments.figures.memory_figure import MemoryCurve
    from longspan.text_model import TextModel

OPENING = "The carriage had hardly stopped before the door was opened, and"
CONTINUATION = 250
BAR = 40


def demo(
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Keep the trained model in this folder.")
    ] = None,
    page: Annotated[Path, typer.Option("--report", help="The HTML page to write.")] = Path("longspan-demo.html"),
    device: DeviceName = "auto",
    dtype: DtypeName = "auto",
    threads: Threads = 0,
) -> None:
    """Show how much memory helps a model, and train a small model in about a minute."""
    from longspan.experiments.demo import train_small
    from longspan.experiments.demo_page import write_page
    from longspan.experiments.figures.drawing import require_matplotlib
    from longspan.experiments.report.report import check_report_path

    require_matplotlib()  # now, because the page comes last
    check_report_path("--report", page)
    began = time.perf_counter()
    where = machine(device, dtype, threads)
    on_page = _show_bundled(where.device) if is_installed() else []
    _introduce_training()
    small, watch = train_small(where.device, _print_moment)
    on_stories = _show_stories(small)
    write_page(page, on_page, on_stories, watch, time.perf_counter() - began)
    if out is not None:
        small.save(out, notes=["Trained by `longspan demo` on generated stories."])
        print(f"The model is in {out}: longspan generate {out} -p 'Leo had a' --temp 0.6")
    print(f"The figures are in {page}.")


def _show_bundled(device: "torch.device") -> "list[Row]":
    from longspan.experiments.demo import PAGE, compressors, memory_curve, rows_of
    from longspan.text_model import load

    model = load(device=device)
    print(
        f"1. The bundled model has {model.parameter_count:,} parameters and was trained on English novels and\n"
        "   other books. It reads and generates bytes. It continues this opening:\n"
    )
    _print_continuation(model, OPENING, CONTINUATION)
    content = PAGE.read_bytes()
    print(
        f"\n2. What memory is worth: {len(content):,} bytes that the model has not seen, read with the same weights\n"
        "   and longer and longer memories. Bits per byte is the size of the text with the model as a\n"
        "   compressor, so fewer bits are better.\n"
    )
    with progress("scoring") as bar:
        curve = memory_curve(model, bar)
    rows = [*rows_of(model, curve, "bundled model"), *compressors(content)]
    _print_bars(rows)
    print(
        f"\n   With {curve.memories[-1]:,} bytes of memory it needs {_saved(curve):.0%} fewer bits than with "
        f"{curve.memories[0]}.\n   Try it: longspan score FILE --memory 64 --per document\n"
    )
    return rows


def _introduce_training() -> None:
    from longspan.experiments.demo import HELD_OUT_BYTES, STEPS, TRAINING_BYTES

    print(
        f"3. A small model learns: {STEPS} steps on {TRAINING_BYTES:,} bytes of generated stories, starting from\n"
        f"   random weights. It is scored on {HELD_OUT_BYTES:,} bytes of other stories and continues an opening.\n"
    )


def _print_moment(moment: "Moment") -> None:
    shown = moment.text.replace("\n", "\n   | ")
    print(f"   after {moment.step} steps: {moment.bits:.2f} bits per byte\n   | {shown}\n", flush=True)


def _show_stories(small: "TextModel") -> "list[Row]":
    from longspan.experiments.demo import compressors, held_out_stories, rows_of, story_memories

    curve = story_memories(small)
    rows = [*rows_of(small, curve, "small model"), *compressors(held_out_stories().encode())]
    _print_bars(rows)
    best = min(row.bits for row in rows if row.parameters is None)
    print(
        f"\n   It has {small.parameter_count:,} parameters. With {curve.memories[-1]} bytes of memory it needs "
        f"{_saved(curve):.0%} fewer bits\n   than with {curve.memories[0]}: names, things and places of a story "
        f"come back.\n   The best compressor needs {best / curve.bits[-1]:.1f} times as many bits.\n"
    )
    return rows


def _saved(curve: "MemoryCurve") -> float:
    """The share of bits that the longest memory saves."""
    return 1 - curve.bits[-1] / curve.bits[0]


def _print_bars(rows: "Sequence[Row]") -> None:
    width, most = max(len(row.name) for row in rows), max(row.bits for row in rows)
    for row in rows:
        mark = "#" if row.parameters is not None else "-"
        print(f"   {row.name:<{width}}  {row.bits:.3f}  {mark * round(BAR * row.bits / most)}")


def _print_continuation(model: "TextModel", prompt: str, count: int) -> None:
    from longspan.experiments.demo import continuation

    sys.stdout.write(prompt)
    for text in continuation(model, prompt, count):
        sys.stdout.write(text)
        sys.stdout.flush()
    print(" ...")
