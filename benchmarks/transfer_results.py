"""results.json of benchmarks/transfer.py: an entry per finished job, and facts about the models and tasks."""

import argparse
import json
import shlex
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from transfer_systems import DIRECTIONS, ENSEMBLE, NOT_CLASSES, ZERO_SHOT, Row

from longspan.checkpoints.model_folder import load_model
from longspan.data.cache import write_json
from longspan.training.recipe import load_recipe
from longspan.transfer.finetune import describe_task
from longspan.transfer.likelihood import spaced
from longspan.transfer.metrics import compute
from longspan.transfer.results import PROBABILITIES, RESULT
from longspan.transfer.tasks import KNOWN, TaskData, open_task
from longspan.transfer.tasks.opened import rows_of

VERSION = 1
LENGTHS = (0, 100, 200, 300, 500, 800, 10**9)
"""Words of a review, between which accuracy is reported. Words, because formats shorten texts to different tokens."""
Entry = dict[str, Any]
Key = tuple[str, str, int, bool]


def key_of(entry: Entry) -> Key:
    return entry["row"], entry["task"], entry["seed"], entry.get("pointer", True)


class Results:
    """The contents of results.json. Entries of earlier calls stay."""

    def __init__(self, out: Path, given: argparse.Namespace) -> None:
        self.path, self.given = out / "results.json", given
        found = json.loads(self.path.read_text()) if self.path.is_file() else {}
        self.entries: dict[Key, Entry] = {key_of(entry): entry for entry in found.get("entries", [])}
        self.models: Entry = found.get("models", {})
        self.baselines: Entry = found.get("baselines", {})
        self.failed: dict[str, str] = {}

    def describe(self, models: Sequence[str], tasks: Sequence[str]) -> None:
        """Add facts about models and tasks."""
        self.models |= {name: facts for name in models if (facts := describe_model(self.given.models / name))}
        self.baselines |= {task: majority(data_of(task, self.given)) for task in tasks}

    def add(self, row: Row, seed: int, folder: Path, command: list[str], pointer: bool, seconds: float | None) -> None:
        """The entry of a finished job; `seconds` is how long it took, if it ran just now."""
        zero_shot = row.task == ZERO_SHOT
        entry = scores_of(folder) if zero_shot else entry_of(folder, data_of(row.task, self.given))
        entry = {
            "row": row.title,
            "task": row.task,
            "seed": seed,
            **entry,
            "command": shlex.join(["longspan", *command]),
        }
        entry |= {} if pointer else {"pointer": False}
        before = self.entries.get(key_of(entry), {})
        self.entries[key_of(entry)] = entry | {"job_seconds": seconds or before.get("job_seconds")}
        if row.name in DIRECTIONS and row.task not in (*NOT_CLASSES, ZERO_SHOT):
            self.add_ensemble(row.task, seed)

    def add_ensemble(self, task: str, seed: int) -> None:
        """The mean of the probabilities of both directions, if both are finished."""
        folders = [Row(name, task).folder(self.given.out, seed) for name in DIRECTIONS]
        if not all((folder / RESULT).exists() for folder in folders):
            return
        kept = [dict(np.load(folder / PROBABILITIES)) for folder in folders]
        mean = {split: np.mean([one[split] for one in kept], axis=0) for split in kept[0]}
        words = ["longspan", "predict", str(folders[0]), "--with", str(folders[1]), "--data", "FILE"]
        entry = {"row": ENSEMBLE, "task": task, "seed": seed, "command": shlex.join(words)}
        entry |= classified(data_of(task, self.given), mean, labels_of(folders[0]))
        self.entries[key_of(entry)] = entry

    def write(self) -> None:
        values = {"version": VERSION, "models": self.models, "baselines": self.baselines}
        write_json(self.path, values | {"entries": list(self.entries.values()), "failed": self.failed})


def scores_of(folder: Path) -> Entry:
    return {"scores": json.loads((folder / RESULT).read_text())}


def entry_of(folder: Path, data: TaskData) -> Entry:
    """The scores of a fine-tuning, its steps, and its accuracy by length."""
    found = json.loads((folder / RESULT).read_text())
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    entry: Entry = {"metric": data.task.metric, "steps": last["step"], "seconds": last["seconds"]}
    entry["planned_steps"] = load_recipe(folder / "recipe.toml").training.steps
    entry |= {split: found[split] for split in ("dev", "test") if found.get(split)}
    if "test" in entry and (folder / PROBABILITIES).exists():
        entry["by_length"] = by_length(data, np.load(folder / PROBABILITIES)["test"], labels_of(folder))
    return entry


def classified(data: TaskData, probabilities: dict[str, Any], labels: Sequence[str]) -> Entry:
    """The scores of probabilities of classes or choices."""
    entry: Entry = {"metric": data.task.metric}
    for split, gold in splits(data):
        chosen = [labels[k] if labels else k for k in probabilities[split].argmax(1).tolist()]
        entry[split] = {name: compute(name, data.task.kind, labels, gold, chosen) for name in data.task.metrics}
    if "test" in entry:
        entry["by_length"] = by_length(data, probabilities["test"], labels)
    return entry


def labels_of(folder: Path) -> tuple[str, ...]:
    """The classes of a run; none for choices."""
    return tuple(load_recipe(folder / "recipe.toml").model.labels)


def splits(data: TaskData) -> Iterator[tuple[str, list[Any]]]:
    """The labels of dev, and of test if it has some."""
    yield "dev", [example.label for example in data.dev]
    if data.has_test and (gold := [example.label for example in data.test()])[0] is not None:
        yield "test", gold


def by_length(data: TaskData, probabilities: Any, labels: Sequence[str]) -> list[Entry]:
    """Right answers on test by the number of words of a text, for tasks of one text."""
    if data.task.kind != "single":
        return []
    examples = data.test()
    words = np.array([len(example.texts[0].split()) for example in examples])
    chosen = probabilities.argmax(1).tolist()
    right = np.array([labels[k] == example.label for k, example in zip(chosen, examples, strict=True)])
    found = []
    for low, high in pairwise(LENGTHS):
        here = (words >= low) & (words < high)
        found.append({"from": low, "to": high, "texts": int(here.sum()), "right": int(right[here].sum())})
    return found


def majority(data: TaskData) -> Entry:
    """The scores of the most frequent label of train; 0 for correlations and entities."""
    if data.task.kind in ("similarity", "tags"):
        return {split: dict.fromkeys(data.task.metrics, 0.0) for split in ("dev", "test")}
    gold = [example.label for example in data.train]
    known = sorted(set(gold), key=str)
    most, labels = max(known, key=gold.count), [] if data.task.kind == "choice" else known
    return {
        split: {name: compute(name, data.task.kind, labels, wanted, [most] * len(wanted)) for name in data.task.metrics}
        for split, wanted in splits(data)
    }


def describe_model(path: Path) -> Entry | None:
    """Size and training of a run, from its files."""
    if not path.is_dir():
        return None
    loaded = load_model(path)
    facts: Entry = {"parameters": loaded.model.parameter_count, "vocabulary": loaded.model.config.vocabulary}
    if (path / "metrics.jsonl").is_file():
        last = json.loads((path / "metrics.jsonl").read_text().splitlines()[-1])
        facts |= {key: last[key] for key in ("step", "tokens", "seconds", "bits", "tokens_per_second") if key in last}
        recipe = load_recipe(path / "recipe.toml")
        facts |= {"corpus": Path(recipe.data.corpus).name, "reverse": recipe.data.reverse, "seed": recipe.training.seed}
        process = json.loads((path / "run.json").read_text())["processes"][-1]
        facts |= {"device": process["device"], "commit": process["commit"]}
        facts |= {"from": Path(recipe.training.init_from).name} if recipe.training.init_from else {}
    return facts


@cache
def _opened(task: str, source: Path | None, sample: Path | None) -> TaskData:
    return open_task(task if sample is None else sample, source)


def data_of(task: str, given: argparse.Namespace) -> TaskData:
    return _opened(task, given.source, sample_of(task, given))


def sample_of(task: str, given: argparse.Namespace) -> Path | None:
    """A folder with a few evenly spaced rows of every split of a task; None without `--rows`. Dev and test have no
    labels that the few training rows do not have."""
    if not given.rows:
        return None
    folder = given.out / f"rows-{given.rows}" / task
    if not folder.is_dir():
        folder.mkdir(parents=True)
        lines = [f"{key} = {json.dumps(value)}" for key, value in KNOWN[task].given.items()]
        (folder / "task.toml").write_text("\n".join(lines) + "\n")
        labels: list[str] = []
        whole = open_task(task, given.source)
        for split, path in whole.files.items():
            examples = ((row, whole.task.example(row, path.name, labelled=False)) for row in rows_of(path))
            rows = [row for row, example in examples if example.unseen(labels) is None]
            lines = [json.dumps(row) for row in spaced(rows, given.rows)]
            (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
            labels = labels or describe_task(open_task(folder))["labels"]
    return folder
