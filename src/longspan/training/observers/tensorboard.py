"""Writes TensorBoard events, if tensorboard is installed."""

import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from longspan.training.ledger import Row
from longspan.training.loop import Trainer
from longspan.training.observer import Observer, Validation
from longspan.training.observers.metrics import write_errors


class TensorBoard(Observer):
    """The same metrics as curves. A resume writes a START event, so that TensorBoard drops the steps after its
    checkpoint.

    Events are written at once. torch's SummaryWriter uses a thread that delays events by minutes, loses them when the
    process is killed, and fails on a full disk with a traceback.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "tensorboard"
        self.path = self.folder
        self.file: IO[bytes] | None = None
        self.records: Any = None
        self.event: Any = None

    def begin(self, trainer: Trainer) -> None:
        try:
            from tensorboard.compat.proto.event_pb2 import Event
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ImportError:
            return
        self.event = Event
        with write_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            resumes = any(self.folder.iterdir())
            # TensorBoard reads the files in the order of their names.
            self.path = self.folder / f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
            self.file = self.path.open("xb")
        self.records = RecordWriter(self.file)
        self._write(file_version="brain.Event:2")
        if resumes:
            self._write(step=trainer.step + 1, session_log={"status": "START"})

    def row(self, trainer: Trainer, row: Row) -> None:
        scalars = {name: getattr(row, name) for name in ("loss", "bits", "lr", "grad_norm", "tokens_per_second")}
        self._scalars(row.step, "training", scalars)

    def validated(self, trainer: Trainer, validation: Validation) -> None:
        self._scalars(validation.step, "validation", {"loss": validation.nats, "bits": validation.bits})

    def settle(self) -> None:
        if self.file is not None:
            with write_errors(self.path):
                os.fsync(self.file.fileno())

    def end(self, trainer: Trainer) -> None:
        if self.file is not None:
            with suppress(OSError):
                self.file.close()

    def _scalars(self, step: int, group: str, scalars: dict[str, float]) -> None:
        values = [{"tag": f"{group}/{name}", "simple_value": value} for name, value in scalars.items()]
        self._write(step=step, summary={"value": values})

    def _write(self, **fields: Any) -> None:
        if self.file is not None:
            with write_errors(self.path):
                self.records.write(self.event(wall_time=time.time(), **fields).SerializeToString())
                self.file.flush()
