"""Write the card of a trained recipe whose weights are not distributed, with the command that prints each result.

    python benchmarks/make_card.py RUN --out docs/cards/NAME.md [--memories 512,1024] [--pointers 512,2000]
        [--temps 1,1.1] [--dynamic 5e-5] [--also FILE] [--shorter CORPUS] [--note TEXT]

Settings are chosen on the validation split, in this order: memory and clamp, reach of the pointer, temperature, rate of
dynamic evaluation. The test split and further texts are scored afterwards with the chosen settings. They are also
scored without a pointer, a temperature and dynamic evaluation. Only those results can be compared with papers, so they
have a column of their own.
"""

import argparse
import json
import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cards import (
    evaluate,
    longest_distance,
    memories_and_clamps,
    reading_flags,
    training_command,
    training_commit,
    usage_errors,
)

from longspan.checkpoints.model_folder import find_model, open_model
from longspan.data import open_corpus
from longspan.device import find_device, find_dtype
from longspan.models.families import family
from longspan.scoring.dynamic import Dynamics
from longspan.training.environment import hardware
from longspan.training.recipe import Recipe, load_recipe

CARD = """# {name}

{parameters:,} parameters, {seconds:,.0f} seconds of training on {device}, {steps:,} steps, {tokens:,} tokens of the
{split} split of {data}. Scored on {scorer}.

Comparable results use no pointer, no temperature and no dynamic evaluation. Best results use what their row lists.

| text | memory | clamp | comparable {unit} | best {unit} | best uses | command |
|---|---|---|---|---|---|---|
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


@dataclass(frozen=True)
class Row:
    """One way to score a text, and its score."""

    text: str
    memory: int
    clamp: int
    flags: str
    pointer: int | None
    """Positions the pointer may copy from; None for a model without a pointer."""
    temperature: float = 1.0
    rate: float | None = None
    """Learning rate of dynamic evaluation; None is static."""
    score: float = 0.0
    static: float | None = None
    """With a rate, the score without learning."""
    comparable: float | None = None
    """The comparable score of the same text, memory and clamp, where it was measured."""

    @property
    def is_comparable(self) -> bool:
        return not self.pointer and self.temperature == 1 and self.rate is None

    @property
    def command(self) -> str:
        pointer = "" if self.pointer is None else f" --pointer {self.pointer}"
        learning = "" if self.rate is None else f" --dynamic --dynamic-rate {self.rate:g}"
        return f"longspan eval MODEL {self.text} {self.flags}{pointer} --temp {self.temperature:g}{learning}"

    @property
    def uses(self) -> str:
        parts = [f"pointer {self.pointer}"] * bool(self.pointer)
        parts += [f"temperature {self.temperature:g}"] * (self.temperature != 1)
        if self.rate is not None:
            parts.append(f"dynamic {self.rate:g} (static {self.static:.4f})")
        return ", ".join(parts)

    def scored(self, model: Path, device: str, unit: str) -> "Row":
        facts = evaluate(self.command.replace(" MODEL", "", 1), model, device)
        return replace(self, score=facts[unit], static=facts.get(f"static_{unit}"))

    def __str__(self) -> str:
        name, best = self.text.removeprefix("--data "), f"{self.score:.4f}"
        known = "not measured" if self.comparable is None else f"{self.comparable:.4f}"
        scores = f"{best} | - | -" if self.is_comparable else f"{known} | {best} | {self.uses}"
        return f"| {name} | {self.memory} | {self.clamp} | {scores} | `{self.command}` |"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("run", type=Path, help="the folder of the training run")
    parser.add_argument("--out", type=Path, required=True, help="the card to write")
    parser.add_argument("--memories", type=integers, default=[], help="memories to choose from; default: the recipe's")
    parser.add_argument("--pointers", type=integers, default=[], help="reaches of the pointer to choose from")
    parser.add_argument("--temps", type=numbers, default=[], help="temperatures to choose from")
    parser.add_argument("--dynamic", type=numbers, default=[], help="rates of dynamic evaluation to choose from")
    parser.add_argument("--also", action="append", default=[], help="a further text to score, a file or a corpus")
    parser.add_argument("--shorter", help="a corpus that drops symbols from the same files, for an upper bound of bits")
    parser.add_argument("--note", action="append", default=[], help="a paragraph to add")
    parser.add_argument("--flags", default="--segment 512 --streams 8", help="flags of static evaluation")
    parser.add_argument("--dynamic-flags", default="--segment 512", help="flags of dynamic evaluation")
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
    rows = with_comparable(list(score_all(asked, recipe, data["name"], unit)))
    paragraphs = [upper_bound(asked.shorter, *lengths, rows)] if lengths else []
    paragraphs += [DYNAMIC] * bool(asked.dynamic) + [f"\n{note}\n" for note in asked.note]
    return CARD.format(
        name=asked.out.stem,
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
        training=training_command(about["processes"][0]["command"]),
        fingerprint=data["fingerprint"],
        end=LIMITED if recipe.training.seconds else "",
        **progress(asked.run, found.contents["README.md"].decode()),
    )


def check_options(asked: argparse.Namespace, recipe: Recipe, parser: argparse.ArgumentParser) -> None:
    """Refuse what cannot be scored before anything is."""
    if asked.memories and "memory" not in family(recipe.family).settings:
        parser.error(f"--memories {asked.memories}: the family {recipe.family} has no memory; leave it out")
    if asked.pointers and not has_pointer(recipe):
        parser.error(f"--pointers {asked.pointers}: this model has no pointer; leave it out")
    for temperature in asked.temps:
        replace(recipe.evaluation_reading(), temperature=temperature)
    for rate in asked.dynamic:
        Dynamics(rate)


def has_pointer(recipe: Recipe) -> bool:
    return getattr(recipe.model, "pointer_width", 0) > 0


def choices(rows: list[Row]) -> list[str]:
    """The settings that were chosen: those with more than one value on the validation split."""
    tried = [row for row in rows if row.text.endswith("--split valid")]
    names = {"memory": "memory", "clamp": "clamp", "pointer": "pointer", "temperature": "temperature", "rate": "rate"}
    return [name for key, name in names.items() if len({getattr(row, key) for row in tried}) > 1]


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


def with_comparable(rows: list[Row]) -> list[Row]:
    """Every row with the comparable score of its text, memory and clamp, where that was measured."""
    known = {(row.text, row.memory, row.clamp): row.score for row in rows if row.is_comparable}
    return [replace(row, comparable=known.get((row.text, row.memory, row.clamp))) for row in rows]


def score_all(asked: argparse.Namespace, recipe: Recipe, data: str, unit: str) -> Iterator[Row]:
    """The validation split with every candidate, then the other texts with the best."""
    usual, settings = recipe.evaluation_reading(), family(recipe.family).settings
    valid = f"--data {shlex.quote(data)} --split valid"

    def scored(rows: list[Row]) -> list[Row]:
        return [row.scored(asked.run, asked.device, unit) for row in rows]

    def best(rows: list[Row]) -> Row:
        return min(rows, key=lambda row: row.score)

    def flags(memory: int, clamp: int, rest: str) -> str:
        return f"{reading_flags(memory, clamp, settings)} {rest}".lstrip()

    memories = asked.memories or [usual.memory if "memory" in settings else 0]
    pairs = memories_and_clamps(memories, longest_distance(recipe) if "clamp" in settings else None)
    pointer = usual.pointer if has_pointer(recipe) else None
    static = scored([Row(valid, *pair, flags(*pair, asked.flags), pointer, usual.temperature) for pair in pairs])
    yield from static
    pointing = scored([replace(best(static), pointer=reach) for reach in asked.pointers if reach != usual.pointer])
    yield from pointing
    static += pointing
    tempered = [replace(best(static), temperature=value) for value in asked.temps if value != usual.temperature]
    tempered = scored(tempered)
    yield from tempered
    chosen = [best(static + tempered)]
    if asked.dynamic:
        learning = flags(chosen[0].memory, chosen[0].clamp, asked.dynamic_flags)
        dynamic = [replace(chosen[0], flags=learning, rate=rate) for rate in asked.dynamic]
        if len(dynamic) > 1:
            dynamic = scored(dynamic)
            yield from dynamic
        chosen.append(best(dynamic))
    if not chosen[0].is_comparable:
        chosen.insert(0, replace(chosen[0], pointer=None if pointer is None else 0, temperature=1.0))
    for text in (f"{shlex.quote(data)} --split test", *map(shlex.quote, asked.also)):
        yield from scored([replace(row, text=f"--data {text}") for row in chosen])


if __name__ == "__main__":
    main()
