"""WordCounts: exact counts of words in bounded memory, which a killed process can continue."""

import heapq
import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from types import TracebackType

from longspan.data import documents
from longspan.data.cache import read_json, write_json

MOST = 1 << 20
_JOURNAL = "journal.json"
_SECONDS = 30.0


class WordCounts:
    """Adds the counts of tasks in the order of a text. More than `most` different words are written to disk, sorted.

    The words of the text are in memory together only if `frequent` keeps them all. With a `folder`, counts are written
    every 30 seconds too, and `tasks` and `read` (bytes) say how much of the text a killed process has left there.
    """

    def __init__(self, most: int = MOST, folder: Path | None = None) -> None:
        self.most, self.folder = most, folder
        self.counts: Counter[str] = Counter()
        self.temporary = tempfile.TemporaryDirectory(prefix="longspan-words-") if folder is None else None
        self.path = Path(self.temporary.name) if self.temporary else folder or Path()
        self.runs: list[Path] = []
        self.tasks = self.read = 0
        self.noted = time.monotonic()
        if folder is not None:
            self._restore(folder)

    def _restore(self, folder: Path) -> None:
        """What a killed process noted, if its runs are complete and its tasks are as long as ours."""
        noted = read_json(folder / _JOURNAL)
        try:
            runs = [folder / str(k) for k in range(len(noted["sizes"]))]
            sizes = [path.stat().st_size for path in runs]
            if (sizes, documents.TASK_BYTES) == (noted["sizes"], noted["task_bytes"]):
                self.runs, self.tasks, self.read = runs, int(noted["tasks"]), int(noted["read"])
        except (OSError, TypeError, LookupError, ValueError):
            pass

    def __enter__(self) -> "WordCounts":
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        if self.temporary is not None:
            self.temporary.cleanup()

    def add(self, counts: Mapping[str, int], read: int = 0) -> None:
        """Add the counts of a task of so many bytes."""
        self.counts.update(counts)
        self.tasks, self.read = self.tasks + 1, self.read + read
        due = self.folder is not None and time.monotonic() - self.noted > _SECONDS
        if len(self.counts) > self.most or due:
            self._write_run()

    def _write_run(self) -> None:
        path = self.path / str(len(self.runs))
        rows = sorted((word, place, count) for place, (word, count) in enumerate(self.counts.items()))
        with path.open("w", encoding="utf-8", newline="\n") as file:
            file.writelines(f"{word}\t{place}\t{count}\n" for word, place, count in rows)
            file.flush()
            os.fsync(file.fileno())
        self.runs.append(path)
        self.counts = Counter()
        if self.folder is not None:
            sizes = [run.stat().st_size for run in self.runs]
            facts = {"tasks": self.tasks, "read": self.read, "task_bytes": documents.TASK_BYTES}
            write_json(self.folder / _JOURNAL, {"sizes": sizes, **facts})
        self.noted = time.monotonic()

    def frequent(self, minimum: int = 1) -> dict[str, int]:
        """The words that occur at least `minimum` times, in the order of first appearance."""
        if not self.runs:
            return {word: count for word, count in self.counts.items() if count >= minimum}
        self._write_run()
        kept: list[tuple[int, int, str, int]] = []
        merged = heapq.merge(*(_rows(path, run) for run, path in enumerate(self.runs)))
        for word, rows in groupby(merged, key=itemgetter(0)):
            found = list(rows)
            count = sum(row[3] for row in found)
            if count >= minimum:
                _, run, place, _ = found[0]  # the earliest run has its first appearance
                kept.append((run, place, word, count))
        return {word: count for _, _, word, count in sorted(kept)}


def _rows(path: Path, run: int) -> Iterator[tuple[str, int, int, int]]:
    with path.open(encoding="utf-8", newline="\n") as file:
        for line in file:
            word, place, count = line.rstrip("\n").split("\t")
            yield word, run, int(place), int(count)
