"""The model in the box of a training run: its weights narrowed, scored, and put in place with their card.

    python benchmarks/make_box.py RUN [--device cuda] [--commit SHA] [--out FOLDER]

Every figure of the card is what the command beside it prints: the very command is run here, on the folder to be.
"""

import argparse
import dataclasses
import hashlib
import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from cards import commit_of, longspan, read_as, scored, training_command, ways

from longspan.box import FOLDER
from longspan.data import open_corpus
from longspan.text_model import load

ROOT = Path(__file__).resolve().parents[1]
CORPUS, PASSAGE, SLICE = "english-novels", "tests/box/passage.txt", 20_000
MEMORIES = (256, 512, 1024, 2048, 4096)
ENOUGH = 0.002  # bits: a longer memory than needed to come this near the best only makes writing slower
# Any cut of the stream gives the same losses with --same-length; this one suits a GPU and fits into a laptop.
SCORING = "--segment 1024 --lanes 8 --dtype float32"

CARD = """# The model in the box

A Transformer-XL of {parameters:,} parameters that reads and writes bytes, trained on 90 English novels of 1839 to 1930.
It is what `longspan generate`, `eval`, `info` and `longspan.load()` use where no model is named.

    longspan generate -p "It was late in the evening when" -n 500 --temp 0.7 --top-p 0.95

It is small: it spells, mostly keeps to its grammar, goes on with the names it has read, and knows nothing. What it
writes carries the manners and prejudices of its books. It is here to try things with, not to be relied on.

## Figures

In bits per byte. With less memory every byte is predicted from fewer of the bytes before it, the weights being the
same. `clamp` is the distance beyond which all distances look alike, 0 for none. What the model has of both unless told,
a memory of {memory:,} bytes and a clamp of {clamp}, was chosen on the validation books alone: the best clamp, and the
smallest memory within {enough} bits of the best up to {most:,}, since a longer one writes more slowly. The five test
books, which docs/box.md names, chose nothing.

The novels are put where the commands find them by `longspan data get english-novels --from FILE`.

| text | memory | clamp | bits per byte | the command that repeats it |
|---|---|---|---|---|
{rows}

The command for the passage is for a checkout. `time longspan generate -p "It was" -n 5000` tells how fast your machine
writes; it takes no more memory at the end than at the beginning.

## What it was made from

| | | |
|---|---|---|
| weights | SHA-256 {weights} | `sha256sum model.safetensors` |
| training text | fingerprint {text} | `python -c "{fingerprint}"` |
| code | commit {commit} | `{training}`, then `make box RUN=RUN` |

A run that is limited in seconds ends at another step on another machine, and then at other weights.
"""
FINGERPRINT = f"from longspan.data import open_corpus; print(open_corpus('{CORPUS}', 'train').fingerprint)"


@dataclass(frozen=True)
class Figure:
    """A row of the card; the command is as a reader types it, without the model."""

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
    parser.add_argument("--commit", help="of the code that trained it, where the run does not know")
    parser.add_argument("--out", type=Path, default=FOLDER, help="the box, unless told")
    parser.add_argument("--most", type=int, default=1024, help="the longest memory it may have unless told")
    asked = parser.parse_args(arguments)
    about = json.loads((asked.run / "run.json").read_text())
    commit = commit_of(about, asked.commit, parser)
    if about["data"]["name"] != CORPUS:
        parser.error(f"the run was trained on {about['data']['name']}; the box holds a model of {CORPUS}")
    with tempfile.TemporaryDirectory() as scratch:
        model, notes = Path(scratch) / "model", Path(scratch) / "notes.md"
        longspan("export", asked.run, model, "--dtype", "bfloat16")
        figures, chosen = judge(model, asked.device, asked.most)
        notes.write_text(
            CARD.format(
                parameters=load(model).parameter_count,
                memory=chosen.memory,
                clamp=chosen.clamp,
                most=asked.most,
                enough=ENOUGH,
                rows="\n".join(map(str, figures)),
                weights=hashlib.sha256((model / "model.safetensors").read_bytes()).hexdigest(),
                text=about["data"]["fingerprint"],
                fingerprint=FINGERPRINT,
                commit=commit,
                training=training_command(about["processes"][0]["command"]),
            )
        )
        if (asked.out / "manifest.json").is_file():
            shutil.rmtree(asked.out)
        keys = (f"model.memory={chosen.memory}", f"model.clamp={chosen.clamp}", "model.same_length=true")
        lasting = [part for key in keys for part in ("--set", key)]
        print(longspan("export", asked.run, asked.out, "--dtype", "bfloat16", *lasting, "--notes", notes), end="")


def judge(model: Path, device: str, most: int) -> tuple[list[Figure], Figure]:
    """All figures of the card, and the one whose memory and clamp the validation books choose. Test is read after."""
    config = load(model).config
    seen = config.segment + config.memory - 1
    valid = [split_figure(model, "valid", m, c, device) for m, c in ways(MEMORIES, seen)]
    best = min(valid, key=lambda figure: figure.bits)
    fitting = [figure for figure in valid if figure.clamp == best.clamp or figure.memory <= seen]
    allowed = [figure for figure in fitting if figure.memory <= most]
    least = min(figure.bits for figure in allowed)
    chosen = next(figure for figure in allowed if figure.bits <= least + ENOUGH)
    chosen = dataclasses.replace(chosen, clamp=best.clamp)
    test = [split_figure(model, "test", memory, best.clamp, device) for memory in MEMORIES]
    slices = [slice_figure(model, memory, best.clamp, device) for memory in dict.fromkeys((256, chosen.memory))]
    # In the box memory and clamp are the model's own, so that a reader need not name them.
    command = f"longspan eval --data {PASSAGE} --dtype float32"
    bits = score(f"{command} {read_as(chosen.memory, best.clamp)}", model, device)
    return [*valid, *test, *slices, Figure("passage", chosen.memory, best.clamp, bits, command)], chosen


def split_figure(model: Path, split: str, memory: int, clamp: int, device: str) -> Figure:
    command = f"longspan eval --data {CORPUS} --split {split} {read_as(memory, clamp)} {SCORING}"
    return Figure(split, memory, clamp, score(command, model, device), command)


def slice_figure(model: Path, memory: int, clamp: int, device: str) -> Figure:
    """The first bytes of the first test book: what a test can score on a CPU."""
    program = (
        f"import longspan, longspan.data as d; text = d.open_corpus('{CORPUS}', 'test').ids[:{SLICE}].tobytes(); "
        f"print(longspan.load(memory={memory}).score(text).bits)"
    )
    text = open_corpus(CORPUS, "test").ids[:SLICE].tobytes()
    reader = load(model, memory=memory, clamp=clamp, same_length=True, device=device, dtype="float32")
    return Figure(f"test, first {SLICE}", memory, clamp, reader.score(text).bits, f'python -c "{program}"')


def score(command: str, model: Path, device: str) -> float:
    return float(scored(command.replace(PASSAGE, str(ROOT / PASSAGE)), model, device)["bits_per_byte"])


if __name__ == "__main__":
    main()
