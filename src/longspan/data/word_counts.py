"""WordCounts: exact counts of words in bounded memory."""

import heapq
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from types import TracebackType

MOST = 1 << 20


class WordCounts:
    """Adds counts in the order of a text. More than `most` different words are written to a temporary folder, sorted.

    The words of the text are in memory together only if `frequent` keeps them all.
    """

    def __init__(self, most: int = MOST) -> None:
        self.most = most
        self.counts: Counter[str] = Counter()
        self.folder = tempfile.TemporaryDirectory(prefix="longspan-words-")
        self.runs: list[Path] = []

    def __enter__(self) -> "WordCounts":
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.folder.cleanup()

    def add(self, counts: Mapping[str, int]) -> None:
        self.counts.update(counts)
        if len(self.counts) > self.most:
            self._write_run()

    def _write_run(self) -> None:
        path = Path(self.folder.name) / str(len(self.runs))
        rows = sorted((word, place, count) for place, (word, count) in enumerate(self.counts.items()))
        with path.open("w", encoding="utf-8", newline="\n") as file:
            file.writelines(f"{word}\t{place}\t{count}\n" for word, place, count in rows)
        self.runs.append(path)
        self.counts = Counter()

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
