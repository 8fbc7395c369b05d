"""The trackers that `longspan train --track` knows. Each is an optional package."""

import importlib
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from longspan.errors import TrainingError, UnknownNameError
from longspan.training.observer import Observer

TRACKERS = {
    "wandb": "longspan.training.observers.wandb:WandB",
    "mlflow": "longspan.training.observers.mlflow:MLflow",
}


class TrackerWarning(UserWarning):
    """A tracker may not have everything, and the run goes on."""


@contextmanager
def tracker_errors(name: str, fix: str) -> Iterator[None]:
    """Turns any error of a tracker's package into a TrainingError. Not all classes of these errors are documented."""
    try:
        yield
    except Exception as error:
        raise TrainingError(f"{name} cannot be used: {_reason(error)}; {fix}, or leave out --track") from None


@contextmanager
def tracker_warnings(name: str) -> Iterator[None]:
    """Turns an error at the end of a run into a warning, which does not replace the error that ended the run."""
    try:
        yield
    except Exception as error:
        warnings.warn(f"the run could not be closed at {name}: {_reason(error)}", TrackerWarning, stacklevel=3)


def _reason(error: Exception) -> str:
    return str(error)[:200] or type(error).__name__


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
