"""`longspan report`: one HTML file about some runs."""

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from longspan.cli.options import DeviceName, DtypeName, Threads, machine
from longspan.cli.progress import progress
from longspan.errors import ConfigError


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of training runs.")],
    out: Annotated[Path, typer.Option("--out", help="The HTML file to write.")],
    device: DeviceName = "auto",
    dtype: DtypeName = "auto",
    threads: Threads = 0,
) -> None:
    """Curves, scores, context, speed, pictures and sample text of some runs, in one file that needs no network."""
    from longspan.analysis.drawing import require_matplotlib
    from longspan.analysis.report import build_report
    from longspan.analysis.runs import read_run
    from longspan.checkpoints.store import write_file

    require_matplotlib()
    if out.is_dir() or not out.parent.is_dir():
        raise ConfigError(f"--out {out}: it is a folder, or there is no folder {out.parent}")
    where = machine(device, dtype, threads)
    if len({path.resolve() for path in runs}) < len(runs):
        raise ConfigError("a run was named twice; a report holds each once")
    short = [path.resolve().name for path in runs]
    unique = len(set(short)) == len(short)
    found = [read_run(path, None if unique else str(path)) for path in runs]
    with tempfile.TemporaryDirectory(prefix="longspan-report-") as scratch, progress("reporting", quiet=False) as watch:
        content = build_report(found, Path(scratch), where.device, where.dtype, watch=watch)
    write_file(out, content.encode("utf-8"))
    print(f"the report is in {out}")
