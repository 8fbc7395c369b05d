"""metrics.jsonl: one line per step, each step once."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from longspan.checkpoints.store import write_file
from longspan.errors import TrainingError
from longspan.training.ledger import Row
from longspan.training.loop import Trainer
from longspan.training.observer import Observer, Validation


class Metrics(Observer):
    """Appends as steps come in; what a resume takes back (steps after its checkpoint) is cut off first.

    Scores on held-out text go to validation.jsonl in the same way.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: dict[str, IO[str]] = {}

    def begin(self, trainer: Trainer) -> None:
        for name in ("metrics.jsonl", "validation.jsonl"):
            cut_after(self.folder / name, trainer.step)
            with told(self.folder / name):
                self.files[name] = (self.folder / name).open("a", encoding="utf-8")

    def row(self, trainer: Trainer, row: Row) -> None:
        # Few rows are skipped: the others need not say so.
        self._write("metrics.jsonl", {key: value for key, value in asdict(row).items() if value or key != "skipped"})

    def validated(self, trainer: Trainer, validation: Validation) -> None:
        self._write("validation.jsonl", asdict(validation) | {"bits": validation.bits})

    def settle(self) -> None:
        for name, file in self.files.items():
            with told(self.folder / name):
                file.flush()
                os.fsync(file.fileno())

    def end(self, trainer: Trainer) -> None:
        for file in self.files.values():
            with suppress(OSError):
                file.close()

    def _write(self, name: str, values: dict[str, object]) -> None:
        with told(self.folder / name):
            self.files[name].write(json.dumps(values) + "\n")
            self.files[name].flush()


@contextmanager
def told(path: Path) -> Iterator[None]:
    """A disk that cannot be written to ends the run in one sentence."""
    try:
        yield
    except OSError as error:
        way = "the last checkpoint is whole, so make room, then --resume auto"
        raise TrainingError(f"{path} could not be written: {error.strerror}; {way}") from None


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file of metrics; one that a crash cut short is left out."""
    if not path.exists():
        return []
    lines = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(ValueError):
            values = json.loads(line)
            if isinstance(values, dict) and isinstance(values.get("step"), int):
                lines.append(values)
    return lines


def cut_after(path: Path, step: int) -> None:
    """Leave only the lines up to `step`, each step once."""
    if not path.exists():
        return
    kept = {line["step"]: line for line in read_lines(path) if line["step"] <= step}
    content = "".join(json.dumps(kept[s]) + "\n" for s in sorted(kept)).encode()
    if content != path.read_bytes():
        write_file(path, content)
