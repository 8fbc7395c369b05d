"""What the card generators share. Every result on a card is the output of the command next to it, which is run here."""

import contextlib
import io
import json
import re
import shlex
import sys
from argparse import ArgumentParser
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from longspan.checkpoints.store import write_file
from longspan.cli.main import run
from longspan.device import find_device
from longspan.errors import LongspanError
from longspan.training.environment import hardware

SHA = re.compile("[0-9a-f]{40}")


def output_of(*args: object) -> str:
    """The standard output of a `longspan` command."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = run([str(arg) for arg in args])
    if code:
        sys.exit(code)
    return out.getvalue()


def evaluate(command: str, model: Path, device: str) -> dict[str, Any]:
    """The JSON output of a card's `longspan eval` command, which names no model or MODEL, for this model."""
    _, verb, *rest = shlex.split(command.replace(" MODEL", "", 1))
    print(f"{command} ...", file=sys.stderr, flush=True)
    return dict(json.loads(output_of(verb, model, *rest, "--device", device, "--json")))


class Scores:
    """Runs `longspan eval` commands of a card. Results are kept in a JSON file, so that a second call runs only missing
    ones; results of other weights or another device are dropped."""

    def __init__(self, path: Path, model: Path, weights: str, device: str, **about: Any) -> None:
        self.path, self.model, self.device = path, model, device
        measured = {"model": weights, "device": hardware(find_device(device))}
        before = json.loads(path.read_bytes()) if path.is_file() else {}
        same = all(before.get(key) == value for key, value in measured.items())
        self.found = measured | about | {"scores": before["scores"] if same else {}}

    def __call__(self, command: str) -> dict[str, Any]:
        scores = self.found["scores"]
        if command not in scores:
            scores[command] = evaluate(command, self.model, self.device)
            self.save()
        return dict(scores[command])

    def save(self, **more: Any) -> None:
        self.found |= more
        write_file(self.path, (json.dumps(self.found, indent=1) + "\n").encode())


def reading_flags(
    memory: int,
    clamp: int,
    settings: Collection[str] = ("memory", "clamp", "same_length"),
    discount: float | None = None,
) -> str:
    """The flags of a reading, for the settings that a family uses; no flag for a discount of None."""
    same = "--same-length" if memory else "--no-same-length"
    flags = {"memory": f"--memory {memory}", "clamp": f"--clamp {clamp}", "same_length": same}
    flags |= {} if discount is None else {"discount": f"--discount {discount:g}"}
    return " ".join(flag for key, flag in flags.items() if key in settings)


def memories_and_clamps(memories: Iterable[int], longest: int | None) -> list[tuple[int, int]]:
    """The candidates to choose from.

    A memory beyond the `longest` distance of training is tried without a clamp and clamped to that distance. `longest`
    is None for a family without a clamp.
    """
    return [
        (memory, clamp)
        for memory in memories
        for clamp in ([0, longest] if longest and is_beyond(memory, longest) else [0])
    ]


def is_beyond(memory: int, distance: int) -> bool:
    """Whether a memory has keys beyond a distance. Cards use same_length: the distances are 0 to memory - 1."""
    return memory - 1 > distance


def training_commit(about: dict[str, Any], given: str | None, parser: ArgumentParser) -> str:
    """The full commit that trained a run: the given one, or the one in its run.json."""
    commit = given or about["processes"][-1]["commit"] or ""
    if not SHA.fullmatch(commit):
        parser.error(f"the training commit {commit!r} is not a full SHA of a clean checkout; give one with --commit")
    return commit


@contextlib.contextmanager
def usage_errors(parser: ArgumentParser) -> Iterator[None]:
    """Report errors that a user can fix in one sentence, as argparse does."""
    try:
        yield
    except (LongspanError, OSError) as error:
        parser.error(str(error))
