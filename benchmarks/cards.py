"""What the makers of cards share: every figure is what the command beside it prints, run on the spot."""

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

from longspan.cli.main import run
from longspan.errors import LongspanError


def longspan(*args: object) -> str:
    """What a verb prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = run([str(arg) for arg in args])
    if code:
        sys.exit(code)
    return out.getvalue()


def scored(command: str, model: Path, device: str) -> dict[str, Any]:
    """What a line of a card, `longspan eval` without its model, comes to on this one."""
    _, verb, *rest = shlex.split(command)
    print(f"{command} ...", file=sys.stderr, flush=True)
    return dict(json.loads(longspan(verb, model, *rest, "--device", device, "--json")))


def read_as(memory: int, clamp: int, known: Collection[str] = ("memory", "clamp", "same_length")) -> str:
    """The flags of a reading, of those keys that a family has."""
    flags = {"memory": f"--memory {memory}", "clamp": f"--clamp {clamp}", "same_length": "--same-length"}
    return " ".join(flag for key, flag in flags.items() if key in known)


def ways(memories: Iterable[int], seen: int | None) -> list[tuple[int, int]]:
    """Memories and clamps to choose among: distances that training never showed may better look like the longest that
    it did, and are met where a memory is longer; `seen` is None for a family that has no clamp."""
    return [(memory, clamp) for memory in memories for clamp in ([0, seen] if seen and memory > seen else [0])]


def commit_of(about: dict[str, Any], given: str | None, parser: ArgumentParser) -> str:
    """The whole commit that trained a run, as it knows it or as it is given."""
    commit = given or about["processes"][-1]["commit"] or ""
    if not re.fullmatch("[0-9a-f]{40}", commit):
        parser.error(f"the run names {commit} as the commit it was trained at; give a whole one with --commit")
    return commit


def training_command(words: list[str]) -> str:
    """The command of a run, without the places it had on its machine."""
    places = {"--out": lambda _: "RUN", "--recipe": lambda word: Path(word).stem}
    both = zip(["", *words], words, strict=False)
    return shlex.join([places.get(before, str)(word) for before, word in both])


@contextlib.contextmanager
def longspan_errors(parser: ArgumentParser) -> Iterator[None]:
    """What a user can do something about ends in one sentence."""
    try:
        yield
    except (LongspanError, OSError) as error:
        parser.error(str(error))
