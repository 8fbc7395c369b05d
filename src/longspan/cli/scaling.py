"""`longspan scaling`: a scaling law from finished runs. docs/scaling.md"""

import json as json_format
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from longspan.cli.options import Json, note, print_json
from longspan.errors import ConfigError, DataError, counted

if TYPE_CHECKING:
    from longspan.experiments.scaling.points import Point
    from longspan.experiments.scaling.study import Difference, Study


def scaling(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN", help="Folders of training runs, folders that contain them, or a points.csv."),
    ],
    by: Annotated[
        str, typer.Option("--by", metavar="KEY", help="Fit runs with different values of this key separately.")
    ] = "training.memory",
    smallest: Annotated[
        int,
        typer.Option(
            "--smallest", metavar="N", help="Leave out models with fewer than N parameters, not counting embeddings."
        ),
    ] = 0,
    resamples: Annotated[int, typer.Option("--resamples", help="Number of bootstrap resamples.")] = 1000,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Write scaling.json, points.csv and a figure to this folder."),
    ] = None,
    json: Json = False,
) -> None:
    """Fit the scaling law L(N, D) = E + A / N^alpha + B / D^beta to finished runs.

    Prints the parameters with intervals, and predicts the loss of the largest model from the others.
    """
    from longspan.experiments.run_facts import facts_of_runs
    from longspan.experiments.scaling.points import read_points, write_csv
    from longspan.experiments.scaling.study import COUNTS, differences, gaps, studies

    if resamples < 20:
        raise ConfigError(f"--resamples {resamples} must be at least 20")
    if smallest < 0:
        raise ConfigError(f"--smallest {smallest} must be at least 0")
    if out is not None:
        from longspan.experiments.figures.drawing import make_folder, require_matplotlib

        require_matplotlib()
        make_folder(out)
    points, notes = read_points(runs, by)
    if not points:
        raise ConfigError(f"none of the runs is finished: {notes[0]}")
    all_points = len(points)
    points = _large_enough(points, smallest, notes)
    try:
        found = {count: studies(points, count, resamples=resamples) for count in COUNTS}
    except DataError as error:
        raise DataError(f"{error}{_hint(smallest, all_points - len(points))}") from None
    apart = {count: differences(each) for count, each in found.items()}
    without_law = gaps(points)
    result: dict[str, Any] = {
        "fits": [one.facts for each in found.values() for one in each],
        "differences": [
            {"count": count} | vars(one) | {"clear": one.clear} for count, each in apart.items() for one in each
        ],
        "gaps": [vars(one) for one in without_law],
        "points": [vars(point) for point in points],
        "runs": facts_of_runs(runs),
        "notes": notes,
    }
    if out is not None:
        from longspan.experiments.scaling.figure import draw_studies

        (out / "scaling.json").write_text(json_format.dumps(result, indent=1) + "\n", encoding="utf-8")
        write_csv(points, out / "points.csv")
        draw_studies(found[COUNTS[0]], out)
    if json:
        print_json(result)
        return
    for line in notes:
        note(line)
    for count, each in found.items():
        _print_table(count, each, apart[count])
    for gap in without_law:
        between, pairs = f"{gap.second} minus {gap.first}", counted(gap.pairs, "pair")
        middle = f"middle half from {gap.lower_quartile:+.4f} to {gap.upper_quartile:+.4f}"
        print(f"{between} at equal size and tokens, {pairs}: median {gap.median:+.4f} bits, {middle}")
    if out is not None:
        print(f"the figure is in {out / 'scaling.png'}")


def _large_enough(points: "list[Point]", smallest: int, notes: list[str]) -> "list[Point]":
    """The points with at least `smallest` parameters. A note says how many are left out."""
    kept = [point for point in points if point.non_embedding >= smallest]
    if not kept:
        largest = max(point.non_embedding for point in points)
        raise ConfigError(
            f"--smallest {smallest:,} leaves out all models; use at most {largest:,}, the size of the largest one "
            "without embeddings"
        )
    if len(kept) < len(points):
        left_out = counted(len(points) - len(kept), "run")
        notes.append(f"{left_out} left out: fewer than {smallest:,} parameters without embeddings")
    if gone := {point.group for point in points} - {point.group for point in kept}:
        notes.append(f"all runs of {', '.join(sorted(gone))} are left out")
    return kept


def _hint(smallest: int, left_out: int) -> str:
    return f" (--smallest {smallest:,} leaves out {counted(left_out, 'run')})" if left_out else ""


def _print_table(count: str, found: "list[Study]", apart: "list[Difference]") -> None:
    print("N counts all parameters" if count == "parameters" else "N counts parameters without embeddings")
    for one in found:
        names = ("alpha", "beta", "E", "compute_exponent")
        shown = [f"{name.replace('_', ' ')} {_shown(getattr(one.law, name), *one.interval(name))}" for name in names]
        print(f"  {one.group}, {len(one.points)} runs: {', '.join(shown)}")
        print(f"    A {one.law.A:.4g}, B {one.law.B:.4g}; residuals of the log loss {one.spread:.2%}")
        if (target := one.prediction) is not None:
            print(
                f"    {target.name} from smaller models: {_shown(target.predicted, target.low, target.high)} bits, "
                f"measured {target.measured:.4f}, error {target.error:+.2%}"
            )
    for other in apart:
        verdict = "differs" if other.clear else "no clear difference"
        between = f"{other.name}, {other.second} minus {other.first}"
        print(f"  {between}: {_shown(other.value, other.low, other.high)}, {verdict}")


def _shown(value: float, low: float, high: float) -> str:
    return f"{value:.4f} [{low:.4f}, {high:.4f}]"
