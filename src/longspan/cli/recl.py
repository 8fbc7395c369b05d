"""`longspan recl`: how much context each model of a group uses."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from longspan.cli.options import DeviceName, DtypeName, Json, Threads, machine, note, note_bundled, print_json
from longspan.cli.progress import progress
from longspan.cli.text_options import Encoding, Field, OptionalData, Split, data_path
from longspan.errors import ConfigError

if TYPE_CHECKING:
    from longspan.scoring.loss_table import LossTable
    from longspan.scoring.recl import Length, LengthDifference

CONTEXTS = "100:1000:100"


def recl(
    models: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="MODEL",
            help="Models to compare: model folders or folders of training runs. Default: the bundled model.",
        ),
    ] = None,
    data: OptionalData = None,
    field: Field = None,
    encoding: Encoding = None,
    split: Split = None,
    contexts: Annotated[
        str | None,
        typer.Option(
            "--contexts",
            help=f"Context lengths in tokens: FIRST:LAST:STEP (LAST included) or a list. Default: {CONTEXTS}.",
        ),
    ] = None,
    r: Annotated[
        str, typer.Option("--r", help="Fractions of the hardest targets to measure, each above 0 and at most 1.")
    ] = ("0.1,0.5,1.0"),
    targets: Annotated[
        int | None,
        typer.Option(
            "--targets", help="Number of tokens to predict, the same for every model and context. Default: 200."
        ),
    ] = None,
    threshold: Annotated[
        float, typer.Option("--threshold", help="Smallest relative gain in perplexity that counts as a gain.")
    ] = 0.01,
    losses: Annotated[
        list[Path],
        typer.Option(
            "--losses",
            help="Read losses from this .npz instead: names, contexts, losses[model, context, target]. Repeat it for "
            "models that were measured separately on the same targets.",
        ),
    ] = [],  # noqa: B006 (typer copies it)
    out: Annotated[
        Path | None, typer.Option("--out", help="Write figures 3 and 4 of the paper and the losses to this folder.")
    ] = None,
    pairs: Annotated[
        bool,
        typer.Option("--pairs", help="Also print the difference in RECL of each pair of models, with its interval."),
    ] = False,
    json: Json = False,
    device: DeviceName = "auto",
    dtype: DtypeName = "auto",
    threads: Threads = 0,
) -> None:
    """Measure how much context models use.

    Prints the relative effective context length (RECL) of a group of models and the effective context length (ECL) of
    each.
    """
    from longspan.bundled import model_path
    from longspan.experiments.contexts import measure_folders, unique_names
    from longspan.experiments.figures.drawing import require_matplotlib
    from longspan.scoring.loss_table import join_tables, load_table
    from longspan.scoring.recl import chance_gains, check_threshold, ecl, recl_differences
    from longspan.scoring.recl import recl as recl_of

    if out is not None:
        require_matplotlib()
    shares = parse_shares(r)
    check_threshold(threshold)
    if not losses:
        where = machine(device, dtype, threads)
        lengths = parse_contexts(CONTEXTS if contexts is None else contexts)
        if data is None:
            raise ConfigError("--data is missing; use a file, a folder or a corpus from `longspan data list`")
        with progress("measuring", quiet=json) as bar:
            table = measure_folders(
                models or [model_path()],
                data_path(data),
                lengths,
                targets,
                split,
                where.device,
                where.dtype,
                field=field,
                encoding=encoding,
                progress=bar,
            )
        note_bundled(models[0] if models else None)
    else:
        if models or any(given is not None for given in (data, field, encoding, split, targets)):
            raise ConfigError(
                "--losses replaces the models and the text; leave out MODEL, --targets, and --data with its options"
            )
        names = unique_names([path.with_suffix("") for path in losses])
        table = join_tables(dict(zip(names, map(load_table, losses), strict=True)))
        if contexts is not None:
            table = table.at(parse_contexts(contexts))
    if table.below_zero:
        note(f"{table.below_zero} of the {table.losses.size} losses are negative; losses must be -log P, not log P")
    found = {name: recl_of(table, share, threshold) for name, share in shares.items()}
    effective = ecl(table, threshold)
    apart = {name: recl_differences(table, share, threshold) for name, share in shares.items()}
    if out is not None:
        _draw(table, shares, threshold, out)
    if json:
        differences = {r: [asdict(one) for one in each] for r, each in apart.items()}
        print_json(as_json(found, effective) | {"differences": differences})
    else:
        _print_table(found, effective)
        if pairs:
            _print_pairs(apart)
        for line in chance_gains(table, found.values()):
            print(line)


def parse_contexts(text: str) -> tuple[int, ...]:
    """FIRST:LAST:STEP with LAST included, or a list such as 100,200,400."""
    from longspan.scoring.loss_table import check_contexts

    parts = text.split(":" if ":" in text else ",")
    try:
        numbers = [int(part) for part in parts]
    except ValueError:
        numbers = []
    if ":" in text:
        if len(numbers) != 3 or min(numbers) < 1 or numbers[1] > 10**9:
            raise ConfigError(
                f"--contexts {text!r} is not FIRST:LAST:STEP; for example, {CONTEXTS} means 100, 200, ..., 1000"
            )
        if numbers[0] > numbers[1]:
            raise ConfigError(
                f"--contexts {text!r} ends at {numbers[1]}, below its first length {numbers[0]}; use FIRST:LAST:STEP "
                f"with FIRST below LAST, for example {CONTEXTS}"
            )
        if (numbers[1] - numbers[0]) // numbers[2] > 10_000:
            raise ConfigError(f"--contexts {text!r} has more than 10,000 lengths; use a larger step")
        numbers = list(range(numbers[0], numbers[1] + 1, numbers[2]))
    elif not numbers:
        raise ConfigError(
            f"--contexts {text!r} is neither FIRST:LAST:STEP nor integers separated by commas, for example "
            f"{CONTEXTS} or 100,200,400"
        )
    check_contexts(numbers)
    return tuple(numbers)


def parse_shares(text: str) -> dict[str, float]:
    """Shares such as 0.1,0.5,1.0, by the text they were given as."""
    from longspan.scoring.recl import check_share

    try:
        shares = {part.strip(): float(part) for part in text.split(",")}
    except ValueError:
        raise ConfigError(f"--r {text!r} must be numbers separated by commas, for example 0.1,0.5,1.0") from None
    for name, share in shares.items():
        try:
            check_share(share)
        except ConfigError as error:
            raise ConfigError(f"--r {name}: {error}") from None
    return shares


def as_json(found: dict[str, dict[str, "Length"]], effective: dict[str, "Length"]) -> dict[str, Any]:
    return {
        "recl": {r: {name: length.tokens for name, length in group.items()} for r, group in found.items()},
        "ecl": {name: length.tokens for name, length in effective.items()},
        "bounded": {r: [name for name, length in group.items() if length.bounded] for r, group in found.items()},
        "intervals": {
            "recl": {r: {name: [x.low, x.high] for name, x in group.items()} for r, group in found.items()},
            "ecl": {name: [x.low, x.high] for name, x in effective.items()},
        },
    }


def _print_table(found: dict[str, dict[str, "Length"]], effective: dict[str, "Length"]) -> None:
    """One row per model: RECL at each r, then ECL, each with its interval."""
    columns = {f"RECL r={r}": group for r, group in found.items()} | {"ECL": effective}
    width = max(len("model"), *map(len, effective))
    print(f"{'model':<{width}}" + "".join(f"  {title:>18}" for title in columns))
    for name in effective:
        print(f"{name:<{width}}" + "".join(f"  {_shown(group[name]):>18}" for group in columns.values()))
    if any(group[name].bounded for group in columns.values() for name in effective):
        print("+ still gaining at the last context; the length may be larger")


def _print_pairs(apart: "dict[str, list[LengthDifference]]") -> None:
    """One line per r and pair of models."""
    for r, each in apart.items():
        for one in each:
            shown = f"{one.tokens:+d} [{one.low:+d}, {one.high:+d}]"
            print(f"RECL r={r}, {one.first} minus {one.second}: {shown}, longer in {one.longer:.0%} of the resamples")


def _shown(length: "Length") -> str:
    return f"{length.tokens}{'+' if length.bounded else ''} [{length.low}, {length.high}]"


def _draw(table: "LossTable", shares: dict[str, float], threshold: float, out: Path) -> None:
    from longspan.experiments.figures.context_figures import draw_gains, draw_perplexity
    from longspan.experiments.figures.drawing import make_folder

    make_folder(out)
    table.save(out / "losses.npz")
    draw_gains(table, shares, threshold, out)
    draw_perplexity(table, out)
