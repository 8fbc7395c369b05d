"""Open a task: a known one, or a folder with train, dev and test as .jsonl or .csv."""

import csv
import hashlib
import io
import json
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from longspan import config
from longspan.errors import ConfigError, DataError, DataWarning, counted, not_read
from longspan.transfer.tasks.known import KNOWN, find_known
from longspan.transfer.tasks.packed import install, parse_rows, read_rows
from longspan.transfer.tasks.task import Example, Task, recognise

NAMES = {"train": ("train",), "dev": ("dev", "valid", "validation"), "test": ("test",)}
LONGEST_FIELD = 2**30
"""Characters of a field of a table. Python's default of 131,072 is less than a long document."""
HELD_OUT = 10
"""One of this many training examples is a dev example if there is no dev file."""


@dataclass(frozen=True)
class TaskData:
    """A task and its examples. A split is read when it is asked for, so that nothing reads test by accident."""

    task: Task
    files: dict[str, Path]

    @property
    def held_out(self) -> bool:
        """Whether dev is a part of the training file."""
        return "dev" not in self.files

    @property
    def has_test(self) -> bool:
        return "test" in self.files

    @cached_property
    def train(self) -> list[Example]:
        found = [example for k, example in enumerate(self._all_train) if k not in self._held_out]
        if not found:
            raise DataError(f"{self.files['train']} has 1 row; a task without a dev file needs at least 2")
        return found

    @cached_property
    def dev(self) -> list[Example]:
        if self.held_out:
            return [self._all_train[k] for k in sorted(self._held_out)]
        return self._read("dev")

    def test(self) -> list[Example]:
        """The test examples, with labels or all without. Read them once, after every choice is made."""
        return self._read("test")

    def check_held_out(self, labels: Sequence[str] = ()) -> dict[str, list[Example]]:
        """Refuse dev and test rows that cannot be read or scored, before training. `labels` are the classes of
        training. Returns the rows of both, for further checks only."""
        found = {split: self._read(split) for split in ("dev", "test") if split in self.files}
        for split, examples in found.items():
            for row, example in enumerate(examples, start=1):
                if (unseen := example.unseen(labels)) is not None:
                    fix = "leave out all labels to get predictions" if split == "test" else "add such rows to train"
                    raise DataError(
                        f"{self.files[split].name}, row {row} has the label {unseen!r:.40}, but train has only "
                        f"{', '.join(map(repr, labels)):.200}; use one of those, or {fix}"
                    )
        if self.held_out:
            self._warn_of_unseen(labels)
        return {"dev": self.dev} | found

    def _warn_of_unseen(self, labels: Sequence[str]) -> None:
        """Warn of held-out rows whose label no other row has."""
        held_out = zip(sorted(self._held_out), self.dev, strict=True)
        found = [(k, unseen) for k, example in held_out if (unseen := example.unseen(labels)) is not None]
        if found:
            k, unseen = found[0]
            warnings.warn(
                f"the labels of {counted(len(found), 'row')} held out of {self.files['train'].name} as dev occur in no "
                f"other row and cannot be predicted, for example {unseen!r:.40} in row {k + 1}; "
                "add such rows, or a dev file",
                DataWarning,
                stacklevel=3,
            )

    @cached_property
    def _all_train(self) -> list[Example]:
        return self._read("train")

    @cached_property
    def _held_out(self) -> frozenset[int]:
        """The held-out rows: the same for every seed and model, chosen by a fixed permutation."""
        if not self.held_out:
            return frozenset()
        count = len(self._all_train)
        return frozenset(np.random.default_rng(0).permutation(count)[: max(1, count // HELD_OUT)].tolist())

    def _read(self, split: str) -> list[Example]:
        if split not in self.files:
            raise DataError(f"the task {self.task.name} has no {split} file; it has {', '.join(self.files)}")
        path = self.files[split]
        rows = enumerate(rows_of(path), start=1)
        labelled = split != "test"
        found = [self.task.example(row, f"{path.name}, row {k}", labelled=labelled) for k, row in rows]
        if not found:
            raise DataError(f"{path} has no rows; add at least one")
        known = [example.label is not None for example in found]
        if any(known) and not all(known):
            raise DataError(
                f"{path.name}, row {known.index(False) + 1} has no {self.task.label!r}, but other rows have one; "
                "add it, or remove the others"
            )
        return found

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the task and of its training examples: a run is resumed on the same ones only."""
        return self._digest(self.train)

    @cached_property
    def dev_fingerprint(self) -> str:
        """The same of the dev examples, whose scores a run compares."""
        return self._digest(self.dev)

    def _digest(self, examples: Sequence[Example]) -> str:
        digest = hashlib.sha256(json.dumps(config.plain(self.task), sort_keys=True).encode())
        for example in examples:
            digest.update(json.dumps([example.texts, example.label]).encode())
        return digest.hexdigest()


def open_task(name_or_folder: str | Path, source: str | Path | None = None, cache: Path | None = None) -> TaskData:
    """The data of a task: a known name, installed from `source` if it is not in the cache, or a folder."""
    text = str(name_or_folder)
    if text in KNOWN:
        known = find_known(text)
        if not known.trainable:
            raise ConfigError(f"{text} is scored by likelihood and not trained; use longspan evaluate-tasks")
        return _open(text, install(text, source, cache), dict(known.given))
    folder = Path(text)
    if not folder.is_dir():
        find_known(text)  # raises an error with the known names
    given = config.read_toml(folder / "task.toml") if (folder / "task.toml").is_file() else {}
    return _open(folder.resolve().name, folder, given)


def _open(name: str, folder: Path, given: dict[str, Any]) -> TaskData:
    files: dict[str, Path] = {}
    for split, stems in NAMES.items():
        found = [folder / f"{stem}{end}" for stem in stems for end in (".jsonl", ".csv")]
        if paths := [path for path in found if path.is_file()]:
            files[split] = paths[0]
        if len(paths) > 1:
            raise DataError(f"{folder} has {paths[0].name} and {paths[1].name}; keep one of them")
    if "train" not in files:
        raise DataError(f"{folder} has no train.jsonl or train.csv; a task needs one, and may have dev and test")
    first = next(rows_of(files["train"]), None)
    if first is None:
        raise DataError(f"{files['train']} has no rows; add at least one")
    return TaskData(recognise(name, first, given, files["train"]), files)


def rows_of(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a .jsonl or .csv file."""
    try:
        if path.suffix == ".csv":
            with path.open(encoding="utf-8-sig", newline="") as file:
                yield from csv_rows(file, path.name)
        else:
            yield from read_rows(path)
    except OSError as error:
        raise not_read(path, error) from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path} cannot be read: {error!s:.80}; save it as UTF-8") from None


def rows_of_input() -> Iterator[dict[str, Any]]:
    """The rows of standard input: JSON lines if it begins with a brace, else a table."""
    if sys.stdin is None:
        raise DataError("standard input is closed; pass a file with --data FILE")
    try:
        text = sys.stdin.buffer.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"standard input cannot be read: {error!s:.80}; use UTF-8") from None
    file = io.StringIO(text, newline="")
    yield from (parse_rows if text.lstrip().startswith("{") else csv_rows)(file, "standard input")


@contextmanager
def _long_fields() -> Iterator[None]:
    """Fields of up to LONGEST_FIELD characters. The limit is that of the process, so it is restored after each row."""
    before = csv.field_size_limit(LONGEST_FIELD)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _rows(reader: "csv.DictReader[str]") -> Iterator[dict[Any, Any]]:
    while True:
        with _long_fields():
            row = next(reader, None)
        if row is None:
            return
        yield row


def csv_rows(file: Iterable[str], name: str) -> Iterator[dict[str, Any]]:
    """The rows of a table whose first line names its columns."""
    reader = csv.DictReader(file, strict=True)  # not strict, an open quote makes one text of all later rows
    try:
        with _long_fields():
            columns = list(reader.fieldnames or [])
        if repeated := [column for k, column in enumerate(columns) if column in columns[:k]]:
            raise DataError(f"{name} has two columns called {repeated[0]!r:.40}; rename one")
        if len(columns) == 1 and any(sign in columns[0] for sign in ";\t"):
            raise DataError(f"{name} has one column, {columns[0]!r:.40}; separate columns with commas")
        for number, row in enumerate(_rows(reader), start=1):
            if None in row:
                count = len(columns) + len(row[None])
                fields = f"{counted(count, 'field')} and {counted(len(columns), 'column')}"
                raise DataError(f"{name}, row {number}, has {fields}; put texts with commas in quotes")
            yield row
    except csv.Error as error:
        raise DataError(
            f"{name} is not a table ({error!s:.80}, up to line {reader.reader.line_num}); separate fields with commas, "
            "put texts that contain commas or quotes in quotes, and double the quotes inside"
        ) from None
