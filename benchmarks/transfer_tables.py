"""The tables of docs/transfer.md from results of benchmarks/transfer.py, of one or several machines.

    python benchmarks/transfer_tables.py A/results.json B/results.json --json merged.json

A cell is the mean over seeds in percent, its standard deviation, and the number of seeds if it is not three. A star
marks a run that a limit in seconds ended before its planned passes, and a dash a result that is not there. With
`--json` the merged results are written too.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from transfer_results import Entry, Key, key_of
from transfer_systems import CONTROLLED, ENSEMBLE, FEATURES, MEMORY, MUST, OTHER, SYSTEMS, ZERO_SHOT

from longspan.data.cache import write_json

MISSING = "-"
SEEDS = 3
DEV = ("sst2", "rte", "cola", "copa", "cb")
"""Tasks that are compared on dev: they have no test labels, or published figures are of dev."""
TRAINED = [task for task in (*MUST, *OTHER) if task != ZERO_SHOT]
LANGUAGE_MODELS = {name: system.language_model for name, system in SYSTEMS.items() if system.group == "systems"}
ROWS = ["gpt", "elmo", "bert", "ulmfit", "ulmfit-backward", ENSEMBLE, "xlnet", "transformer-xl", "longspan-xl"]
SCORES = (("blimp", "accuracy"), ("blimp", "accuracy_at_start"), ("lambada/test", "accuracy"))
SCORES += (
    ("lambada/test", "perplexity"),
    ("lambada/dev", "accuracy"),
    ("wikitext2", "perplexity"),
    ("copa", "accuracy"),
)


def merge(files: Sequence[Path]) -> Entry:
    """One set of results from several files. Where two have the same job, the first one is used."""
    found: Entry = {"version": 1, "models": {}, "baselines": {}, "failed": {}}
    entries: dict[Key, Entry] = {}
    for path in files:
        try:
            values = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise SystemExit(
                f"{path} cannot be read ({error}); give a results.json of benchmarks/transfer.py"
            ) from None
        version = values.get("version") if isinstance(values, dict) else None
        if version != 1:
            raise SystemExit(f"{path} has version {version!r}; this script reads version 1")
        for key in ("models", "baselines", "failed"):
            found[key] = values[key] | found[key]
        entries = {key_of(entry): entry for entry in values["entries"]} | entries
    return found | {"entries": [entries[key] for key in sorted(entries)]}


def is_complete(entry: Entry) -> bool:
    """Whether a run had all its planned steps."""
    return entry.get("steps", 0) >= entry.get("planned_steps", 0)


class Table:
    """Cells of merged results."""

    def __init__(self, found: Entry) -> None:
        self.found = found

    def entries(self, row: str, task: str) -> list[Entry]:
        return [e for e in self.found["entries"] if (e["row"], e["task"]) == (row, task)]

    def values(self, row: str, task: str, split: str | None = None) -> list[float]:
        """The metric of every seed, on the split that is compared."""
        split = split or ("dev" if task in DEV else "test")
        return [entry[split][entry["metric"]] for entry in self.entries(row, task) if entry.get(split)]

    def star(self, row: str, task: str) -> str:
        """Marks runs that a limit ended before their planned passes."""
        return "" if all(map(is_complete, self.entries(row, task))) else "*"

    def cell(self, row: str, task: str, split: str | None = None) -> str:
        return shown(self.values(row, task, split)) + self.star(row, task)

    def zero_shot(self, row: str, pointer: bool) -> Entry | None:
        every = self.entries(row, ZERO_SHOT)
        return next((e["scores"] for e in every if e.get("pointer", True) == pointer), None)

    def lengths(self, row: str) -> list[tuple[int, int, int, int]]:
        """From, to, texts and right answers, summed over seeds."""
        every = [entry["by_length"] for entry in self.entries(row, "imdb") if "by_length" in entry]
        return [
            (parts[0]["from"], parts[0]["to"], sum(p["texts"] for p in parts), sum(p["right"] for p in parts))
            for parts in zip(*every, strict=True)
        ]


def shown(values: Sequence[float]) -> str:
    if not values:
        return MISSING
    text = f"{100 * statistics.mean(values):.2f}"
    text += f" ± {100 * statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return text if len(values) == SEEDS else f"{text} ({len(values)})"


def markdown(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rule = ["---"] * len(header)
    return "\n".join("| " + " | ".join(line) + " |" for line in (header, rule, *lines))


def pre_training(table: Table) -> str:
    lines = []
    for name, facts in table.found["models"].items():
        numbers = [f"{facts[key]:,}" if key in facts else MISSING for key in ("parameters", "step", "tokens")]
        rest = [f"{facts['seconds']:.0f}" if "seconds" in facts else MISSING, facts.get("corpus", MISSING)]
        bits = f"{facts['bits']:.2f}" if "bits" in facts else MISSING
        lines.append([name, *numbers, *rest, facts.get("from", MISSING), bits])
    header = ["model", "parameters", "steps", "tokens", "seconds", "text", "starts from", "bits of the last step"]
    return markdown(header, lines)


def systems(table: Table) -> str:
    """Systems by tasks, with controls and the majority."""
    controls = [f"{name}-scratch" for name in CONTROLLED if any(table.values(f"{name}-scratch", t) for t in TRAINED)]
    tagged = [f"{name}-crf" for name in SYSTEMS if table.values(f"{name}-crf", "conll2003")]
    lines = [[row, *(table.cell(row, task) for task in TRAINED)] for row in (*ROWS, *tagged, *controls)]
    baselines = table.found["baselines"]
    majority = [
        number(next(iter(baselines.get(task, {}).get(split_of(task), {}).values()), None), "") for task in TRAINED
    ]
    header = ["system", *(f"{task} {split_of(task)}" for task in TRAINED)]
    return markdown(header, [*lines, ["most frequent label", *majority]])


def split_of(task: str) -> str:
    return "dev" if task in DEV else "test"


def named(prefix: str, names: Sequence[str], task: str, splits: Sequence[str]) -> Callable[[Table], str]:
    """A table of rows of one task on several splits."""

    def made(table: Table) -> str:
        rows = [f"{prefix}-{name}" if name else prefix for name in names]
        return markdown(
            ["row", *(f"{task} {split}" for split in splits)],
            [[row, *(table.cell(row, task, split) for split in splits)] for row in rows],
        )

    return made


ABLATIONS = named(
    "ulmfit",
    ["", *(n.removeprefix("ulmfit-") for n, s in SYSTEMS.items() if s.group == "ablations")],
    "imdb",
    ["dev", "test"],
)
LAYERS = named("bert", FEATURES, "conll2003", ["dev", "test"])


def without_training(table: Table) -> str:
    lines = []
    for row, pointer in ((row, pointer) for row in LANGUAGE_MODELS for pointer in (True, False)):
        if (scores := table.zero_shot(row, pointer)) is None:
            lines += [[row, *[MISSING] * len(SCORES)]] if pointer and LANGUAGE_MODELS[row] else []
            continue
        cells = [scores.get(task, {}).get(key) for task, key in SCORES]
        texts = [number(value, key) for value, (_, key) in zip(cells, SCORES, strict=True)]
        lines.append([row if pointer else f"{row}, pointer off", *texts])
    return markdown(["language model", *(f"{task} {key.replace('_', ' ')}" for task, key in SCORES)], lines)


def number(value: float | None, key: str) -> str:
    if value is None:
        return MISSING
    return f"{value:.1f}" if key == "perplexity" else f"{100 * value:.2f}"


def review_lengths(table: Table) -> str:
    """Accuracy on IMDB by the number of words."""
    rows = [*ROWS, *(f"{name}-512" for name in MEMORY)]
    known = {row: lengths for row in rows if (lengths := table.lengths(row))}
    if not known:
        return "no results of imdb"
    first = next(iter(known.values()))
    header = ["row", *(f"{low}+" if high > 10**6 else f"{low} to {high - 1}" for low, high, *_ in first)]
    cells = {
        row: [f"{100 * right / texts:.2f}" if texts else MISSING for *_, texts, right in known[row]] for row in known
    }
    return markdown(header, [[row, *cells.get(row, [MISSING] * len(first))] for row in rows])


Target = tuple[str, str, str, bool | None]
"""What is wanted, the bound, what was found, and whether that reaches it; None if it is not known."""


def targets(table: Table) -> str:
    """The lines with a target, what was found, and whether it is reached."""
    answers = {True: "yes", False: "no", None: MISSING}
    found = [
        best(table, "IMDB, ULMFiT", ["ulmfit", "ulmfit-backward", ENSEMBLE], "imdb", 0.935),
        *(against_scratch(table, name) for name in ("gpt", "bert", "xlnet", "transformer-xl")),
        best(table, "CoNLL-2003 test, best", [*ROWS, *(f"{name}-crf" for name in ROWS)], "conll2003", 0.85),
        order_of_layers(table),
        best(table, "SST-2 dev, best", ROWS, "sst2", 0.86),
        best(table, "TREC-6, best", ROWS, "trec6", 0.94),
        best_score(table, "BLiMP, Transformer-XL", ["transformer-xl", "longspan-xl"], "blimp", 0.696),
        best_score(table, "LAMBADA, best", list(LANGUAGE_MODELS), "lambada/test", 0.03),
        *(above_majority(table, task) for task in OTHER),
    ]
    return markdown(["target", "bound", "found", "reached"], [[*texts, answers[reached]] for *texts, reached in found])


def best(table: Table, what: str, rows: Sequence[str], task: str, bound: float) -> Target:
    known = {row: statistics.mean(values) for row in rows if (values := table.values(row, task))}
    if not known:
        return what, f"{100 * bound:.1f}", MISSING, None
    name = max(known, key=known.__getitem__)
    return what, f"{100 * bound:.1f}", f"{table.cell(name, task)}, {name}", known[name] >= bound


def best_score(table: Table, what: str, rows: Sequence[str], task: str, bound: float) -> Target:
    every = {row: scores for row in rows if (scores := table.zero_shot(row, True)) and task in scores}
    known = {row: scores[task]["accuracy"] for row, scores in every.items()}
    if not known:
        return what, f"{100 * bound:.1f}", MISSING, None
    name = max(known, key=known.__getitem__)
    return what, f"{100 * bound:.1f}", f"{100 * known[name]:.2f}, {name}", known[name] >= bound


def against_scratch(table: Table, name: str) -> Target:
    own, control = table.values(name, "imdb"), table.values(f"{name}-scratch", "imdb")
    reached = statistics.mean(own) > statistics.mean(control) if own and control else None
    return f"IMDB, {name}", f"from scratch, {shown(control)}", shown(own), reached


def order_of_layers(table: Table) -> Target:
    every = {name: table.values(f"bert-{name}", "conll2003", "dev") for name in FEATURES}
    means = {name: statistics.mean(values) for name, values in every.items() if values}
    order, reached = sorted(means, key=means.__getitem__), None
    if len(means) == len(FEATURES):
        combined = max(means[name] for name in ("sum", "sum-last-four", "concat-last-four"))
        reached = order[0] == "embedding" and combined >= means["last"]
    bound = "embedding lowest, a combination not below last"
    return "CoNLL-2003 dev, BERT's layers", bound, " < ".join(order) or MISSING, reached


def above_majority(table: Table, task: str) -> Target:
    """Two standard deviations over seeds above the most frequent label, for the best system."""
    what, scores = f"{task} {split_of(task)}, best", table.found["baselines"].get(task, {}).get(split_of(task))
    every = {row: values for row in ROWS if (values := table.values(row, task))}
    if not every or not scores:
        return what, "above the most frequent label", MISSING, None
    name = max(every, key=lambda row: statistics.mean(every[row]))
    bound, values = next(iter(scores.values())), every[name]
    reached = statistics.mean(values) - 2 * statistics.stdev(values) > bound if len(values) > 1 else None
    return what, f"{100 * bound:.2f} by two deviations", f"{shown(values)}, {name}", reached


def commands(table: Table) -> str:
    """One command per row and task, of its first seed."""
    first: dict[tuple[str, str], str] = {}
    for entry in table.found["entries"]:
        first.setdefault(
            (entry["task"], entry["row"] + ("" if entry.get("pointer", True) else ", pointer off")), entry["command"]
        )
    return markdown(["task", "row", "command"], [[*key, f"`{first[key]}`"] for key in sorted(first)])


PAGES: dict[str, Callable[[Table], str]] = {
    "Targets": targets,
    "Pre-training": pre_training,
    "Systems and tasks": systems,
    "Without training": without_training,
    "Ablations of ULMFiT": ABLATIONS,
    "BERT's layers as features": LAYERS,
    "IMDB by the number of words": review_lengths,
    "Commands": commands,
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--json", type=Path, help="write the merged results to this file")
    given = parser.parse_args(arguments)
    found = merge(given.files)
    if given.json:
        write_json(given.json, found)
    table = Table(found)
    print("\n\n".join(f"### {title}\n\n{page(table)}" for title, page in PAGES.items()))
    for name, error in found["failed"].items():
        print(f"\nfailed: {name}: {error}")


if __name__ == "__main__":
    main()
