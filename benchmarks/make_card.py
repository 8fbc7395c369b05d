"""The card of a trained recipe whose weights do not ship: its figures, each beside the command that repeats it.

    python benchmarks/make_card.py RUN --out docs/cards/NAME.md [--memories 512,1024] [--dynamic 5e-5] [--also FILE]
        [--copies 512,2000] [--temps 1,1.1] [--shorter CORPUS] [--note TEXT]

Memory and clamp, then how far back to copy from, the temperature and the rate of dynamic evaluation where several are
given, are chosen on the validation split; the test split and further files are read afterwards, and choose nothing. A
model that copies reads them without copying too.
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

from cards import commit_of, longspan_errors, read_as, scored, training_command, ways

from longspan.checkpoints.model_folder import find_model, open_model
from longspan.config import keys
from longspan.data import open_corpus
from longspan.device import find_device, find_dtype
from longspan.evaluation.dynamic import Dynamics
from longspan.evaluation.likelihood import check_temperature
from longspan.training.environment import hardware
from longspan.training.recipe import load_recipe

CARD = """# {name}

{parameters:,} parameters, {seconds:,.0f} seconds of training on {device}, {steps:,} steps, {tokens:,} tokens of the
{split} split of {data}. Scored on {scorer}.

| text | memory | clamp | {unit} | the command that repeats it |
|---|---|---|---|---|
{rows}

Chosen on the validation split alone, the best of what is listed: {chosen}. The test split chose nothing.
{more}
| | | |
|---|---|---|
| code | commit {commit} | `{training}` |
| training text | fingerprint | {fingerprint} |
{end}"""
LIMITED = """
A run that is limited in seconds ends at another step on another machine, and then at other weights.
"""
SHORTER = """
{corpus} leaves symbols of the same files out: its test split has {kept:,} tokens, this one {whole:,}. Whoever has the
whole text has the shorter one too, so this model spends at most {whole:,} / {kept:,} x {score:.4f} = {bound:.4f} on it.
That is a bound, of all places the others may stand at together, and not what a reading of the shorter text comes to.
"""
DYNAMIC = """
Dynamic evaluation (Krause et al. 2018) takes a gradient step on every segment once it has been scored, never on what is
to come. Its figures stand beside those of the same reading without learning, and are not to be compared with static
ones of others.
"""


@dataclass(frozen=True)
class Reading:
    """One way to read a text, and what it comes to; `static` is the score without learning where it learns."""

    text: str
    memory: int
    clamp: int
    flags: str
    copy: int | None = None
    temp: float = 1.0
    rate: float | None = None
    score: float = 0.0
    static: float | None = None

    @property
    def command(self) -> str:
        copying = "" if self.copy is None else f" --copy {self.copy}"
        tempered = "" if self.temp == 1 else f" --temp {self.temp:g}"
        learning = "" if self.rate is None else f" --dynamic --dynamic-rate {self.rate:g}"
        return f"longspan eval MODEL {self.text} {self.flags}{copying}{tempered}{learning}"

    def on(self, model: Path, device: str, unit: str) -> "Reading":
        facts = scored(self.command.replace(" MODEL", "", 1), model, device)
        return replace(self, score=facts[unit], static=facts.get(f"static_{unit}"))

    def __str__(self) -> str:
        name = self.text.removeprefix("--data ") + ", dynamic" * (self.rate is not None)
        name += ", without copying" * (self.copy == 0)
        beside = "" if self.static is None else f" (static {self.static:.4f})"
        return f"| {name} | {self.memory} | {self.clamp} | {self.score:.4f}{beside} | `{self.command}` |"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("run", type=Path, help="the folder of the training run")
    parser.add_argument("--out", type=Path, required=True, help="the card")
    parser.add_argument("--memories", type=integers, default=[], help="to choose among; the recipe's unless told")
    parser.add_argument("--copies", type=integers, default=[], help="how far back to copy from, to choose among")
    parser.add_argument("--temps", type=numbers, default=[], help="temperatures to choose among")
    parser.add_argument("--dynamic", type=numbers, default=[], help="rates of dynamic evaluation to choose among")
    parser.add_argument("--also", action="append", default=[], help="a further text to score, a file or a corpus")
    parser.add_argument("--shorter", help="a corpus that leaves symbols of the same files out: its bits are bounded")
    parser.add_argument("--note", action="append", default=[], help="a paragraph to add")
    parser.add_argument("--flags", default="--segment 512 --lanes 8", help="for every scoring but the dynamic ones")
    parser.add_argument("--dynamic-flags", default="--segment 512", help="for those")
    parser.add_argument("--commit", help="of the code that trained it, where the run does not know")
    parser.add_argument("--device", default="auto", help="where to score: auto, cpu, cuda")
    asked = parser.parse_args(arguments)
    if not (asked.run / "run.json").is_file():
        parser.error(f"{asked.run} is not the folder of a run: it has no run.json")
    with longspan_errors(parser):
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        if asked.out.is_dir() or not os.access(asked.out.parent, os.W_OK):
            parser.error(f"--out {asked.out} cannot be written")
        asked.out.write_text(card(asked, parser))


def integers(words: str) -> list[int]:
    return [int(word) for word in words.split(",") if word]


def numbers(words: str) -> list[float]:
    return [float(word) for word in words.split(",") if word]


def card(asked: argparse.Namespace, parser: argparse.ArgumentParser) -> str:
    about = json.loads((asked.run / "run.json").read_text())
    commit, data = commit_of(about, asked.commit, parser), about["data"]
    recipe, found = load_recipe(str(asked.run / "recipe.toml")), find_model(asked.run, keep=["README.md"])
    model = open_model(found)
    tokens = model.tokenizer
    unit = "perplexity" if tokens.kind == "words" else f"bits_per_{tokens.unit}"
    known = keys(type(recipe.model))
    if asked.memories and "memory" not in known:
        parser.error(f"--memories {asked.memories}: a {recipe.family} has no model.memory")
    for temp in asked.temps:
        check_temperature(temp)
    for rate in asked.dynamic:
        Dynamics(rate)
    where = find_device(asked.device)
    bound = lengths(asked.shorter, data["name"], unit, parser) if asked.shorter else None
    read = list(readings(asked, recipe, data["name"], known, unit))
    paragraphs = [bounded(asked.shorter, *bound, read)] if bound else []
    paragraphs += [DYNAMIC] * bool(asked.dynamic) + [f"\n{note}\n" for note in asked.note]
    return CARD.format(
        name=asked.out.stem,
        parameters=model.model.parameter_count,
        device=about["processes"][-1]["device"],
        split=data["split"],
        data=data["name"],
        scorer=f"{hardware(where)}, {str(find_dtype('auto', where)).removeprefix('torch.')}",
        unit=unit.replace("_", " "),
        rows="\n".join(map(str, read)),
        chosen=", ".join(choices(read)) or "nothing",
        more="".join(paragraphs),
        commit=commit,
        training=training_command(about["processes"][0]["command"]),
        fingerprint=data["fingerprint"],
        end=LIMITED if recipe.training.seconds else "",
        **progress(asked.run, found.contents["README.md"].decode()),
    )


def choices(read: list[Reading]) -> list[str]:
    """What was chosen: the settings that were tried at more than one value, which only the validation split is."""
    tried = [way for way in read if way.text.endswith("--split valid")]
    names = {"memory": "memory", "clamp": "clamp", "copy": "reach of copying", "temp": "temperature", "rate": "rate"}
    return [name for key, name in names.items() if len({getattr(way, key) for way in tried}) > 1]


def progress(run: Path, notes: str) -> dict[str, Any]:
    """Steps, tokens and seconds of the weights that are scored, which need not be the run's last."""
    (step,) = (int(found.replace(",", "")) for found in re.findall(r", seed \d+, ([\d,]+) steps,", notes))
    rows = (json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines())
    *_, row = (row for row in rows if row.get("step") == step)
    return {"steps": step, "tokens": row["tokens"], "seconds": row["seconds"]}


def lengths(corpus: str, data: str, unit: str, parser: argparse.ArgumentParser) -> tuple[int, int]:
    """Symbols of both test splits: the shorter one's, and all."""
    kept, whole = (len(open_corpus(name, "test").ids) for name in (corpus, data))
    if unit == "perplexity" or kept > whole:
        parser.error(f"--shorter {corpus}: {kept:,} of {whole:,} tokens and {unit}; it is for bits of fewer symbols")
    return kept, whole


def bounded(corpus: str, kept: int, whole: int, read: list[Reading]) -> str:
    """What the test split costs at most per token of a corpus that is told by it."""
    score = next(way.score for way in read if way.text.endswith("--split test") and way.rate is None)
    return SHORTER.format(corpus=corpus, kept=kept, whole=whole, score=score, bound=score * whole / kept)


def readings(asked: argparse.Namespace, recipe: Any, data: str, known: list[str], unit: str) -> Iterator[Reading]:
    """Valid in every way, then test and all else in the best."""

    def way_of(text: str, memory: int, clamp: int, flags: str) -> Reading:
        return Reading(text, memory, clamp, f"{read_as(memory, clamp, known)} {flags}".lstrip(), recipe.evaluation.copy)

    def best(read: list[Reading]) -> Reading:
        return min(read, key=lambda way: way.score)

    own = getattr(recipe.model, "memory", 0)
    seen = recipe.model.segment + own - 1
    pairs = ways(asked.memories or [recipe.evaluation.memory or own], seen if "clamp" in known else None)
    valid = f"--data {shlex.quote(data)} --split valid"
    static = [way_of(valid, *pair, asked.flags).on(asked.run, asked.device, unit) for pair in pairs]
    yield from static
    trained = getattr(recipe.model, "copy", 0)
    usual = trained if recipe.evaluation.copy is None else recipe.evaluation.copy
    copying = [replace(best(static), copy=copy) for copy in asked.copies if copy != usual]
    copying = [way.on(asked.run, asked.device, unit) for way in copying]
    yield from copying
    static += copying
    tempered = [replace(best(static), temp=temp) for temp in asked.temps if temp != 1]
    tempered = [way.on(asked.run, asked.device, unit) for way in tempered]
    yield from tempered
    chosen = [best(static + tempered)]
    if asked.dynamic:
        pair = (chosen[0].memory, chosen[0].clamp)
        plain = replace(way_of(valid, *pair, asked.dynamic_flags), copy=chosen[0].copy, temp=chosen[0].temp)
        dynamic = [replace(plain, rate=rate) for rate in asked.dynamic]
        if len(dynamic) > 1:
            dynamic = [way.on(asked.run, asked.device, unit) for way in dynamic]
            yield from dynamic
        chosen.append(best(dynamic))
    if trained and chosen[0].copy != 0:
        chosen.append(replace(chosen[0], copy=0))
    for text in (f"{shlex.quote(data)} --split test", *map(shlex.quote, asked.also)):
        for way in chosen:
            yield replace(way, text=f"--data {text}").on(asked.run, asked.device, unit)


if __name__ == "__main__":
    main()
