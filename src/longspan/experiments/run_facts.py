"""What is worth keeping of a training run when its weights are deleted: sizes, speed, memory, seed, command."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from longspan.experiments.report.runs import read_run
from longspan.experiments.scaling.points import count_non_embedding, point_name, runs_in
from longspan.models.families import outline
from longspan.training.folder import read_run_info
from longspan.training.observers.metrics import read_lines
from longspan.training.recipe import load_recipe


def run_facts(folder: Path) -> dict[str, Any]:
    """The facts of a run for a table of results. `seconds` counts compilation, validation and saving;
    `tokens_per_second` is the median over the steps, and `peak_gib` the memory of tensors on a GPU (None on a CPU)."""
    run, recipe, info = read_run(folder), load_recipe(folder / "recipe.toml"), read_run_info(folder)
    lines, held_out = read_lines(folder / "metrics.jsonl"), read_lines(folder / "validation.jsonl")
    model, last = outline(recipe.family, recipe.model), lines[-1] if lines else {}
    speeds, text = run.training["tokens_per_second"], info.get("data", {})
    memory = [max(line["memory_gib"]) for line in lines if line.get("memory_gib")]
    processes = info.get("processes") or [{}]
    return {
        "recipe": recipe.name,
        "family": recipe.family,
        "parameters": model.parameter_count,
        "non_embedding": count_non_embedding(model),
        "seed": recipe.training.seed,
        "steps": last.get("step", 0),
        "tokens": last.get("tokens", 0),
        "seconds": last.get("seconds", 0.0),
        "tokens_per_second": float(np.median(speeds)) if speeds.size else None,
        "peak_gib": max(memory, default=None),
        "skipped_steps": sum(bool(line.get("skipped")) for line in lines),
        "validation": held_out[-1] if held_out else None,
        "data": {key: text.get(key) for key in ("split", "tokens", "fingerprint")} | {"name": _name(text.get("name"))},
        "command": portable_command(processes[0].get("command") or []),
        "starts": len(processes),
        "device": run.machine.get("device"),
        "torch": run.machine.get("torch"),
        "commit": run.machine.get("commit"),
        "time": processes[0].get("time"),
    }


def facts_of_runs(paths: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """The facts of all runs in some folders, by the names of their points in a scaling law."""
    folders = [(path, folder) for path in paths if path.suffix != ".csv" for folder in runs_in(path)]
    return {point_name(path, folder): run_facts(folder) for path, folder in folders}


def _name(corpus: Any) -> str | None:
    """The name of a corpus, or of its file or folder."""
    return Path(corpus).name if isinstance(corpus, str) else None


def portable_command(words: Sequence[str]) -> str:
    """The command of a run without the paths of its machine, and without --resume auto, which changes no result."""
    shown: list[str] = []
    for before, word in zip(["", *words], words, strict=False):
        if before == "--resume" and word == "auto":
            shown.pop()
        elif before in ("--out", "--resume"):
            shown.append("RUN")
        elif before == "--recipe" or word.endswith(".py"):
            shown.append(Path(word).stem if before == "--recipe" else Path(word).name)
        else:
            shown.append(word)
    return shlex.join(shown)
