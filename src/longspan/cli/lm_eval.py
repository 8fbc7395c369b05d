"""`longspan lm-eval`: tasks of EleutherAI's evaluation harness."""

from pathlib import Path
from typing import Annotated

import typer

from longspan.cli.options import (
    DeviceName,
    DtypeName,
    Json,
    ModelOrBundled,
    Threads,
    machine,
    note_bundled,
    print_json,
    print_rows,
)
from longspan.cli.reading_options import Clamp, Discount, Memory, SameLength, Segment, given_settings


def lm_eval(
    *,
    model: ModelOrBundled = None,
    tasks: Annotated[
        str,
        typer.Option(
            "--tasks",
            help="lm-eval tasks, separated by commas; NAME=FILE.jsonl for local files (blimp, lambada, wikitext).",
        ),
    ],
    limit: Annotated[int | None, typer.Option("--limit", help="Use at most this many examples of each task.")] = None,
    batch_size: Annotated[int, typer.Option("--batch-size", help="Number of texts to read in parallel.")] = 8,
    include: Annotated[Path | None, typer.Option("--include", help="A folder with your own YAML tasks.")] = None,
    segment: Segment = None,
    memory: Memory = None,
    clamp: Clamp = None,
    discount: Discount = None,
    same_length: SameLength = None,
    json: Json = False,
    device: DeviceName = "auto",
    dtype: DtypeName = "auto",
    threads: Threads = 0,
) -> None:
    """Evaluate a model on lm-eval tasks.

    Tasks with local files work offline: --tasks blimp=adjunct_island.jsonl,lambada=lambada_test.jsonl
    """
    from longspan.interop.lm_eval import evaluate
    from longspan.text_model import load

    where = machine(device, dtype, threads)
    settings = given_settings(segment=segment, memory=memory, clamp=clamp, discount=discount, same_length=same_length)
    loaded = load(model, device=where.device, dtype=where.dtype, **settings)
    note_bundled(model)
    names = [name for name in tasks.split(",") if name]
    results = evaluate(loaded, names, limit=limit, batch_size=batch_size, include=include)
    if json:
        print_json(results["results"])
        return
    for task, found in results["results"].items():
        metrics = {name.removesuffix(",none"): value for name, value in found.items() if isinstance(value, float)}
        print_rows({f"{task} {name}": value for name, value in metrics.items()})
