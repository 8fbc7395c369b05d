"""`longspan train`: train a model from a recipe and a text."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from longspan.cli.completion import recipe_values
from longspan.cli.keys import training_help
from longspan.cli.options import DeviceName, Set, Threads, machine, note, print_rows
from longspan.cli.parsing import parse_numbers
from longspan.cli.text_options import Encoding, Field, OptionalData, data_overrides, data_path
from longspan.errors import ConfigError
from longspan.terminal import is_silent

if TYPE_CHECKING:
    import torch

    from longspan.training.recipe import Recipe


def train(
    recipe: Annotated[
        str | None,
        typer.Option(
            "--recipe",
            metavar="NAME|FILE",
            autocompletion=recipe_values,
            help="The name of a recipe, for example tiny, or a recipe file.",
        ),
    ] = None,
    data: OptionalData = None,
    field: Field = None,
    encoding: Encoding = None,
    set_: Set = [],  # noqa: B006 (typer copies it)
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="The folder of the run.")] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            "--resume", metavar="auto|PATH", help="Continue from the newest checkpoint in --out, or from PATH."
        ),
    ] = None,
    init_from: Annotated[
        Path | None,
        typer.Option(
            "--init-from", metavar="MODEL", help="Start with the weights, config and tokenizer of this model."
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Random seed of weights and dropout.")] = None,
    print_config: Annotated[bool, typer.Option("--print-config", help="Print the resolved recipe and exit.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Measure a few steps, print the estimated cost and exit. Writes nothing.")
    ] = False,
    budgets: Annotated[
        str,
        typer.Option(
            "--budgets",
            metavar="N,N,...",
            help="Train a model for each number of steps: one long run, with a short decay for each.",
        ),
    ] = "",
    decay: Annotated[
        float | None,
        typer.Option(
            "--decay", help="With --budgets: fraction of each budget in which the learning rate decays. Default: 0.2."
        ),
    ] = None,
    track: Annotated[
        str, typer.Option("--track", metavar="NAMES", help="Send metrics to wandb, mlflow or both (wandb,mlflow).")
    ] = "",
    device: DeviceName = "auto",
    dtype: Annotated[
        str, typer.Option("--dtype", help="Set training.precision: auto, float32, bfloat16 or float64.")
    ] = "auto",
    threads: Threads = 0,
) -> None:
    """Train a model on a text, or resume a run."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # DDP warns of choices that we made

    from longspan.training import run
    from longspan.training.budgets import DECAY
    from longspan.training.folder import recorded_threads

    numbers = parse_numbers("--budgets", budgets, positive=True)
    if numbers and (print_config or track or resume not in (None, "auto")):
        raise ConfigError(
            "--budgets cannot be combined with --print-config, --track or --resume PATH: each budget has a recipe of "
            "its own, and it resumes automatically; use only one of them"
        )
    if not numbers and decay is not None:
        raise ConfigError(f"--decay {decay} has no effect without --budgets; add --budgets N,N,...")
    decay = DECAY if decay is None else decay
    if resume == "auto" and out is not None:
        threads = threads or recorded_threads(out)
    where = machine(device, dtype, threads)
    overrides = [*set_, *([f"training.precision={dtype}"] if dtype != "auto" else [])]
    overrides += data_overrides(field, encoding)
    data = None if data is None else data_path(data)
    chosen = run.resolve(recipe, overrides, data=data, out=out, resume=resume, seed=seed, init_from=init_from)
    if is_silent() and (print_config or dry_run):
        return
    if print_config:
        sys.stdout.write(chosen.to_toml())
        return
    if dry_run:
        _print_cost(chosen, numbers, decay, where.device)
        return
    if out is None:
        raise ConfigError("--out is missing; add --out DIR, the folder for the run")
    if numbers:
        _train_budgets(chosen, out, numbers, decay, where.device)
        return
    names = [name for name in track.split(",") if name]
    outcome = run.train(chosen, out, resume=resume, device=where.device, track=names)
    if not is_silent():
        print(outcome.sentence, file=sys.stderr if outcome.interrupted else sys.stdout)
    if outcome.interrupted is not None:
        raise typer.Exit(128 + int(outcome.interrupted))


train.__doc__ = f"{train.__doc__}\n\n{training_help()}"


def _train_budgets(recipe: "Recipe", out: Path, budgets: Sequence[int], decay: float, device: "torch.device") -> None:
    from longspan.training.budgets import train_budgets

    for outcome in train_budgets(recipe, out, budgets, decay, device=device):
        if outcome.interrupted is not None:
            sentence = f"stopped by {outcome.interrupted.name} in {outcome.out}; continue with the same command"
            print(sentence, file=sys.stderr)
            raise typer.Exit(128 + int(outcome.interrupted))
        if not is_silent():
            print(outcome.sentence)


def _print_cost(recipe: "Recipe", budgets: Sequence[int], decay: float, device: "torch.device") -> None:
    from longspan.data import describe_all
    from longspan.training.budgets import dry_run_budgets
    from longspan.training.dry_run import dry_run
    from longspan.training.run import open_text

    text = open_text(recipe, "train")
    cost = dry_run_budgets(recipe, text, budgets, decay, device) if budgets else dry_run(recipe, text, device)
    for line in describe_all(text, lambda split: open_text(recipe, split, text.tokenizer)):
        note(line)
    minutes, seconds = divmod(round(cost.seconds), 60)
    fewest, most = cost.tokens_per_step
    print_rows(
        {
            "parameters": cost.parameters,
            "tokens per step": fewest if fewest == most else f"{fewest:,} to {most:,}",
            "steps per pass": cost.steps_per_pass,
            "tokens per pass": cost.tokens_per_pass,
            "memory": f"{cost.memory_bytes / 2**30:.2f} GiB",
            "tokens per second": round(cost.tokens_per_second),
            "time": f"{minutes} min {seconds} s without validation and saving",
        }
    )
