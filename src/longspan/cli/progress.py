"""Progress on standard error: a bar in a terminal, otherwise a line every ten seconds."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from longspan.terminal import progress_line, unguarded

Update = Callable[[int, int | None], None]
"""Called with the amount done and the total."""


@contextmanager
def progress(label: str, *, quiet: bool = False, in_bytes: bool = False) -> Iterator[Update | None]:
    """A function that updates the progress. `quiet` hides the bar; lines of a pipe are printed in any case."""
    if not sys.stderr.isatty():
        with progress_line(label) as update:
            yield update
        return
    if quiet:
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TaskProgressColumn, TimeRemainingColumn

    columns = (BarColumn(), DownloadColumn() if in_bytes else TaskProgressColumn(), TimeRemainingColumn())
    with Progress(label, *columns, console=Console(file=unguarded(sys.stderr))) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
