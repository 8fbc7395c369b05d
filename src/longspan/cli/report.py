"""`longspan report`: one HTML file about some training runs."""

from pathlib import Path
from typing import Annotated

import typer

from longspan.cli.options import DeviceName, DtypeName, Threads, machine
from longspan.cli.progress import progress


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Folders of training runs.")],
    out: Annotated[Path, typer.Option("--out", help="The HTML file to write.")],
    device: DeviceName = "auto",
    dtype: DtypeName = "auto",
    threads: Threads = 0,
) -> None:
    """Write an HTML report about training runs.

    It shows learning curves, scores, context, attention and sample text in one file that can be viewed offline.
    """
    from longspan.experiments.figures.drawing import require_matplotlib
    from longspan.experiments.report.report import check_report_path, read_runs, write_report

    require_matplotlib()
    check_report_path("--out", out)
    where = machine(device, dtype, threads)
    found = read_runs(runs)
    with progress("report", quiet=False) as watch:
        write_report(found, out, where.device, where.dtype, progress=watch)
    print(f"the report is in {out}")
