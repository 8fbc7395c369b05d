"""What the nodes of a run must have in common: the folder of the run, the recipe, the text and the checkpoint.

Each node reads its own files. If they differ, the processes would train different runs or wait for each other forever.
"""

import time
from pathlib import Path

from longspan import config
from longspan.checkpoints import store
from longspan.errors import CheckpointError, ConfigError, DataError, LongspanError
from longspan.training.processes import OtherProcessError, Processes
from longspan.training.recipe import Recipe
from longspan.training.resume import flat
from longspan.training.snapshot import RECIPE

PATIENCE = 10.0
"""Seconds until a new file must be visible on all nodes. Network file systems cache folders."""
# Paths may differ: nodes may have copies of a text. The text itself is compared by its fingerprint.
PLACES = {*(f"data.{key}" for key in ("corpus", "valid", "test", "tokenizer")), "training.init_from"}


def check_folder_is_shared(out: Path, processes: Processes, patience: float = PATIENCE) -> None:
    """All processes see the files of the first one in `out`. Otherwise a checkpoint would lack the parts of others."""
    if processes.size == 1:
        return
    # If this process is killed here, the next write of recipe.toml removes the file.
    mark = store.temporary_path(out / RECIPE)
    created = processes.first(lambda: _create(mark))
    name = processes.share(mark.name)
    deadline = time.monotonic() + patience
    while not (found := (out / name).exists()) and time.monotonic() < deadline:
        time.sleep(0.1)
    problem = ConfigError(
        f"{out.absolute()} on the node of process {processes.rank} is not the folder that the first process writes to; "
        "use an absolute path on a file system that all nodes share"
    )
    try:
        _raise_together(None if found else problem, processes)
    finally:
        if created is not None:
            created.unlink(missing_ok=True)


def check_recipe_is_equal(recipe: Recipe, processes: Processes) -> None:
    own = {key: value for key, value in flat(recipe).items() if key not in PLACES}
    first = processes.share(own)
    different = sorted(key for key in own.keys() | first.keys() if own.get(key) != first.get(key))
    problem = None
    if different:
        values = [config.show(values.get(different[0], "unset")) for values in (own, first)]
        problem = ConfigError(
            f"process {processes.rank} has {different[0]}={values[0]}, but the first process has {values[1]}; "
            "start all nodes with the same recipe and the same flags"
        )
    _raise_together(problem, processes)


def check_text_is_equal(name: str, fingerprint: str, processes: Processes) -> None:
    problem = None
    if processes.share(fingerprint) != fingerprint:
        problem = DataError(
            f"{name} on the node of process {processes.rank} differs from the text of the first process; "
            "copy the same text to all nodes"
        )
    _raise_together(problem, processes)


def check_step_is_equal(step: int, out: Path, processes: Processes) -> None:
    """A checkpoint that is damaged on one node only is passed over there."""
    first = processes.share(step)
    problem = None
    if first != step:
        problem = CheckpointError(
            f"process {processes.rank} continues {out} after step {step}, but the first process after step {first}; "
            "check that the files of the run are complete on all nodes"
        )
    _raise_together(problem, processes)


def _raise_together(problem: LongspanError | None, processes: Processes) -> None:
    """Raise the error of this process, or end silently if another process has one."""
    failed = processes.exchange([problem is not None]).any()
    if problem is not None:
        raise problem
    if failed:
        raise OtherProcessError("another process has an error")


def _create(path: Path) -> Path:
    try:
        path.touch(exist_ok=False)
    except OSError as error:
        raise ConfigError(f"{path.parent} cannot be written: {error.strerror}; use another folder") from None
    return path
