"""Compare the held-out documents of a corpus with its training documents, by sequences of eight words.

    python benchmarks/overlap.py [--data novels-and-books] [--words 8]

For every document of valid and test it prints the sequences it shares with the most similar training document. Another
edition of a book would share most of them.
"""

import argparse
import re
from collections.abc import Iterator

import numpy as np
from cards import usage_errors

from longspan.data import Encoded, open_corpus

MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


def documents(text: Encoded, split: str) -> Iterator[tuple[str, bytes]]:
    ends = [*text.starts[1:], len(text)]
    for name, start, end in zip(text.splits[split], text.starts, ends, strict=True):
        yield name, text.ids[start:end].tobytes()


def sequences(text: bytes, words: int) -> np.ndarray:
    """Hashes of all sequences of words, without case and punctuation, sorted and each once."""
    found = np.array([hash(word) for word in re.findall(rb"[a-z]+", text.lower())], dtype=np.int64).view(np.uint64)
    count = max(0, len(found) - words + 1)
    total = np.zeros(count, dtype=np.uint64)
    for k in range(words):
        total = total * MULTIPLIER + found[k : k + count]
    return np.unique(total)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", default="novels-and-books", help="a corpus of bytes; default: novels-and-books")
    parser.add_argument("--words", type=int, default=8, help="length of a sequence; default: 8")
    asked = parser.parse_args()
    with usage_errors(parser):
        opened = {split: open_corpus(asked.data, split) for split in ("train", "valid", "test")}
    held = [
        (name, sequences(text, asked.words))
        for split in ("valid", "test")
        for name, text in documents(opened[split], split)
    ]
    most = [(0, "")] * len(held)
    for name, text in documents(opened["train"], "train"):
        found = sequences(text, asked.words)
        for k, (_, own) in enumerate(held):
            most[k] = max(most[k], (len(np.intersect1d(own, found, assume_unique=True)), name))
    for (name, own), (shared, other) in zip(held, most, strict=True):
        print(f"{name}: {shared:,} of {len(own):,} sequences are in {other}")


if __name__ == "__main__":
    main()
