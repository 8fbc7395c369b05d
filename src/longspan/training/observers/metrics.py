"""Writes metrics.jsonl and validation.jsonl: one line per step or validation."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from longspan.checkpoints.store import write_file
from longspan.config import finite
from longspan.errors import TrainingError
from longspan.training.ledger import Row
from longspan.training.loop import Trainer
from longspan.training.observer import Observer, Validation


class Metrics(Observer):
    """Appends a line per step to metrics.jsonl and a line per validation to validation.jsonl.

    A resume first removes the lines after its checkpoint, so that each step occurs once.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: dict[str, IO[str]] = {}

    def begin(self, trainer: Trainer) -> None:
        for name in ("metrics.jsonl", "validation.jsonl"):
            truncate_after(self.folder / name, trainer.step)
            with write_errors(self.folder / name):
                self.files[name] = (self.folder / name).open("a", encoding="utf-8")

    def row(self, trainer: Trainer, row: Row) -> None:
        # Most steps are not skipped, and most CPUs have no known peak, so these keys are written only where they say
        # something.
        rare = ("skipped", "mfu", "memory_gib")
        self._write("metrics.jsonl", {key: value for key, value in asdict(row).items() if value or key not in rare})

    def validated(self, trainer: Trainer, validation: Validation) -> None:
        values = {key: value for key, value in asdict(validation).items() if value is not None}
        self._write("validation.jsonl", values | {"bits": validation.bits})

    def settle(self) -> None:
        for name, file in self.files.items():
            with write_errors(self.folder / name):
                file.flush()
                os.fsync(file.fileno())

    def end(self, trainer: Trainer) -> None:
        for file in self.files.values():
            with suppress(OSError):
                file.close()

    def _write(self, name: str, values: dict[str, Any]) -> None:
        with write_errors(self.folder / name):
            self.files[name].write(_line(values))
            self.files[name].flush()


def _line(values: dict[str, Any]) -> str:
    """Numbers that are not finite are null: most programs cannot read the Infinity and NaN of Python."""
    return json.dumps(finite(values), allow_nan=False) + "\n"


@contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Turns an error of the file system into a TrainingError."""
    try:
        yield
    except OSError as error:
        fix = "fix that and resume the run"
        raise TrainingError(f"{path} cannot be written: {error.strerror}; {fix}") from None


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a metrics file. A line that a crash cut short is skipped."""
    if not path.exists():
        return []
    lines = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(ValueError):
            values = json.loads(line)
            if isinstance(values, dict) and isinstance(values.get("step"), int):
                lines.append(values)
    return lines


def truncate_after(path: Path, step: int) -> None:
    """Keep only the lines up to `step`, each step once."""
    if not path.exists():
        return
    kept = {line["step"]: line for line in read_lines(path) if line["step"] <= step}
    content = "".join(_line(kept[s]) for s in sorted(kept)).encode()
    if content != path.read_bytes():
        write_file(path, content)
