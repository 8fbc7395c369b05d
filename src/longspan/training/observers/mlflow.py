"""Sends the metrics to MLflow: `longspan train --track mlflow`."""

import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from longspan import config
from longspan.errors import ConfigError
from longspan.training.ledger import Row
from longspan.training.loop import Trainer
from longspan.training.observer import Observer, Validation
from longspan.training.observers.metrics import write_errors
from longspan.training.observers.trackers import tracker_errors, tracker_warnings

RUN = "mlflow_run.txt"


class MLflow(Observer):
    """The metrics as curves. A resumed run continues the same MLflow run: its id is in the folder of the run.

    MLFLOW_TRACKING_URI names the server, MLFLOW_EXPERIMENT_NAME the experiment (default: longspan). Without a server,
    everything is written to `mlruns` in the folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.client: Any = None
        self.run = self.place = ""
        try:
            import mlflow
        except ImportError:
            raise ConfigError(
                "--track mlflow needs the package mlflow-skinny; install it with: pip install 'longspan[mlflow]'"
            ) from None
        self.mlflow: Any = mlflow

    def begin(self, trainer: Trainer) -> None:
        place = os.environ.get("MLFLOW_TRACKING_URI")
        if place is None:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # a store of files is enough for one run
            place = (self.folder / "mlruns").resolve().as_uri()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "longspan")
        known = self.folder / RUN
        self.place = place
        with self._errors():
            self.client = self.mlflow.MlflowClient(tracking_uri=place)
            if known.is_file():
                self.run = known.read_text(encoding="utf-8").strip()
                self.client.update_run(self.run, status="RUNNING")
                return
            found = self.client.get_experiment_by_name(name)
            experiment = found.experiment_id if found else self.client.create_experiment(name)
            self.run = self.client.create_run(experiment, run_name=self.folder.name).info.run_id
            parameters = [self.mlflow.entities.Param(k, str(v)[:500]) for k, v in _parameters(trainer).items()]
            self.client.log_batch(self.run, params=parameters)
        with write_errors(known):
            known.write_text(self.run, encoding="utf-8")

    def row(self, trainer: Trainer, row: Row) -> None:
        names = ("loss", "bits", "lr", "grad_norm", "tokens_per_second")
        self._log("training", row.step, {name: getattr(row, name) for name in names})

    def validated(self, trainer: Trainer, validation: Validation) -> None:
        self._log("validation", validation.step, {"loss": validation.nats, "bits": validation.bits})

    def end(self, trainer: Trainer) -> None:
        if self.run:
            done = trainer.finished or trainer.interrupted
            with tracker_warnings(f"MLflow at {self.place}"):
                self.client.set_terminated(self.run, status="FINISHED" if done else "FAILED")

    def _errors(self) -> AbstractContextManager[None]:
        return tracker_errors(f"MLflow at {self.place}", "check MLFLOW_TRACKING_URI")

    def _log(self, group: str, step: int, values: dict[str, float]) -> None:
        metric, now = self.mlflow.entities.Metric, self.mlflow.utils.time.get_current_time_millis()
        metrics = [metric(f"{group}/{name}", float(value), now, step) for name, value in values.items()]
        with self._errors():
            self.client.log_batch(self.run, metrics=metrics)


def _parameters(trainer: Trainer) -> dict[str, Any]:
    recipe = trainer.recipe
    values = {"recipe": recipe.name, "family": recipe.family, "parameters": trainer.model.parameter_count}
    for table in ("model", "training"):
        values |= {f"{table}.{key}": value for key, value in config.plain(getattr(recipe, table)).items()}
    return values
