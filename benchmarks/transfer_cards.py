"""Cards of the systems of docs/transfer.md, from results of benchmarks/transfer.py of one or several machines.

    python benchmarks/transfer_cards.py benchmarks/results/2026-11-19-*-transfer-*.json --out docs/cards/transfer

A card has the pre-training of a system, all its results, and their commands. Numbers are in percent, except
perplexities.
"""

import argparse
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from transfer_results import Entry
from transfer_systems import MUST, OTHER, SYSTEMS, ZERO_SHOT, Row
from transfer_tables import Table, commands, markdown, merge, number, shown

from longspan.checkpoints.store import write_file

FROM_WIKIPEDIA = "longspan train --recipe {recipe} --data wikipedia2019 --set data.tokenizer=TOKENIZER"
FROM_REVIEWS = "longspan train --recipe transfer-ulmfit-lm --init-from runs/models/{start} --data imdb_unsup.jsonl"
BACKWARD = " --set data.reverse=true"
PRE_TRAINING = {
    "awd-lstm-backward": FROM_WIKIPEDIA.format(recipe="transfer-awd-lstm") + BACKWARD,
    "ulmfit": FROM_REVIEWS.format(start="awd-lstm"),
    "ulmfit-backward": FROM_REVIEWS.format(start="awd-lstm-backward") + BACKWARD,
    "ulmfit-no-wikipedia": "longspan train --recipe transfer-awd-lstm --set training.seconds=360 "
    "--data imdb_unsup.jsonl --set data.tokenizer=TOKENIZER",
}


def models_of(system: str, found: Entry) -> list[str]:
    """The pre-trained models that the rows of a system use."""
    rows = [Row(name, task) for name, one in SYSTEMS.items() if one.of == system for task in (*MUST, *OTHER)]
    used = {model for row in rows for model in (row.system.model, row.system.language_model)}
    return sorted(used & set(found["models"]))


def rows_of(system: str, table: Table) -> list[tuple[str, str]]:
    """Row and task of every fine-tuning of a system: those of a task together."""
    own = [name for name, one in SYSTEMS.items() if one.of == system]
    order = {title: k for k, name in enumerate(own) for title in (name, f"{name}-scratch")}
    order |= {"ulmfit-ensemble": len(own)} if system == "ulmfit" else {}
    known = {(e["row"], e["task"]) for e in table.found["entries"] if e["row"] in order and e["task"] != ZERO_SHOT}
    return sorted(known, key=lambda pair: (pair[1], order[pair[0]], pair[0]))


def describe(name: str, facts: Entry) -> str:
    """How a model was pre-trained."""
    text = f"`{name}`: {facts['parameters']:,} parameters"
    if "step" not in facts:
        return f"{text}."
    text += f", {facts['seconds']:,.0f} seconds of training, {facts['step']:,} steps, {facts['tokens']:,} tokens of the"
    text += f" train split of {facts['corpus']}"
    text += f" at {facts['tokens_per_second']:,.0f} tokens/s" if "tokens_per_second" in facts else ""
    text += f", on one {facts['device']}" if facts.get("device") else ""
    text += f". One seed ({facts['seed']})." if "seed" in facts else "."
    return text + (f" Commit {facts['commit']}." if facts.get("commit") else "")


def pre_training(system: str, found: Entry) -> Iterator[str]:
    for name in models_of(system, found):
        command = PRE_TRAINING.get(name, FROM_WIKIPEDIA.format(recipe=f"transfer-{name}"))
        yield textwrap.fill(describe(name, found["models"][name]), 118, break_on_hyphens=False)
        yield f"    {command} --out runs/models/{name}"


def fine_tuning(rows: Sequence[tuple[str, str]], table: Table) -> str:
    lines = []
    for row, task in rows:
        entries = table.entries(row, task)
        cells = [shown(table.values(row, task, split)) for split in ("dev", "test")]
        lines.append([task, row + table.star(row, task), entries[0]["metric"], *cells, str(len(entries))])
    return markdown(["task", "row", "metric", "dev", "test", "seeds"], lines)


def without_training(system: str, table: Table) -> str:
    """All scores of the language model, with and without its pointer."""
    both = {"as trained": table.zero_shot(system, True), "pointer off": table.zero_shot(system, False)}
    known = {name: scores for name, scores in both.items() if scores}
    if not known:
        return ""
    keys = [
        (task, key)
        for task, scores in next(iter(known.values())).items()
        for key in scores
        if key.startswith("accuracy") or key == "perplexity"
    ]
    lines = [
        [f"{task} {key.replace('_', ' ')}", *(number(scores[task].get(key), key) for scores in known.values())]
        for task, key in keys
    ]
    return markdown(["score", *known], lines)


def card(system: str, table: Table) -> str:
    rows, language_model = rows_of(system, table), without_training(system, table)
    parts = [f"# {system}", *pre_training(system, table.found)]
    parts.append("[transfer.md](../../transfer.md) describes the text, the tokenizer, the tasks and the settings.")
    if rows:
        parts += ["## Fine-tuning", "Mean and standard deviation over seeds. Test was scored once, after training."]
        parts.append(fine_tuning(rows, table))
        if any(table.star(*row) for row in rows):
            parts.append("\\* ended by a limit in seconds before its planned passes.")
    if language_model:
        parts += ["## Without training", language_model]
    parts += ["## Commands", "Those of the first seed; others differ in `training.seed` and the folder."]
    own = [e for e in table.found["entries"] if (e["row"], e["task"]) in {*rows, (system, ZERO_SHOT)}]
    parts.append(commands(Table(table.found | {"entries": own})))
    return "\n\n".join(parts) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="folder of the cards")
    given = parser.parse_args(arguments)
    table = Table(merge(given.files))
    given.out.mkdir(parents=True, exist_ok=True)
    for system in dict.fromkeys(own.of for own in SYSTEMS.values()):
        if models_of(system, table.found):
            write_file(given.out / f"{system}.md", card(system, table).encode())


if __name__ == "__main__":
    main()
