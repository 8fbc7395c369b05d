"""Runs the experiments of plan.toml on a machine that is available for a limited time.

    python benchmarks/plan.py                                                    # the plan as a table
    python benchmarks/plan.py NAME... --print --runs RUNS --source DATA          # the commands of these runs
    python benchmarks/plan.py NAME... --runs RUNS --source DATA --limit 580 --pack OUT
    python benchmarks/plan.py --runs RUNS --pack OUT                             # only packs the results

A run is a list of steps: shell commands, or lists of commands that run side by side. DATA has the packed texts, RUNS
gets everything else. A command that ended well is not repeated. Shortly before --limit seconds, those under way get
SIGTERM, on which training saves its state, and the next call continues with them. A command that fails ends its run,
and the next run starts. --pack writes OUT/results.tar.gz: logs, metrics, tables, figures and cards, without model
folders; and what is in RUNS/weights. Archives of more than 15 MB are written in parts.
"""

import argparse
import io
import os
import re
import signal
import string
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

from cards import SHA, usage_errors

from longspan.checkpoints.manifest import MANIFEST
from longspan.config import build, read_toml
from longspan.errors import ConfigError
from longspan.experiments.side_by_side import last_line

HERE = Path(__file__).parent
INFINITE = float("inf")
PAUSE = 0.1  # seconds between two looks at a process
STOPPED = threading.Event()  # by Ctrl-C or SIGTERM
PART = 15 * 10**6
LARGEST = 40 * 10**6  # bytes of a packed result: the metrics of 116,200 steps have 28 MB. Larger files are texts
LETTERS = string.ascii_lowercase
RESULTS = (".json", ".jsonl", ".csv", ".toml", ".md", ".svg", ".png", ".log", ".txt", ".html")


@dataclass(frozen=True)
class Run:
    name: str
    minutes: int
    answers: str
    results: str
    steps: tuple[str | tuple[str, ...], ...]
    texts: tuple[str, ...] = ()

    def commands(self, sources: dict[str, str], values: dict[str, str]) -> Iterator[dict[str, str]]:
        """The commands of each step by name, the installation of the texts first. `values` replace {runs} and so on."""

        def filled(line: str) -> str:
            return re.sub(r"\{(\w+)\}", lambda match: values.get(match[1], match[0]), line)

        for text in self.texts:
            yield {f"text-{text}": filled(f"longspan data get {text} --from {{source}}/{sources[text]}")}
        for number, step in enumerate(self.steps, 1):
            if isinstance(step, str):
                yield {f"{self.name}-{number}": filled(step)}
            else:
                yield {
                    f"{self.name}-{number}{letter}": filled(line) for letter, line in zip(LETTERS, step, strict=False)
                }


@dataclass(frozen=True)
class Plan:
    """The contents of plan.toml."""

    run: tuple[Run, ...]
    texts: dict[str, str]


def read_plan(path: Path = HERE / "plan.toml") -> tuple[dict[str, Run], dict[str, str]]:
    """The runs by name, and the packed file of each text."""
    plan = build(Plan, read_toml(path))
    for run in plan.run:
        if unknown := [text for text in run.texts if text not in plan.texts]:
            raise ConfigError(f"the run {run.name} needs the text {unknown[0]}, which is not in [texts]; add its file")
        for number, step in enumerate(run.steps, 1):
            if isinstance(step, tuple) and not 1 <= len(step) <= len(LETTERS):
                raise ConfigError(
                    f"step {number} of the run {run.name} has {len(step)} commands; 1 to {len(LETTERS)} can run side "
                    "by side, so use several steps"
                )
    return {run.name: run for run in plan.run}, plan.texts


def table(runs: dict[str, Run]) -> str:
    lines = ["| run | minutes | answers | results go to |", "|---|---|---|---|"]
    lines += [f"| {run.name} | {run.minutes} | {run.answers} | {run.results} |" for run in runs.values()]
    return "\n".join(lines)


@dataclass(frozen=True)
class Call:
    """Where commands run, and until when."""

    runs: Path
    deadline: float
    grace: float


def perform(call: Call, name: str, command: str) -> str:
    """Run one command and return "done", "failed" or "cut off". Its output is appended to RUNS/logs/NAME.log."""
    start, finished, log = time.monotonic(), call.runs / "done" / name, call.runs / "logs" / f"{name}.log"
    if finished.exists():
        state = "done"
    elif STOPPED.is_set() or call.deadline - start < 2 * call.grace:
        state = "cut off"
    else:
        with log.open("ab") as output:
            state = run_command(call, command, output)
        if state == "done":
            finished.touch()
        print(f"{name:<28} {state:<8} {time.monotonic() - start:6.0f} s  {last_line(log)[:150]}", flush=True)
    return state


def run_command(call: Call, command: str, output: IO[bytes]) -> str:
    path = f"{call.runs.absolute() / 'bin'}{os.pathsep}{os.environ['PATH']}"
    process = subprocess.Popen(
        ["bash", "-c", f"set -eo pipefail; {command}"],
        stdout=output,
        stderr=subprocess.STDOUT,
        env=os.environ | {"PATH": path, "PYTHONUNBUFFERED": "1"},
        start_new_session=True,
    )
    while (code := process.poll()) is None:
        if STOPPED.wait(PAUSE) or time.monotonic() > call.deadline - call.grace:
            end_group(process, call.grace)
            return "cut off"
    return "failed" if code else "done"


def end_group(process: "subprocess.Popen[bytes]", grace: float) -> None:
    """SIGTERM for all processes of a command, and SIGKILL for those that are left after `grace` seconds."""
    end = time.monotonic() + grace
    signal_group(process.pid, signal.SIGTERM)
    while time.monotonic() < end and signal_group(process.pid, 0):
        process.poll()  # a shell that ended would otherwise count as a member
        time.sleep(PAUSE)
    signal_group(process.pid, signal.SIGKILL)
    process.wait()


def signal_group(group: int, number: int) -> bool:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True


def make_folders(runs: Path) -> None:
    """The folders of RUNS; bin has `longspan` and `python` of this interpreter, which need not be installed."""
    for name in ("bin", "done", "logs"):
        (runs / name).mkdir(parents=True, exist_ok=True)
    for name, start in (("python", ""), ("longspan", "-m longspan ")):
        script = runs / "bin" / name
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" {start}"$@"\n', encoding="utf-8")
        script.chmod(0o755)


def pack(runs: Path, out: Path) -> None:
    """Write the results below RUNS to one archive, and RUNS/weights to another."""
    out.mkdir(parents=True, exist_ok=True)
    weights, packed = runs / "weights", io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=4) as archive:  # 9 takes 30 s
        for path in sorted(runs.rglob("*")):
            if is_result(path) and not path.is_relative_to(weights):
                if path.stat().st_size <= LARGEST:
                    archive.add(path, path.relative_to(runs))
                else:
                    print(f"not packed: {path}, {path.stat().st_size:,} bytes", flush=True)
    write_parts(out, "results.tar.gz", packed.getvalue())
    if weights.is_dir():
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            archive.add(weights, "weights")
        write_parts(out, "weights.tar", packed.getvalue())


def is_result(path: Path) -> bool:
    """Whether a file is a result. Those in a model folder are not: each has a copy of the tokenizer, and 72 model
    folders of a transfer run would not fit into one part."""
    wanted = path.suffix in RESULTS or path.match("losses-*.npz")
    return wanted and path.is_file() and not (path.parent / MANIFEST).exists()


def write_parts(out: Path, name: str, content: bytes) -> None:
    """Write an archive as NAME, or as NAME.00, NAME.01, ... if it is larger than a part."""
    for path in (out / name, *out.glob(f"{name}.[0-9][0-9]")):
        path.unlink(missing_ok=True)  # of an earlier call
    if len(content) <= PART:
        (out / name).write_bytes(content)
        return
    for number, start in enumerate(range(0, len(content), PART)):
        (out / f"{name}.{number:02}").write_bytes(content[start : start + PART])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="runs of plan.toml, in the order to run them")
    parser.add_argument("--plan", type=Path, default=HERE / "plan.toml", help="default: plan.toml beside this file")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder for runs, logs and results")
    parser.add_argument("--source", type=Path, default=Path("data"), help="folder of the packed texts")
    parser.add_argument("--commit", default="unknown", help="the commit of this code, for cards")
    parser.add_argument("--limit", type=float, default=INFINITE, help="seconds of this call; default: none")
    parser.add_argument("--grace", type=float, default=25.0, help="of these, seconds to save the state; default: 25")
    parser.add_argument("--pack", type=Path, help="also write the results to archives in this folder")
    parser.add_argument("--print", action="store_true", dest="only_print", help="print the commands and run nothing")
    asked = parser.parse_args(arguments)
    if not asked.limit > 0 or not asked.grace >= 0:
        parser.error(f"--limit {asked.limit:g} must be above 0, and --grace {asked.grace:g} at least 0")
    deadline = time.monotonic() + asked.limit
    with usage_errors(parser):
        plan, sources = read_plan(asked.plan)
    if unknown := [name for name in asked.names if name not in plan]:
        parser.error(f"no run is called {unknown[0]}; runs: {', '.join(plan)}")
    if not asked.names and not asked.pack:
        print(table(plan))
        return 0
    values = {"runs": str(asked.runs), "source": str(asked.source), "commit": asked.commit}
    steps = {name: list(plan[name].commands(sources, values)) for name in asked.names}
    if asked.only_print:
        print("\n".join(line for run in steps.values() for step in run for line in step.values()))
        return 0
    if any("{commit}" in str(plan[name].steps) for name in asked.names) and not SHA.fullmatch(asked.commit):
        parser.error(f"--commit {asked.commit} is not a full SHA, which cards need; use that of git rev-parse HEAD")
    make_folders(asked.runs)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: STOPPED.set())
    call = Call(asked.runs, deadline, asked.grace)
    states = [perform_run(call, run) for run in steps.values()]
    if asked.pack:
        pack(asked.runs, asked.pack)
    return 1 if "failed" in states else 0


def perform_run(call: Call, steps: list[dict[str, str]]) -> str:
    for step in steps:
        with ThreadPoolExecutor(len(step)) as threads:
            states = list(threads.map(partial(perform, call), step, step.values()))
        if set(states) != {"done"}:
            return "failed" if "failed" in states else "cut off"
    return "done"


if __name__ == "__main__":
    sys.exit(main())
