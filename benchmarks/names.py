"""Count continuations that reuse a name of the prompt, to show the effect of memory on generated text.

python benchmarks/names.py [--memory 64] [--model MODEL] [--count 12] [--length 1500]
"""

import argparse
from pathlib import Path

from cards import usage_errors

import longspan

PROMPT = """"I will not go back to Netherwick," said Arabella Thornbury, rising from her chair.

"You must, my dear," replied Mr. Lisle. "Your father expects you."

Arabella looked at him"""
NAMES = ("Arabella", "Thornbury", "Lisle", "Netherwick")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, help="a byte-level model; default: the bundled model")
    parser.add_argument("--memory", type=int, help="bytes of memory; default: the model's")
    parser.add_argument("--count", type=int, default=12, help="number of continuations, with seeds 0, 1, ...")
    parser.add_argument("--length", type=int, default=1500, help="bytes of each continuation")
    asked = parser.parse_args()
    settings = {} if asked.memory is None else {"memory": asked.memory}
    with usage_errors(parser):
        model = longspan.load(asked.model, **settings)
        options = {"temperature": 0.7, "top_p": 0.95}
        texts = [model.generate(PROMPT, asked.length, seed=seed, **options) for seed in range(asked.count)]
    total = sum(text.count(name) for text in texts for name in NAMES)
    anywhere, late = (
        sum(any(name in text[begin:] for name in NAMES) for text in texts) for begin in (0, asked.length // 2)
    )
    print(f"{anywhere} of {asked.count} reuse a name, {late} of them in the second half; {total} names in total")


if __name__ == "__main__":
    main()
