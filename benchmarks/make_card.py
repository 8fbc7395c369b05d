"""The card of a trained recipe whose weights do not ship: its figures, each beside the command that repeats it.

    python benchmarks/make_card.py RUN --out docs/cards/NAME.md [--memories 512,1024] [--dynamic 5e-5] [--also FILE]
        [--shorter CORPUS]

Memory and clamp, and the rate of dynamic evaluation where several are given, are chosen on the validation split;
the test split and further files are read afterwards, and choose nothing.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from cards import commit_of, read_as, scored, training_command, ways

from longspan.data import open_corpus
from longspan.text_model import load
from longspan.training.recipe import load_recipe

CARD = """# {name}

{parameters:,} parameters, {seconds:,.0f} seconds of training on {device}, {steps:,} steps, {tokens:,} tokens of the
{split} split of {data}.

| text | memory | clamp | {unit} | the command that repeats it |
|---|---|---|---|---|
{rows}

{chosen} were chosen on the validation split alone: the best of what is listed. The test split chose nothing.
{shorter}{dynamic}
| | | |
|---|---|---|
| code | commit {commit} | `{training}` |
| training text | fingerprint | {fingerprint} |

A run that is limited in seconds ends at another step on another machine, and then at other weights.
"""
SHORTER = """
{corpus} leaves symbols of the same files out: its test split has {kept:,} tokens, this one {whole:,}. Whoever has the
whole text has the shorter one too, so this model spends at most {whole:,} / {kept:,} x {score:.4f} = {bound:.4f} on it.
"""
DYNAMIC = """
Dynamic evaluation (Krause et al. 2018) takes a gradient step on every segment once it has been scored, never on what is
to come; its figures stand beside the static ones, and are not to be compared with those of others.
"""


@dataclass(frozen=True)
class Reading:
    """One way to read a text, and what it comes to."""

    text: str
    memory: int
    clamp: int
    flags: str
    rate: float | None = None
    score: float = 0.0

    @property
    def command(self) -> str:
        learning = "" if self.rate is None else f" --dynamic --dynamic-rate {self.rate:g}"
        return f"longspan eval MODEL {self.text} {read_as(self.memory, self.clamp)} {self.flags}{learning}"

    def on(self, model: Path, device: str, unit: str) -> "Reading":
        facts = scored(self.command.replace(" MODEL", ""), model, device)
        return replace(self, score=facts[unit])

    def __str__(self) -> str:
        name = self.text.removeprefix("--data ") + ", dynamic" * (self.rate is not None)
        return f"| {name} | {self.memory} | {self.clamp} | {self.score:.4f} | `{self.command}` |"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("run", type=Path, help="the folder of the training run")
    parser.add_argument("--out", type=Path, required=True, help="the card")
    parser.add_argument("--memories", default="", help="to choose among, by commas; the recipe's unless told")
    parser.add_argument("--dynamic", default="", help="rates of dynamic evaluation to choose among; none unless told")
    parser.add_argument("--also", action="append", default=[], help="a further text to score, a file or a corpus")
    parser.add_argument("--shorter", help="a corpus that leaves symbols of the same files out: its bits are bounded")
    parser.add_argument("--flags", default="--segment 512 --lanes 8", help="for every scoring but the dynamic ones")
    parser.add_argument("--dynamic-flags", default="--segment 512", help="for those")
    parser.add_argument("--commit", help="of the code that trained it, where the run does not know")
    parser.add_argument("--device", default="auto", help="where to score: auto, cpu, cuda")
    asked = parser.parse_args(arguments)
    about = json.loads((asked.run / "run.json").read_text())
    commit, data = commit_of(about, asked.commit, parser), about["data"]
    recipe, model = load_recipe(str(asked.run / "recipe.toml")), load(asked.run)
    unit = "perplexity" if model.tokenizer.kind == "words" else "bits_per_byte"
    memories = [int(m) for m in asked.memories.split(",") if m] or [recipe.evaluation.memory or recipe.model.memory]
    found = list(readings(asked, data["name"], memories, recipe.model.segment + recipe.model.memory - 1, unit))
    last = json.loads((asked.run / "metrics.jsonl").read_text().splitlines()[-1])
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(
        CARD.format(
            name=asked.out.stem,
            parameters=model.parameter_count,
            seconds=last["seconds"],
            steps=last["step"],
            tokens=last["tokens"],
            device=about["processes"][-1]["device"],
            split=data["split"],
            data=data["name"],
            unit=unit.replace("_", " "),
            rows="\n".join(map(str, found)),
            chosen="Memory, clamp and rate" if asked.dynamic else "Memory and clamp",
            shorter=shorter(asked.shorter, data["name"], found) if asked.shorter else "",
            dynamic=DYNAMIC if asked.dynamic else "",
            commit=commit,
            training=training_command(about["processes"][0]["command"], asked.out.stem),
            fingerprint=data["fingerprint"],
        )
    )


def shorter(corpus: str, data: str, found: list[Reading]) -> str:
    """What the test split costs at most per token of a corpus that is told by it."""
    (score,) = (way.score for way in found if way.text == f"--data {data} --split test" and way.rate is None)
    kept, whole = (len(open_corpus(name, "test").ids) for name in (corpus, data))
    return SHORTER.format(corpus=corpus, kept=kept, whole=whole, score=score, bound=score * whole / kept)


def readings(asked: argparse.Namespace, data: str, memories: list[int], seen: int, unit: str) -> Iterator[Reading]:
    """Valid in every way, then test and all else in the best."""

    def best(read: list[Reading]) -> Reading:
        return min(read, key=lambda way: way.score)

    static = [Reading(f"--data {data} --split valid", m, c, asked.flags) for m, c in ways(memories, seen)]
    static = [way.on(asked.run, asked.device, unit) for way in static]
    yield from static
    chosen = [best(static)]
    rates = [float(rate) for rate in asked.dynamic.split(",") if rate]
    if rates:
        dynamic = [replace(chosen[0], flags=asked.dynamic_flags, rate=rate) for rate in rates]
        if len(rates) > 1:
            dynamic = [way.on(asked.run, asked.device, unit) for way in dynamic]
            yield from dynamic
        chosen.append(best(dynamic))
    for text in (f"--data {data} --split test", *(f"--data {text}" for text in asked.also)):
        for way in chosen:
            yield replace(way, text=text).on(asked.run, asked.device, unit)


if __name__ == "__main__":
    main()
