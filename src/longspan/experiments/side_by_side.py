"""Several commands at the same time, at most so many at once: small models leave most of a GPU idle."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from longspan.errors import ConfigError

Log = Callable[[str], None]
PAUSE = 0.05  # seconds between two looks at the processes


def run_side_by_side(
    commands: Mapping[str, Sequence[str]],
    at_once: int,
    folder: Path,
    log: Log = lambda _: None,
    environment: Mapping[str, str] | None = None,
) -> dict[str, int]:
    """Run named commands, `at_once` at a time, and return their exit codes. The output of each goes to FOLDER/NAME.log.

    `environment` has variables that are added to those of this process.

    Commands start in the given order, so put the longest first. An exception, such as Ctrl-C, stops all of them with
    SIGTERM, and waits until they have saved their work.
    """
    if at_once < 1:
        raise ConfigError(f"at_once={at_once} must be at least 1")
    folder.mkdir(parents=True, exist_ok=True)
    waiting, codes = dict(commands), dict[str, int]()
    options: dict[str, Any] = {"env": os.environ | dict(environment or {}), "stderr": subprocess.STDOUT}
    with _running() as running:
        while waiting or running:
            while waiting and len(running) < at_once:
                name = next(iter(waiting))
                log(f"starting {name} ({len(codes) + len(running) + 1} of {len(commands)})")
                with (folder / f"{name}.log").open("wb") as output:
                    running[name] = subprocess.Popen(waiting.pop(name), stdout=output, **options)
            for name, process in list(running.items()):
                if (code := process.poll()) is not None:
                    codes[name] = code
                    del running[name]
                    if code:
                        log(f"{name} ended with exit code {code}: {last_line(folder / f'{name}.log')}")
            time.sleep(PAUSE)
    return {name: codes[name] for name in commands}


def run_command(command: Sequence[str], **options: Any) -> int:
    """The exit code of a command. After Ctrl-C or a SIGTERM it gets a SIGTERM and the time to save its work;
    `subprocess.run` would kill it."""
    with _running() as running:
        running["command"] = process = subprocess.Popen(command, **options)
        return process.wait()


@contextmanager
def _running() -> Iterator[dict[str, "subprocess.Popen[bytes]"]]:
    """The processes that run now. Those that are left at the end of the block are stopped, also after a SIGTERM."""
    processes: dict[str, subprocess.Popen[bytes]] = {}
    in_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, _interrupt) if in_main else None
    try:
        yield processes
    finally:
        if in_main:
            signal.signal(signal.SIGTERM, before)
        for process in processes.values():
            process.terminate()
        for process in processes.values():
            process.wait()


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def last_line(path: Path) -> str:
    """The last line of a file that is not empty, at most 300 characters: usually the error."""
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "no output")
