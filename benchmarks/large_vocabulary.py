"""Memory and seconds of building and using a vocabulary of words as large as that of One Billion Word.

    python benchmarks/large_vocabulary.py --out words.json

The text is synthetic: every word once, and draws by Zipf's law. Then, each in a new process: the vocabulary is built
and the text encoded, and a small model with an adaptive softmax is trained for two steps and saved. Memory is the
largest sum of the resident memory of all processes, sampled every 50 ms.
"""

import argparse
import json
import os
import platform
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from prepare_text import run, say, size

WORDS = 793_471  # with <eos> and <unk>
PREPARE = """
import json, sys
from longspan.data import open_corpus
train = open_corpus(sys.argv[1], "train", sys.argv[2])
print(json.dumps({"vocabulary": train.tokenizer.size, "tokens": len(train)}))
"""
TRAIN = """
import json, sys
from pathlib import Path
from longspan.cli.main import main
folder, out = Path(sys.argv[1]), sys.argv[2]
sys.argv = ["longspan", "train", "--data", str(folder), "--out", sys.argv[2], "--recipe", str(folder.parent / "r.toml")]
sys.stdout = sys.stderr
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
sys.stdout = sys.__stdout__
rows = [json.loads(line) for line in Path(out, "metrics.jsonl").read_text().splitlines()]
print(json.dumps({"losses": [row["loss"] for row in rows]}))
"""
RECIPE = """
[model]
family = "transformer-xl"
vocabulary = 793471
layers = 2
width = 64
heads = 2
cutoffs = [60000, 100000, 640000]
div_val = 4
[data]
tokenizer = "words"
[training]
steps = 2
batch = 4
segment = 32
memory = 32
save_every = 2
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=20_000_000)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        found = measure(Path(name), given.tokens)
    found |= {"cores": len(os.sched_getaffinity(0)), "machine": platform.machine()}
    text = json.dumps(found, indent=1)
    if given.out:
        given.out.write_text(text + "\n")
    print(text)


def measure(folder: Path, tokens: int) -> dict[str, Any]:
    os.environ["LONGSPAN_CACHE"] = str(folder / "cache")
    (folder / "r.toml").write_text(RECIPE)
    text = folder / "text"
    text.mkdir()
    draw = np.random.default_rng(0)
    write_words(text / "train.txt", [draw.permutation(WORDS - 2), *draws(draw, tokens - WORDS)])
    write_words(text / "valid.txt", draws(draw, 1000))
    found: dict[str, Any] = {"text MB": size(text / "train.txt")}
    say(f"{found['text MB']:.0f} MB")
    built = run(PREPARE, text, "words")
    found |= built.output | {"build and encode s": built.seconds, "build and encode MB": built.memory}
    say(f"vocabulary and ids: {built.seconds:.0f} s, {built.memory:.0f} MB resident")
    trained = run(TRAIN, text, str(folder / "run"))
    return found | trained.output | {"two steps s": trained.seconds, "two steps MB": trained.memory}


def draws(draw: np.random.Generator, count: int) -> list[Any]:
    """Words by Zipf's law, in blocks of a million."""
    weights = np.cumsum(1 / np.arange(1, WORDS - 1))
    blocks = [min(1_000_000, count - k) for k in range(0, count, 1_000_000)]
    return [np.searchsorted(weights, draw.random(block) * weights[-1]) for block in blocks]


def write_words(path: Path, blocks: list[Any]) -> None:
    with path.open("w", encoding="ascii") as file:
        for block in blocks:
            words = [f"w{k:x}" for k in block.tolist()]
            file.writelines(" ".join(words[k : k + 20]) + "\n" for k in range(0, len(words), 20))


if __name__ == "__main__":
    main()
