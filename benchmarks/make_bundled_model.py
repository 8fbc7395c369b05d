"""Make the bundled model from a training run: export its weights as int8, score them and write the card.

    python benchmarks/make_bundled_model.py RUN [--device cuda] [--commit SHA] [--out FOLDER]

Every result on the card is printed by the command next to it, run here on the exported weights. Results are written at
once, to RUN/bundled.json and (before rounding) RUN/unrounded.json, and a second call runs only what is missing. The
figures that tests pin and the samples are written by pin_bundled_model.py.
"""

import argparse
import dataclasses
import hashlib
import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cards import (
    Scores,
    is_beyond,
    memories_and_clamps,
    output_of,
    reading_flags,
    training_commit,
    usage_errors,
)

from longspan.bundled import FOLDER
from longspan.checkpoints.model_folder import load_model
from longspan.data import open_corpus
from longspan.experiments.run_facts import portable_command
from longspan.text_model import load
from longspan.training.recipe import load_recipe

ROOT = Path(__file__).resolve().parents[1]
TRAINED_ON, CORPUS = "novels-and-books", "english-novels"
PASSAGE, SLICE = "tests/bundled/passage.txt", 20_000
MOST_BYTES = 12_000_000  # of the folder
MEMORIES = (256, 512, 1024, 2048, 4096)
TOLERANCE = 0.002  # bits: a longer memory that gains less than this only makes generation slower
# With --same-length the segment and the number of streams do not change a loss beyond the start of a stream. These suit
# a GPU and fit on a laptop.
SCORING = "--segment 1024 --streams 8 --dtype float32"

CARD = """# The bundled model

A byte-level language model of the family longspan-xl with {parameters:,} parameters, trained on 90 English novels
published between 1839 and 1930 and 186 other books of Project Gutenberg. `longspan generate`, `eval`, `info` and
`longspan.load()` use it when no model is named.

    longspan generate -p "It was late in the evening when" -n 500 --temp 0.7 --top-p 0.95

It is small. Its spelling is correct, its grammar mostly is, and it reuses the names in its prompt. It has no knowledge
of the world, and its output reflects the attitudes and prejudices of its books. Use it to try longspan, not as a source
of facts.

## Results

All results are bits per byte of the same weights, without a pointer, a temperature or dynamic evaluation. `memory` is
the number of earlier bytes a layer may attend to. Distances beyond `clamp` share its position key; 0 is off.
The commands set a clamp, which turns off the discount for far keys. Without `--clamp`, the model uses both.

The defaults of the model, a memory of {memory:,} bytes and a clamp of {clamp}, were chosen on the validation books
alone: the best clamp, and the smallest memory within {tolerance} bits of the best up to {most:,}, because a longer
memory makes generation slower. The five test books were scored afterwards. docs/bundled_model.md lists the books.

The weights are stored as int8 (docs/training.md#int8), and all results are of these weights. The float32 weights of the
run have {unrounded:.4f} bits per byte on test with the default memory and clamp; rounding them changes that by
{change:+.4f} (`{unrounded_command}`).

Run `longspan data get english-novels --from FILE` first.

| text | memory | clamp | bits per byte | command |
|---|---|---|---|---|
{rows}

The command for the passage needs a checkout. `time longspan generate -p "It was" -n 5000` measures the speed of your
machine. Memory use is constant during generation.

## Provenance

| | | |
|---|---|---|
| weights | SHA-256 {weights} | `sha256sum model.safetensors` |
| training text | fingerprint {text} | `python -c "{fingerprint}"` |
| code | commit {commit} | `{training}`, then `make bundled RUN=RUN` |

The run is limited in seconds, so on another machine it ends at another step, with other weights.
"""
FINGERPRINT = f"from longspan.data import open_corpus; print(open_corpus('{TRAINED_ON}', 'train').fingerprint)"


@dataclass(frozen=True)
class Row:
    """A row of the card. The command is the one a reader types; it names no model."""

    text: str
    memory: int
    clamp: int
    bits: float
    command: str

    def __str__(self) -> str:
        return f"| {self.text} | {self.memory} | {self.clamp} | {self.bits:.4f} | `{self.command}` |"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("run", type=Path, help="the folder of the training run")
    parser.add_argument("--device", default="auto", help="where to score: auto, cpu, cuda")
    parser.add_argument("--commit", help="the commit that trained the run, which is written to its run.json")
    parser.add_argument("--out", type=Path, default=FOLDER, help="the model folder to write; default: the package's")
    parser.add_argument("--most", type=int, default=1024, help="upper bound of the default memory; default: 1024")
    asked = parser.parse_args(arguments)
    with usage_errors(parser):
        about = json.loads((asked.run / "run.json").read_text())
        commit = training_commit(about, asked.commit, parser)
        if about["data"]["name"] != TRAINED_ON:
            parser.error(f"the run was trained on {about['data']['name']}; the bundled model needs {TRAINED_ON}")
        about["processes"][-1]["commit"] = commit
        (asked.run / "run.json").write_text(json.dumps(about, indent=1) + "\n")
        make(asked, about, commit)


def make(asked: argparse.Namespace, about: dict[str, Any], commit: str) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        model, notes = Path(scratch) / "model", Path(scratch) / "notes.md"
        output_of("export", asked.run, model, "--int8")
        recipe = load_recipe(str(asked.run / "recipe.toml"))
        score = Scores(asked.run / "bundled.json", model, load_model(model).hash, asked.device)
        rows, chosen = all_rows(score, recipe.longest_distance, asked.most)
        rounded = next(r for r in rows if (r.text, r.memory, r.clamp) == ("test", chosen.memory, chosen.clamp))
        score = Scores(asked.run / "unrounded.json", asked.run, load_model(asked.run).hash, asked.device)
        unrounded = score(rounded.command)["bits_per_byte"]
        notes.write_text(
            CARD.format(
                parameters=load(model).parameter_count,
                memory=chosen.memory,
                clamp=chosen.clamp,
                most=asked.most,
                tolerance=TOLERANCE,
                unrounded=unrounded,
                change=rounded.bits - unrounded,
                unrounded_command=rounded.command.replace("longspan eval", "longspan eval RUN"),
                rows="\n".join(map(str, rows)),
                weights=hashlib.sha256((model / "model.safetensors").read_bytes()).hexdigest(),
                text=about["data"]["fingerprint"],
                fingerprint=FINGERPRINT,
                commit=commit,
                training=portable_command(about["processes"][0]["command"]),
            )
        )
        if (asked.out / "manifest.json").is_file():
            shutil.rmtree(asked.out)
        discount = recipe.model.far_discount if chosen.clamp else 0.0
        chosen_reading = {"memory": chosen.memory, "clamp": chosen.clamp, "discount": discount, "same_length": "true"}
        sets = [part for key, value in chosen_reading.items() for part in ("--set", f"reading.{key}={value}")]
        print(output_of("export", asked.run, asked.out, "--int8", *sets, "--notes", notes), end="")
    print(f"bits per byte on test: {rounded.bits:.4f}, {unrounded:.4f} before rounding to int8")
    size = sum(path.stat().st_size for path in asked.out.iterdir())
    print(f"{asked.out}: {size:,} bytes" + f", more than {MOST_BYTES:,}" * (size > MOST_BYTES))


def all_rows(score: Scores, longest: int, most: int) -> tuple[list[Row], Row]:
    """All rows of the card, and the row with the memory and clamp that the validation books choose.

    The test books are scored after that choice.
    """
    pairs = memories_and_clamps(MEMORIES, longest)
    valid = [split_row(score, "valid", memory, clamp) for memory, clamp in pairs]
    best = min(valid, key=lambda row: row.bits)
    same_clamp = [row for row in valid if row.clamp == best.clamp or not is_beyond(row.memory, longest)]
    allowed = [row for row in same_clamp if row.memory <= most]
    lowest = min(row.bits for row in allowed)
    chosen = next(row for row in allowed if row.bits <= lowest + TOLERANCE)
    chosen = dataclasses.replace(chosen, clamp=best.clamp)
    test = [split_row(score, "test", memory, best.clamp) for memory in MEMORIES]
    memories = dict.fromkeys((256, chosen.memory))
    slices = [slice_row(score.model, memory, best.clamp, score.device) for memory in memories]
    # The bundled model is exported with the chosen memory and clamp, so the reader's command does not set them.
    command = f"longspan eval --data {PASSAGE} --dtype float32"
    flags = reading_flags(chosen.memory, best.clamp)
    bits = score(f"{command} {flags}".replace(PASSAGE, str(ROOT / PASSAGE)))["bits_per_byte"]
    return [*valid, *test, *slices, Row("passage", chosen.memory, best.clamp, bits, command)], chosen


def split_row(score: Scores, split: str, memory: int, clamp: int) -> Row:
    command = f"longspan eval --data {CORPUS} --split {split} {reading_flags(memory, clamp)} {SCORING}"
    return Row(split, memory, clamp, score(command)["bits_per_byte"], command)


def slice_row(model: Path, memory: int, clamp: int, device: str) -> Row:
    """The first bytes of the first test book, which a test can score on a CPU."""
    program = (
        f"import longspan, longspan.data as d; text = d.open_corpus('{CORPUS}', 'test').ids[:{SLICE}].tobytes(); "
        f"print(longspan.load(memory={memory}, dtype='float32').score(text).bits)"
    )
    text = open_corpus(CORPUS, "test").ids[:SLICE].tobytes()
    loaded = load(model, memory=memory, clamp=clamp, same_length=True, device=device, dtype="float32")
    return Row(f"test, first {SLICE}", memory, clamp, loaded.score(text).bits, f'python -c "{program}"')


if __name__ == "__main__":
    main()
