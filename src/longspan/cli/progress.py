"""A progress bar on standard error, if that is a terminal."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from longspan.terminal import unguarded

Update = Callable[[int, int | None], None]
"""Called with the amount done and the total."""


@contextmanager
def progress(label: str, *, quiet: bool = False, in_bytes: bool = False) -> Iterator[Update | None]:
    """A function that updates the bar; None if `quiet` or if standard error is not a terminal."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TaskProgressColumn, TimeRemainingColumn

    columns = (BarColumn(), DownloadColumn() if in_bytes else TaskProgressColumn(), TimeRemainingColumn())
    with Progress(label, *columns, console=Console(file=unguarded(sys.stderr))) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
