"""`longspan finetune`, `predict`, `embed` and `evaluate-tasks`."""

import json as json_module
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from longspan.cli.options import (
    DeviceName,
    DtypeName,
    Json,
    Model,
    ModelOrBundled,
    Set,
    Threads,
    machine,
    note_bundled,
    print_json,
    print_rows,
)
from longspan.cli.reading_options import given_settings
from longspan.errors import ConfigError, DataError, counted

if TYPE_CHECKING:
    from longspan.transfer.tasks import Example, Task

Source = Annotated[
    Path | None,
    typer.Option("--from", metavar="FOLDER", help="Install a task from its archives in this folder."),
]
LIKELIHOOD = "Comma-separated: blimp, lambada, copa, wikitext2."
Texts = Annotated[list[str], typer.Option("--text", "-t", metavar="TEXT", help="A text; can be repeated.")]
Rows = Annotated[
    Path | None,
    typer.Option(
        "--data", metavar="FILE", help="A .jsonl or .csv file with one example per row; - reads standard input."
    ),
]


def finetune(
    *,
    model: ModelOrBundled = None,
    task: Annotated[
        str,
        typer.Option(
            "--task",
            metavar="NAME|FOLDER",
            help="A task from `longspan data list`, or a folder with train.jsonl or train.csv.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="The folder of the run.")],
    source: Source = None,
    recipe: Annotated[
        str, typer.Option("--recipe", metavar="NAME|FILE", help="A recipe: finetune, finetune-ulmfit or a file.")
    ] = "finetune",
    epochs: Annotated[
        float | None,
        typer.Option("--epochs", help="Passes over the training examples. Default: 3, unless training.steps is set."),
    ] = None,
    seeds: Annotated[
        int, typer.Option("--seeds", help="Train with seeds 1 to this number; reports mean and standard deviation.")
    ] = 1,
    from_scratch: Annotated[
        bool, typer.Option("--from-scratch", help="Start from random weights, as a baseline without pre-training.")
    ] = False,
    set_: Set = [],  # noqa: B006 (typer copies it)
    resume: Annotated[
        str | None, typer.Option("--resume", metavar="auto", help="Continue the runs in --out from their checkpoints.")
    ] = None,
    json: Json = False,
    device: DeviceName = "auto",
    threads: Threads = 0,
) -> None:
    """Train a classifier or tagger on a task and score dev and test."""
    from longspan.training.launch import is_first
    from longspan.transfer.finetune import Interrupted, finetune

    where = machine(device, "auto", threads)
    note_bundled(model)
    try:
        result = finetune(
            model,
            task,
            out,
            source=source,
            recipe=recipe,
            overrides=set_,
            epochs=epochs,
            seeds=seeds,
            resume=resume,
            from_scratch=from_scratch,
            device=where.device,
        )
    except Interrupted as stopped:
        if is_first():
            print(stopped, file=sys.stderr)
        raise typer.Exit(128 + int(stopped.signal)) from None
    if not is_first():
        return
    values = result.summary()
    if json:
        print_json(values)
        return
    rows: dict[str, Any] = {"task": values["task"], "metric": values["metric"], "seeds": len(values["seeds"])}
    for split in ("dev", "test"):
        if values[split] is not None:
            deviation = "" if values[f"{split}_std"] is None else f" (standard deviation {values[f'{split}_std']:.4f})"
            rows[split] = f"{values[split]:.4f}{deviation}"
            others = {k: v for k, v in values[f"{split}_metrics"].items() if k != values["metric"]}
            rows |= {f"{split} {name}": value for name, value in others.items()}
    if "predictions" in values:
        rows["test"] = f"has no labels; predictions: {', '.join(values['predictions'])}"
    print_rows(rows)


def predict(
    model: Model,
    text: Texts = [],  # noqa: B006
    data: Rows = None,
    others: Annotated[
        list[Path],
        typer.Option(
            "--with",
            metavar="MODEL",
            help="Another model of the same task, for an ensemble (mean of all); can be repeated.",
        ),
    ] = [],  # noqa: B006
    device: DeviceName = "auto",
    threads: Threads = 0,
) -> None:
    """Label texts with a fine-tuned model. Prints one JSON object per line: label, and probabilities of classes."""
    from longspan.transfer.predict import Ensemble, as_row, load_predictor

    where = machine(device, "auto", threads)
    members = [load_predictor(path, device=where.device) for path in (model, *others)]
    predictor = Ensemble(members) if others else members[0]
    for found in predictor.predict(_examples(predictor.task, text, data)):
        sys.stdout.write(json_module.dumps(as_row(predictor.config, found), ensure_ascii=False) + "\n")


def embed(
    *,
    model: ModelOrBundled = None,
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="A .npy or .safetensors file.")],
    text: Texts = [],  # noqa: B006
    data: Rows = None,
    layer: Annotated[
        str,
        typer.Option("--layer", help="0 (embedding) to the number of layers, last, concat-last-four, mix, ..."),
    ] = "last",
    pooling: Annotated[
        str, typer.Option("--pooling", help="mean, last or concat; none keeps one vector per token.")
    ] = "mean",
    device: DeviceName = "auto",
    dtype: DtypeName = "auto",
    threads: Threads = 0,
) -> None:
    """Write feature vectors of texts, taken from the hidden states of any layer."""
    from longspan.text_model import load
    from longspan.transfer.embed import check_suffix, embed, save_features
    from longspan.transfer.tasks import Task

    check_suffix(out)
    where = machine(device, dtype, threads)
    plain = Task(name="embed", kind="single", texts=("text",))
    examples = _examples(plain, text, data)
    loaded = load(model, device=where.device, dtype=where.dtype)
    note_bundled(model)
    features = embed(loaded, [example.texts[0] for example in examples], layer, pooling)
    save_features(out, features)
    print(f"{out}: {counted(len(features), 'text')}, {counted(features[0].shape[-1], 'feature')}")


def evaluate_tasks(
    model: ModelOrBundled = None,
    tasks: Annotated[str, typer.Option("--tasks", metavar="NAMES", help=LIKELIHOOD)] = "blimp,lambada,copa",
    source: Source = None,
    limit: Annotated[int | None, typer.Option("--limit", help="Use this many evenly spaced rows of each task.")] = None,
    memory: Annotated[
        int | None, typer.Option("--memory", help="Number of earlier positions that a layer can attend to.")
    ] = None,
    pointer: Annotated[
        int | None, typer.Option("--pointer", help="Number of earlier positions that the pointer can copy from.")
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(
            "--stride",
            help="For models without memory: tokens of wikitext2 to score per window. Default: half of the window.",
        ),
    ] = None,
    json: Json = False,
    device: DeviceName = "auto",
    dtype: DtypeName = "auto",
    threads: Threads = 0,
) -> None:
    """Score a model on BLiMP, LAMBADA, COPA and WikiText-2 without training.

    Scores are computed from the likelihoods that the model assigns to the texts.
    """
    from longspan.text_model import load
    from longspan.transfer.likelihood import evaluate_tasks

    where = machine(device, dtype, threads)
    loaded = load(model, device=where.device, dtype=where.dtype, **given_settings(memory=memory, pointer=pointer))
    note_bundled(model)
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    found = evaluate_tasks(
        loaded, names, source=source, limit=limit, stride=stride, announce=lambda line: print(line, file=sys.stderr)
    )
    if json:
        print_json(found)
        return
    rows: dict[str, Any] = {}
    for name, scores in found.items():
        rows |= {f"{name} {key}": value for key, value in scores.items() if not isinstance(value, dict)}
    print_rows(rows)


def _examples(task: "Task", texts: list[str], data: Path | None) -> "list[Example]":
    """Examples without labels from --text or --data."""
    from longspan.transfer.tasks.opened import rows_of, rows_of_input

    if bool(texts) == (data is not None):
        raise ConfigError("pass texts with --text or a file with --data, but not both")
    if data is None:
        if len(task.texts) > 1:
            raise ConfigError(f"a task of kind {task.kind!r} has several texts per row; pass them with --data FILE")
        rows: Any = [{task.texts[0]: text} for text in texts]
    else:
        rows = rows_of(data) if str(data) != "-" else rows_of_input()
    name = "--text" if data is None else "standard input" if str(data) == "-" else data.name
    unlabelled = ({key: row[key] for key in row if key != task.label} for row in rows)
    found = [task.example(row, f"{name}, row {k}", labelled=False) for k, row in enumerate(unlabelled, start=1)]
    if not found:
        raise DataError(f"{name} has no rows; add at least one")
    return found
