"""The trackers that `longspan train --track` knows. Each is an optional package."""

import importlib
from collections.abc import Sequence
from pathlib import Path

from longspan.errors import UnknownNameError
from longspan.training.observer import Observer

TRACKERS = {
    "wandb": "longspan.training.observers.wandb:WandB",
    "mlflow": "longspan.training.observers.mlflow:MLflow",
}


def make_tracker(name: str, folder: Path) -> Observer:
    """The observer that sends the metrics of the run in `folder` to a tracker."""
    if name not in TRACKERS:
        raise UnknownNameError("tracker", name, TRACKERS)
    module, _, attribute = TRACKERS[name].partition(":")
    made: Observer = getattr(importlib.import_module(module), attribute)(folder)
    return made


def check_trackers(names: Sequence[str]) -> None:
    """Raise an error before anything is read or written if a tracker does not exist or is not installed."""
    for name in names:
        make_tracker(name, Path())
