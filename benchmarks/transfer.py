"""Fine-tune pre-trained systems on tasks, several at a time on one GPU, and print one table. docs/transfer.md

    python benchmarks/transfer.py --models runs --source DATA --tasks imdb,sst2,conll2003 --seeds 3 --jobs 8 --out DIR
    python benchmarks/transfer.py --models runs --tasks imdb --list          # print the commands and stop
    python benchmarks/transfer.py --lengths DIR/imdb/gpt/seed-1 DIR/imdb/xlnet/seed-1   # accuracy by review length

`--models` is a folder with one run per system. `--scratch` adds a control of every row with new weights. A seed that
has a result is not run again, so a stopped command continues, and `--minutes` stops it. `--group ablations` are those
of ULMFiT, `--group features` BERT's layers as features. Every row is one `longspan finetune` command; where `ulmfit`
and `ulmfit-backward` are both finished, `ulmfit-ensemble` has the mean of their probabilities, as `longspan predict
--with` computes it. The results are in DIR/results.json.
"""

import argparse
import json
import math
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain, pairwise, product
from pathlib import Path
from typing import Any

import numpy as np

from longspan.device import find_device
from longspan.transfer.predict import Ensemble, load_predictor
from longspan.transfer.results import RESULT
from longspan.transfer.tasks import open_task


@dataclass(frozen=True)
class System:
    """How a pre-trained model is fine-tuned: as published, with rates for small models."""

    model: str
    """The name of its run below `--models`."""
    settings: tuple[str, ...] = ("training.lr=3e-4",)
    recipe: str = "finetune"
    from_scratch: bool = False


ELMO = ("training.lr=1e-3", "model.frozen=true", "model.features=mix")
ULMFIT = System("ulmfit", (), "finetune-ulmfit")
EQUAL_RATES, NO_UNFREEZING = "training.layer_decay=1.0", "training.unfreeze_every=0"
FROZEN = ("training.lr=1e-3", "model.frozen=true", "model.crf=200")
SYSTEMS = {
    "gpt": System("gpt", ("training.lr=3e-4", "model.lm_weight=0.5")),
    "bert": System("bert"),
    "xlnet": System("xlnet"),
    "transformer-xl": System("transformer-xl"),
    "longspan-xl": System("longspan-xl"),
    "elmo": System("elmo", (*ELMO, "model.pooling=concat")),
    "ulmfit": ULMFIT,
    "ulmfit-backward": System("ulmfit-backward", ("model.reverse=true",), "finetune-ulmfit"),
}
DIRECTIONS, ENSEMBLE = ("ulmfit", "ulmfit-backward"), "ulmfit-ensemble"
NOT_CLASSES = ("conll2003", "sts-b")
"""Tasks without probabilities of classes, so without an ensemble. A backward model is for the ensemble only."""
TAGGERS = {
    "elmo": System("elmo", (*ELMO, "model.crf=200")),
    "ulmfit": System("awd-lstm", ("model.hidden=0",), "finetune-ulmfit"),
}
"""Other settings for tags. ULMFiT's hidden layer is for whole texts, and its text of film reviews is not for news."""
ABLATIONS = {
    "ulmfit": ULMFIT,
    "ulmfit-from-scratch": replace(ULMFIT, settings=(EQUAL_RATES, NO_UNFREEZING), from_scratch=True),
    "ulmfit-no-lm-tuning": replace(ULMFIT, model="awd-lstm"),
    "ulmfit-no-wikipedia": replace(ULMFIT, model="ulmfit-no-wikipedia"),
    "ulmfit-no-unfreezing": replace(ULMFIT, settings=(NO_UNFREEZING,)),
    "ulmfit-no-discriminative-rates": replace(ULMFIT, settings=(EQUAL_RATES,)),
}
"""Howard & Ruder 2018, section 5. New weights have nothing to protect, so they are all trained at the same rate."""
FEATURES = {
    f"bert-{name}": System("bert", (*FROZEN, f"model.features={name}"))
    for name in ("embedding", "second-to-last", "last", "sum", "sum-last-four", "concat-last-four")
}
"""Devlin et al. 2019, table 7."""
GROUPS = {"systems": SYSTEMS, "ablations": ABLATIONS, "features": FEATURES}
EPOCHS = {"imdb": 3, "sst2": 3, "conll2003": 10, "trec6": 15, "rte": 10, "cola": 8, "mrpc": 8, "sts-b": 8, "copa": 10}
BUCKETS = (0, 128, 256, 512, 1024, 10**9)


@dataclass(frozen=True)
class Row:
    system: str
    task: str
    scratch: bool

    @property
    def name(self) -> str:
        return self.system + ("-scratch" if self.scratch else "")

    def folder(self, given: argparse.Namespace, seed: int) -> Path:
        return Path(given.out / self.task / self.name / f"seed-{seed}")

    def results(self, given: argparse.Namespace) -> list[Path]:
        return sorted((given.out / self.task / self.name).glob(f"seed-*/{RESULT}"))

    def command(self, given: argparse.Namespace, seed: int | None = None) -> list[str]:
        """The command of all seeds, or of one; for an ensemble, that of one seed with the rows of a file."""
        if self.system == ENSEMBLE:
            forward, backward = (str(Row(name, self.task, False).folder(given, seed or 1)) for name in DIRECTIONS)
            return ["predict", forward, "--with", backward, "--data", "FILE"]
        system = system_of(self.system, self.task, given)
        words = [str(given.models / system.model), "--task", self.task, "--recipe", system.recipe]
        if seed is None:
            words += ["--out", str(given.out / self.task / self.name), "--seeds", str(given.seeds)]
        else:
            words += ["--out", str(self.folder(given, seed)), "--set", f"training.seed={seed}"]
        if not any(setting.startswith("training.steps=") for setting in given.set):
            words += ["--epochs", str(EPOCHS.get(self.task, 3))]
        words += ["--from", str(given.source)] if given.source else []
        settings = list(system.settings)
        if self.task == "imdb" and system.model in ("transformer-xl", "longspan-xl", "xlnet"):
            settings.append("training.segment=512")  # longer segments: fewer steps for the same text
        for setting in [*settings, *given.set]:
            words += ["--set", setting]
        return ["finetune", *words, *(["--from-scratch"] if self.scratch or system.from_scratch else [])]


def system_of(name: str, task: str, given: argparse.Namespace) -> System:
    own = GROUPS[given.group][name]
    return TAGGERS.get(name, own) if task == "conll2003" else own


def rows(given: argparse.Namespace) -> Iterator[Row]:
    for task in given.tasks.split(","):
        for name in chosen(given):
            system = system_of(name, task, given)
            if not (given.models / system.model).is_dir() or (name == DIRECTIONS[1] and task in NOT_CLASSES):
                continue
            yield Row(name, task, False)
            if given.scratch and not system.from_scratch:
                yield Row(name, task, True)


def ensembles(given: argparse.Namespace) -> Iterator[Row]:
    if set(DIRECTIONS) <= set(chosen(given)):
        yield from (Row(ENSEMBLE, task, False) for task in given.tasks.split(",") if task not in NOT_CLASSES)


def chosen(given: argparse.Namespace) -> list[str]:
    return given.systems.split(",") if given.systems else list(GROUPS[given.group])


def check(given: argparse.Namespace) -> None:
    """An error for an unknown system, and a note of those without a run: a table would lack their rows unnoticed."""
    if unknown := [name for name in chosen(given) if name not in GROUPS[given.group]]:
        sys.exit(f"no system called {unknown[0]!r} in this group; known: {', '.join(GROUPS[given.group])}")
    models = {system_of(name, task, given).model for task in given.tasks.split(",") for name in chosen(given)}
    if missing := sorted(model for model in models if not (given.models / model).is_dir()):
        print(f"{given.models} has no run of {', '.join(missing)}; their rows are left out", file=sys.stderr)


def run(row: Row, seed: int, given: argparse.Namespace, until: float) -> str:
    """Fine-tune one seed of a row, if it has no result; `until` is when to stop. Returns an error or nothing."""
    out = row.folder(given, seed)
    if (out / RESULT).exists() or time.monotonic() > until:
        return ""
    out.parent.mkdir(parents=True, exist_ok=True)
    errors = out.parent / f"{out.name}.log"  # `finetune` wants a folder of its own
    command = [sys.executable, "-m", "longspan", *row.command(given, seed), "--resume", "auto"]
    with errors.open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            process.wait(max(0.0, until - time.monotonic()) if until < math.inf else None)
        except subprocess.TimeoutExpired:
            process.terminate()  # it saves a checkpoint
            process.wait(30)
            return ""
    lines = errors.read_text(errors="replace").strip().splitlines()
    return lines[-1][:300] if process.returncode and lines else ""


def score_ensemble(row: Row, seed: int, given: argparse.Namespace) -> None:
    """Score both directions together, if both have a result and this was not done for the same weights and rows."""
    folders = [Row(name, row.task, False).folder(given, seed) for name in DIRECTIONS]
    if not all((folder / RESULT).exists() for folder in folders):
        return
    scored_on = [json.loads((folder / RESULT).read_text())["scored_on"] for folder in folders]
    result = row.folder(given, seed) / RESULT
    if result.exists() and json.loads(result.read_text())["scored_on"] == scored_on:
        return
    both = Ensemble([load_predictor(folder, device=find_device("auto")) for folder in folders])
    data = open_task(row.task, given.source)
    found: dict[str, Any] = {"metric": data.task.metric, "scored_on": scored_on, "dev": both.evaluate(data.dev)}
    if data.has_test and (examples := data.test())[0].label is not None:
        found["test"] = both.evaluate(examples)
    result.parent.mkdir(parents=True, exist_ok=True)
    result.write_text(json.dumps(found, indent=1) + "\n")


def collect(row: Row, given: argparse.Namespace) -> dict[str, Any] | None:
    """Mean and standard deviation over the seeds that are finished; None if there are none."""
    every = [json.loads(path.read_text()) for path in row.results(given)]
    if not every:
        return None
    metric = every[0]["metric"]
    found: dict[str, Any] = {"row": row.name, "task": row.task, "metric": metric, "seeds": len(every)}
    for split in ("dev", "test"):
        values = [one[split][metric] for one in every if one.get(split)]
        found[split] = statistics.mean(values) if values else None
        found[f"{split}_std"] = statistics.stdev(values) if len(values) > 1 else None
        found[f"{split}_per_seed"] = values
    return found | {"command": shlex.join(["longspan", *row.command(given)])}


def run_all(given: argparse.Namespace) -> tuple[list[dict[str, Any]], list[str]]:
    """The rows of the table that have results, and errors. Seeds of a row are independent jobs."""
    until = time.monotonic() + 60 * given.minutes if given.minutes else math.inf
    jobs = [] if given.report else [(row, seed) for seed in range(1, given.seeds + 1) for row in rows(given)]
    with ThreadPoolExecutor(given.jobs) as pool:
        errors = list(pool.map(lambda job: run(*job, given, until), jobs))
    failed = [f"{row.task} {row.name} seed {seed}: {e}" for (row, seed), e in zip(jobs, errors, strict=True) if e]
    for row, seed in [] if given.report else product(ensembles(given), range(1, given.seeds + 1)):
        if time.monotonic() < until:
            score_ensemble(row, seed, given)
    return [found for row in chain(rows(given), ensembles(given)) if (found := collect(row, given))], failed


def table(found: list[dict[str, Any]]) -> str:
    lines = ["| system | task | metric | dev | test | seeds |", "|---|---|---|---|---|---|"]
    for row in found:
        cells = [row["row"], row["task"], row["metric"], shown(row, "dev"), shown(row, "test"), str(row["seeds"])]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def shown(row: dict[str, Any], split: str) -> str:
    if row[split] is None:
        return ""
    spread = row[f"{split}_std"]
    return f"{100 * row[split]:.2f}" + (f" ± {100 * spread:.2f}" if spread is not None else "")


def lengths(folders: list[Path], source: Path | None) -> list[dict[str, Any]]:
    """Accuracy on test by the number of tokens of a text."""
    found = []
    for folder in folders:
        predictor = load_predictor(folder, device=find_device("auto"))
        examples = open_task(predictor.config.task, source).test()
        sizes = np.array([row.length for row in predictor.format.encode(examples)])
        right = np.array([p.label == e.label for p, e in zip(predictor.predict(examples), examples, strict=True)])
        for low, high in pairwise(BUCKETS):
            here = (sizes >= low) & (sizes < high)
            accuracy = float(right[here].mean()) if here.any() else None
            name = f"{folder.parent.name}/{folder.name}"
            found.append({"run": name, "from": low, "to": high, "texts": int(here.sum()), "accuracy": accuracy})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, default=Path("runs"))
    parser.add_argument("--source", type=Path, help="the folder with the packed files of known tasks")
    parser.add_argument("--tasks", default="imdb,sst2,conll2003")
    parser.add_argument("--group", choices=GROUPS, default="systems")
    parser.add_argument("--systems", default="", help="only these, by name")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--minutes", type=float, default=0.0, help="stop after this time; the next call continues")
    parser.add_argument("--report", action="store_true", help="run nothing; print the results that are there")
    parser.add_argument("--scratch", action="store_true")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--lengths", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/transfer"))
    given = parser.parse_args()
    if given.lengths:
        for line in lengths(given.lengths, given.source):
            print(json.dumps(line))
        return
    check(given)
    if given.list:
        for row in rows(given):
            print(shlex.join(["longspan", *row.command(given)]))
        return
    for task in [] if given.report else given.tasks.split(","):
        open_task(task, given.source)  # installed once, before the processes start
    found, failed = run_all(given)
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "results.json").write_text(json.dumps(found, indent=1) + "\n")
    print("\n".join([table(found), *failed]))


if __name__ == "__main__":
    main()
