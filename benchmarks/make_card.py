"""Write the card of a trained recipe whose weights are not distributed, with the command that prints each result.

    python benchmarks/make_card.py RUN --out docs/cards/NAME.md [--memories 512,1024] [--discounts 0,2]
        [--pointers 512,2000] [--temps 1,1.1] [--dynamic 5e-5] [--also FILE] [--shorter CORPUS] [--note TEXT]

Settings are chosen on the validation split, in this order: memory, clamp and discount, reach of the pointer,
temperature, rate of dynamic evaluation. The test split and further texts are scored afterwards with the chosen
settings. They are also scored without a pointer, a temperature and dynamic evaluation. Only those results can be
compared with papers, so they have a column of their own.

Every score is written to --results (default: RUN/card.json) as soon as it is known, with the facts of the run: seed,
speed, memory, command. A second call scores only what is missing.
"""

import argparse
import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from card_rows import Row, Search, has_pointer, with_comparable
from cards import Scores, training_commit, usage_errors

from longspan.checkpoints.model_folder import find_model, open_model
from longspan.data import open_corpus
from longspan.device import find_device, find_dtype
from longspan.experiments.run_facts import portable_command, run_facts
from longspan.models.families import family
from longspan.scoring.dynamic import Dynamics
from longspan.training.environment import hardware
from longspan.training.recipe import Recipe, load_recipe

CARD = """# {name}

{parameters:,} parameters, {seconds:,.0f} seconds of training on {device}, {steps:,} steps, {tokens:,} tokens of the
{split} split of {data}. One seed ({seed}). {speed}Scored on {scorer}.

| {unit}, {reading} | valid | test |
|---|---|---|
{summary}

## All scores

Comparable results use no pointer, no temperature and no dynamic evaluation. Best results use what their row lists.
Memory is the number of earlier tokens that a layer attends to. Distances beyond the clamp share a position, and a
discount lowers their scores ([details](../evaluation.md)).

| text | memory | clamp | discount | comparable {unit} | best {unit} | best uses | command |
|---|---|---|---|---|---|---|---|
{rows}

Chosen on the validation split, the best of the values listed: {chosen}. The test split was scored afterwards.
{more}
| | | |
|---|---|---|
| code | commit {commit} | `{training}` |
| training text | fingerprint | {fingerprint} |
{end}"""
LIMITED = """
The run is limited in seconds, so on another machine it ends at another step, with other weights.
"""
SHORTER = """
{corpus} drops symbols from the same files: its test split has {kept:,} tokens, this one {total:,}. This model's cost
on it is at most {total:,} / {kept:,} x {score:.4f} = {bound:.4f} per token. That is an upper bound of the cost when the
positions of the dropped symbols are marginalised out. It is not a score of the shorter text.
"""
DYNAMIC = """
Dynamic evaluation (Krause et al. 2018) takes a gradient step on every segment after it was scored. No target is learned
from before it is scored. The same reading without learning is given as "static".
"""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("run", type=Path, help="the folder of the training run")
    parser.add_argument("--out", type=Path, required=True, help="the card to write")
    parser.add_argument("--memories", type=integers, default=[], help="memories to choose from; default: the recipe's")
    parser.add_argument(
        "--discounts", type=numbers, default=[], help="discounts beyond the clamp to choose from; default: the recipe's"
    )
    parser.add_argument("--pointers", type=integers, default=[], help="reaches of the pointer to choose from")
    parser.add_argument("--temps", type=numbers, default=[], help="temperatures to choose from")
    parser.add_argument("--dynamic", type=numbers, default=[], help="rates of dynamic evaluation to choose from")
    parser.add_argument("--also", action="append", default=[], help="a further text to score, a file or a corpus")
    parser.add_argument("--shorter", help="a corpus that drops symbols from the same files, for an upper bound of bits")
    parser.add_argument("--note", action="append", default=[], help="a paragraph to add")
    parser.add_argument("--flags", help="flags of static evaluation; default: the segment of the recipe's evaluation")
    parser.add_argument("--dynamic-flags", help="flags of dynamic evaluation; default: the segment of training")
    parser.add_argument(
        "--dynamic-memory",
        type=int,
        help="another memory for dynamic evaluation",
    )
    parser.add_argument("--results", type=Path, help="the JSON file of all scores; default: RUN/card.json")
    parser.add_argument("--commit", help="the commit that trained the run, if run.json has none")
    parser.add_argument("--device", default="auto", help="where to score: auto, cpu, cuda")
    asked = parser.parse_args(arguments)
    if not (asked.run / "run.json").is_file():
        parser.error(
            f"{asked.run} is not a training run: it has no run.json; give the folder that --out of train named"
        )
    with usage_errors(parser):
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        if asked.out.is_dir() or not os.access(asked.out.parent, os.W_OK):
            parser.error(f"--out {asked.out} is not writable; name another file")
        asked.out.write_text(card(asked, parser))


def integers(words: str) -> list[int]:
    return [int(word) for word in words.split(",") if word]


def numbers(words: str) -> list[float]:
    return [float(word) for word in words.split(",") if word]


def card(asked: argparse.Namespace, parser: argparse.ArgumentParser) -> str:
    about = json.loads((asked.run / "run.json").read_text())
    commit, data = training_commit(about, asked.commit, parser), about["data"]
    recipe, found = load_recipe(str(asked.run / "recipe.toml")), find_model(asked.run, keep=["README.md"])
    model = open_model(found)
    tokenizer = model.tokenizer
    unit = "perplexity" if tokenizer.kind == "words" else f"bits_per_{tokenizer.unit}"
    check_options(asked, recipe, parser)
    where = find_device(asked.device)
    lengths = split_lengths(asked.shorter, data["name"], unit, parser) if asked.shorter else None
    facts = run_facts(asked.run)
    results = asked.results or asked.run / "card.json"
    scores = Scores(results, asked.run, model.hash, asked.device, unit=unit, run=facts)
    rows = with_comparable(list(Search(asked, recipe, data["name"], scores)))
    scores.save(rows=[asdict(row) | {"command": row.command} for row in rows])
    paragraphs = [upper_bound(asked.shorter, *lengths, rows)] if lengths else []
    paragraphs += [DYNAMIC] * bool(asked.dynamic) + [f"\n{note}\n" for note in asked.note]
    memory = f", {facts['peak_gib']:.1f} GiB" if facts["peak_gib"] else ""
    return CARD.format(
        name=asked.out.stem,
        seed=facts["seed"],
        speed=f"Training ran at {facts['tokens_per_second']:,.0f} tokens/s{memory}. ",
        summary="\n".join(summary(rows, recipe)),
        reading=settings(next(row for row in rows if row.text.endswith("--split test"))),
        parameters=model.model.parameter_count,
        device=about["processes"][-1]["device"],
        split=data["split"],
        data=data["name"],
        scorer=f"{hardware(where)}, {str(find_dtype('auto', where)).removeprefix('torch.')}",
        unit=unit.replace("_", " "),
        rows="\n".join(map(str, rows)),
        chosen=", ".join(choices(rows)) or "nothing",
        more="".join(paragraphs),
        commit=commit,
        training=portable_command(about["processes"][0]["command"]),
        fingerprint=data["fingerprint"],
        end=LIMITED if recipe.training.seconds else "",
        **progress(asked.run, found.contents["README.md"].decode()),
    )


def check_options(asked: argparse.Namespace, recipe: Recipe, parser: argparse.ArgumentParser) -> None:
    """Refuse what cannot be scored before anything is."""
    if asked.memories and "memory" not in family(recipe.family).settings:
        parser.error(f"--memories {asked.memories}: the family {recipe.family} has no memory; leave it out")
    if asked.dynamic_memory and "clamp" not in family(recipe.family).settings:
        parser.error(f"--dynamic-memory {asked.dynamic_memory}: the family {recipe.family} has no clamp; leave it out")
    if asked.discounts and "discount" not in family(recipe.family).settings:
        parser.error(f"--discounts {asked.discounts}: the family {recipe.family} has no discount; leave it out")
    for discount in asked.discounts:
        replace(recipe.evaluation_reading(), clamp=1, discount=discount)
    if asked.pointers and not has_pointer(recipe):
        parser.error(f"--pointers {asked.pointers}: this model has no pointer; leave it out")
    for temperature in asked.temps:
        replace(recipe.evaluation_reading(), temperature=temperature)
    for rate in asked.dynamic:
        Dynamics(rate)


def choices(rows: list[Row]) -> list[str]:
    """The settings that were chosen: those with more than one value on the validation split."""
    tried = [row for row in rows if row.text.endswith("--split valid")]
    names = ("memory", "clamp", "discount", "pointer", "temperature", "rate")
    return [name for name in names if len({getattr(row, name) for row in tried}) > 1]


def summary(rows: list[Row], recipe: Recipe) -> Iterator[str]:
    """The results on test in a few lines, those on valid with the same settings, and the published one."""
    for row in rows:
        if row.text.endswith("--split test"):
            text = row.text.replace("--split test", "--split valid")
            known = [
                one.score for one in rows if one.text == text and one.command == row.command.replace(row.text, text)
            ]
            what = f"with {row.words}" if row.words else "without pointer, temperature and dynamic evaluation"
            yield f"| {what} | {f'{known[0]:.4f}' if known else 'not scored'} | {row.score:.4f} |"
    if recipe.expected.score is not None:
        yield f"| published: {recipe.expected.source} | | {recipe.expected.score:g} |"


def settings(row: Row) -> str:
    """The chosen memory, clamp and discount in words."""
    if not row.memory:
        return "no memory"
    clamp = f", distances clamped to {row.clamp:,}" if row.clamp else ""
    return f"memory {row.memory:,}{clamp}{f', discount {row.discount:g}' if row.discount else ''}"


def progress(run: Path, notes: str) -> dict[str, Any]:
    """Steps, tokens and seconds of the scored weights, which may be older than the run's last."""
    (step,) = (int(found.replace(",", "")) for found in re.findall(r", seed \d+, ([\d,]+) steps,", notes))
    records = (json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines())
    *_, record = (record for record in records if record.get("step") == step)
    return {"steps": step, "tokens": record["tokens"], "seconds": record["seconds"]}


def split_lengths(corpus: str, data: str, unit: str, parser: argparse.ArgumentParser) -> tuple[int, int]:
    """Tokens of both test splits, the shorter one first."""
    kept, total = (len(open_corpus(name, "test").ids) for name in (corpus, data))
    if unit == "perplexity" or kept > total:
        parser.error(
            f"--shorter {corpus}: {kept:,} tokens and {data} has {total:,}, in {unit}; it needs bits and fewer tokens"
        )
    return kept, total


def upper_bound(corpus: str, kept: int, total: int, rows: list[Row]) -> str:
    """The comparable score of the test split, per token of the shorter corpus."""
    score = next(row.score for row in rows if row.text.endswith("--split test") and row.is_comparable)
    return SHORTER.format(corpus=corpus, kept=kept, total=total, score=score, bound=score * total / kept)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("stopped; the same command continues")
