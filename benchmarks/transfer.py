"""Fine-tune and score pre-trained systems, several jobs at a time on one GPU. docs/transfer.md

    python benchmarks/transfer.py --models runs --source DATA --systems bert --scratch imdb --limit 300 --out DIR
    python benchmarks/transfer.py --models runs --systems bert --list             # the commands, in their order
    python benchmarks/transfer_tables.py DIR/results.json OTHER/results.json      # tables from several machines

`--models` is a folder with one run per system. A job is one seed of a row, which is one `longspan finetune` command, or
the scores of a language model without training. All jobs of the first seed come before the second, tasks with a target
first. DIR/results.json is written after every job and needs no weights. A finished job is not run again and a stopped
one resumes, so the same command continues. With `--limit` no job is started that would not finish in time, and those
that still run at the end are stopped. A job that fails is run once more without CUDA graphs. One that runs out of
memory beside others is run again later, and from then on fewer run at a time.

`--groups rates --seeds 1` tries learning rates. With `--rates` and its results, every system takes the one that was
best on dev for a task, and that run counts as the first seed. `--have` names results of other machines: complete jobs
that they have are not run again.

Where both directions of ULMFiT are finished, `ulmfit-ensemble` has the mean of their probabilities, as `longspan
predict --with` computes it. `--rows` uses a few rows of every task, to try a command.
"""

import argparse
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transfer_results import Entry, Key, Results, data_of, key_of, sample_of
from transfer_systems import (
    ESTIMATE,
    GROUPS,
    MUST,
    OTHER,
    SYSTEMS,
    ZERO_SHOT,
    Row,
    finetuning,
    likelihoods,
    rows,
    tune,
)
from transfer_tables import is_complete, merge

from longspan import config
from longspan.checkpoints.model_folder import load_model
from longspan.data.cache import write_json
from longspan.transfer.formats import Format
from longspan.transfer.likelihood import TASKS
from longspan.transfer.results import RESULT
from longspan.transfer.tasks import Example, install

GRACE = 20.0
"""Seconds before the limit at which running jobs are stopped, to save their checkpoints."""
AROUND = 40.0
"""Seconds of a job before and after its training."""


@dataclass
class Job:
    """One seed of a row, or the scores of a language model without training."""

    row: Row
    seed: int
    command: list[str]
    folder: Path
    pointer: bool = True
    process: Any = None
    started: float = 0.0
    tries: int = 0

    @property
    def key(self) -> Key:
        return self.row.title, self.row.task, self.seed, self.pointer

    @property
    def name(self) -> str:
        return f"{self.row.task} {self.row.title} seed {self.seed}" + ("" if self.pointer else " without pointer")

    def file(self, ending: str) -> Path:
        return self.folder.parent / f"{self.folder.name}.{ending}"  # `finetune` wants a folder of its own

    @property
    def finished(self) -> bool:
        return (self.folder / RESULT).exists()

    def start(self, environment: dict[str, str]) -> None:
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "longspan", *self.command]
        if self.row.task != ZERO_SHOT:
            command += ["--resume", "auto", *(["--set", "training.cuda_graph=false"] if self.tries else [])]
        self.started, self.tries = time.monotonic(), self.tries + 1
        with self.file("log").open("ab") as log, self.file("out").open("wb") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=log, env=environment)

    def end(self) -> str:
        """Called when the process has ended. Returns an error or nothing, and stores the scores of a language model."""
        if self.process.returncode:
            lines = self.file("log").read_text(errors="replace").strip().splitlines() or ["no output"]
            return lines[-1][:300]
        if self.row.task == ZERO_SHOT:
            self.folder.mkdir(exist_ok=True)
            write_json(self.folder / RESULT, json.loads(self.file("out").read_bytes()))
        return ""


def chosen_rows(given: argparse.Namespace) -> list[Row]:
    return list(rows(given.systems, given.groups, given.tasks, given.scratch))


def model_names(given: argparse.Namespace) -> list[str]:
    """The runs that the chosen rows need."""
    every = chosen_rows(given)
    found = dict.fromkeys(row.system.model for row in every if row.task != ZERO_SHOT)
    return list(found | dict.fromkeys(str(row.system.language_model) for row in every if row.task == ZERO_SHOT))


def all_jobs(given: argparse.Namespace) -> list[Job]:
    """Every job in order: one seed of all rows before the next. Rows without a run are left out."""
    found = list[Job]()
    for seed in range(1, given.seeds + 1):
        for row in chosen_rows(given):
            if row.task == ZERO_SHOT:
                found += zero_shot_jobs(row, given) if seed == 1 else []
            elif (given.models / row.system.model).is_dir():
                task = str(sample_of(row.task, given) or row.task)
                command = finetuning(row, given.models, given.out, seed, task, given.set)
                found.append(Job(row, seed, command, row.folder(given.out, seed)))
    return found


def zero_shot_jobs(row: Row, given: argparse.Namespace) -> Iterator[Job]:
    """The scores of a language model; if it has a pointer, also without."""
    model = given.models / str(row.system.language_model)
    if not model.is_dir():
        return
    for pointer in (True, False) if load_model(model).model.reading.pointer else (True,):
        command = likelihoods(model, pointer=pointer) + (["--limit", str(given.rows)] if given.rows else [])
        folder = given.out / ZERO_SHOT / row.title / ("scores" if pointer else "scores-without-pointer")
        yield Job(row, 1, command, folder, pointer)


def prepare(given: argparse.Namespace, jobs: list[Job]) -> None:
    """Install the tasks and encode IMDB once, with all cores, before the processes start."""
    for name in dict.fromkeys(job.row.task for job in jobs):
        for task in TASKS if name == ZERO_SHOT else [name]:
            install(task, given.source)
    models = dict.fromkeys(job.row.system.model for job in jobs if job.row.task == "imdb")
    for loaded in (load_model(given.models / name) for name in models):
        data = data_of("imdb", given)
        format = Format(loaded.tokenizer, data.task.kind, (), loaded.model)
        for examples in (data.train, data.dev, data.test()):
            format.encode([Example(example.texts) for example in examples])


class Estimates:
    """How long jobs take: as long as others of the row or the task, else a guess."""

    def __init__(self, settings: list[str], entries: Sequence[Entry]) -> None:
        self.seconds: dict[tuple[str, str], float] = {}
        limit = config.parse_overrides(settings).get("training", {}).get("seconds", math.inf)
        self.most = limit + AROUND
        for entry in entries:
            if entry.get("job_seconds"):
                self.add(entry["row"], entry["task"], entry["job_seconds"])

    def add(self, title: str, task: str, seconds: float) -> None:
        for key in ((title, task), ("", task)):
            self.seconds[key] = max(seconds, self.seconds.get(key, 0.0))

    def of(self, job: Job, share: float = 1.0) -> float:
        """With a `share` of the jobs that usually run at a time: training takes as long as they share the GPU."""
        keys = (job.row.title, job.row.task), ("", job.row.task)
        known = [1.1 * self.seconds[key] for key in keys if key in self.seconds]
        usual = min([*known, ESTIMATE.get(job.row.task, 50)][0], self.most)
        return min(usual, AROUND + share * max(0.0, usual - AROUND))


class Queue:
    """Runs jobs, some at a time, until a point in time. results.json is written after each."""

    def __init__(self, jobs: list[Job], results: Results, estimates: Estimates, at_once: int, until: float) -> None:
        self.waiting, self.running = [job for job in jobs if not job.finished], list[Job]()
        self.results, self.estimates, self.at_once, self.until = results, estimates, at_once, until
        threads = str(max(1, (os.cpu_count() or 1) // at_once))
        self.environment = {
            "OMP_NUM_THREADS": "1",
            "RAYON_NUM_THREADS": threads,
            "TORCHINDUCTOR_COMPILE_THREADS": threads,
            # Graphs of several lengths share memory only if blocks of different sizes can be joined.
            "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
            **os.environ,
        }

    def run(self) -> None:
        try:
            while self.step():
                time.sleep(0.2)
        finally:
            stop(self.running)
        for job in (*self.running, *self.waiting):
            print(f"{job.name}: not finished in time", flush=True)

    def step(self) -> bool:
        """Handle jobs that have ended and start others. False if there is nothing left to do or no time."""
        for job in [job for job in self.running if job.process.poll() is not None]:
            self.running.remove(job)
            self.ended(job)
        left = self.until - time.monotonic()
        while left > 0 and len(self.running) < self.at_once:
            share = (len(self.running) + 1) / self.at_once
            job = next((job for job in self.waiting if self.estimates.of(job, share) <= left), None)
            if job is None:
                break  # no other job can finish in time
            self.waiting.remove(job)
            job.start(self.environment)
            self.running.append(job)
        return bool(self.running) and left > 0

    def ended(self, job: Job) -> None:
        error, seconds = job.end(), time.monotonic() - job.started
        print(f"{job.name}: {error or 'finished'} after {seconds:.0f} s", flush=True)
        if "out of memory" in error and self.running:
            self.at_once, job.tries = len(self.running), 0
            self.waiting.append(job)
            return
        if error and job.tries == 1:
            self.waiting.insert(0, job)
            return
        if error:
            self.results.failed[job.name] = error
        else:
            self.estimates.add(job.row.title, job.row.task, seconds)
            self.results.add(job.row, job.seed, job.folder, job.command, job.pointer, seconds)
        self.results.write()


def stop(running: list[Job]) -> None:
    """Ask the processes to save a checkpoint and to stop, and kill those that do not."""
    for job in running:
        job.process.terminate()
    end = time.monotonic() + GRACE - 5
    for job in running:
        try:
            job.process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            job.process.kill()
            job.process.wait()


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    systems, tasks = list(dict.fromkeys(system.of for system in SYSTEMS.values())), (*MUST, *OTHER)
    parser.add_argument("--models", type=Path, default=Path("runs"))
    parser.add_argument("--source", type=Path, help="the folder with the packed files of known tasks")
    parser.add_argument("--systems", default=",".join(systems), help="comma-separated; default: all")
    parser.add_argument(
        "--groups", default=",".join(GROUPS), help=f"of {', '.join(GROUPS)} and rates; default: all others"
    )
    parser.add_argument("--tasks", default=",".join(MUST), help="comma-separated; `other` stands for the small tasks")
    parser.add_argument("--scratch", default="", metavar="TASKS", help="tasks with a control of new weights")
    parser.add_argument("--rates", type=Path, metavar="FILE", help="results.json of the group rates")
    parser.add_argument(
        "--have", type=Path, nargs="+", default=[], metavar="FILE", help="results whose complete jobs are skipped"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=8, help="at a time")
    parser.add_argument("--limit", type=float, default=0.0, metavar="SECONDS", help="end before this time has passed")
    parser.add_argument("--rows", type=int, default=0, help="use this many rows of every split")
    parser.add_argument("--set", action="append", default=[], help="a setting of all fine-tunings")
    parser.add_argument("--list", action="store_true", help="print the commands in their order and stop")
    parser.add_argument("--out", type=Path, default=Path("runs/transfer"))
    given = parser.parse_args(arguments)
    for key, known in (("systems", systems), ("groups", (*GROUPS, "rates")), ("tasks", tasks), ("scratch", tasks)):
        values = [name for name in getattr(given, key).replace("other", ",".join(OTHER)).split(",") if name]
        if unknown := [name for name in values if name not in known]:
            parser.error(f"--{key} has {unknown[0]!r}; known: {', '.join(known)}")
        setattr(given, key, values)
    return given


def main(arguments: Sequence[str] | None = None) -> int:
    began = time.monotonic()
    given = parse(arguments)
    tuned = tune(json.loads(given.rates.read_text())["entries"]) if given.rates else []
    present = [name for name in model_names(given) if (given.models / name).is_dir()]
    if missing := [name for name in model_names(given) if name not in present]:
        print(f"{given.models} has no run of {', '.join(missing)}; their rows are left out", file=sys.stderr)
    if given.list:
        given.rows = 0
    known = {key_of(entry): entry for entry in tuned if entry["task"] in given.tasks and entry["row"] in given.systems}
    had = {key_of(entry) for entry in merge(given.have)["entries"] if is_complete(entry)}
    jobs = [job for job in all_jobs(given) if job.key not in known.keys() | had]
    if given.list:
        print("\n".join(shlex.join(["longspan", *job.command]) for job in jobs))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # jobs are stopped on the way out
    given.out.mkdir(parents=True, exist_ok=True)
    results = Results(given.out, given)
    results.entries |= known
    prepare(given, jobs)
    results.describe(present, [task for task in given.tasks if task != ZERO_SHOT])
    for job in jobs:
        if job.finished:
            results.add(job.row, job.seed, job.folder, job.command, job.pointer, None)
    results.write()
    estimates = Estimates(given.set, list(results.entries.values()))
    until = began + given.limit - GRACE if given.limit else math.inf
    Queue(jobs, results, estimates, given.jobs, until).run()
    return 1 if results.failed else 0


if __name__ == "__main__":
    sys.exit(main())
