"""A bar with the time left on standard error, where a person watches."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from longspan.terminal import unguarded

Watch = Callable[[int, int | None], None]


@contextmanager
def progress(what: str, *, quiet: bool = False, in_bytes: bool = False) -> Iterator[Watch | None]:
    """A function to call with what is done and what there is in all; None where nobody watches."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TaskProgressColumn, TimeRemainingColumn

    columns = (BarColumn(), DownloadColumn() if in_bytes else TaskProgressColumn(), TimeRemainingColumn())
    with Progress(what, *columns, console=Console(file=unguarded(sys.stderr))) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
