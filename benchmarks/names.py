"""How long a model goes on with the names it has read: of some continuations, those in which one comes again.

python benchmarks/names.py [--memory 64] [--model MODEL] [--count 12] [--length 1500]
"""

import argparse
from pathlib import Path

from cards import longspan_errors

import longspan

PROMPT = """"I will not go back to Netherwick," said Arabella Thornbury, rising from her chair.

"You must, my dear," replied Mr. Lisle. "Your father expects you."

Arabella looked at him"""
NAMES = ("Arabella", "Thornbury", "Lisle", "Netherwick")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, help="a model of bytes; the one in the box unless told")
    parser.add_argument("--memory", type=int, help="bytes it remembers; as it has them unless told")
    parser.add_argument("--count", type=int, default=12, help="continuations, with seeds 0, 1, ...")
    parser.add_argument("--length", type=int, default=1500, help="bytes of each")
    asked = parser.parse_args()
    overrides = {} if asked.memory is None else {"memory": asked.memory}
    with longspan_errors(parser):
        model = longspan.load(asked.model, **overrides)
        seeds = range(asked.count)
        written = [model.generate(PROMPT, asked.length, temperature=0.7, top_p=0.95, seed=seed) for seed in seeds]
    named = sum(text.count(name) for text in written for name in NAMES)
    again, late = (
        sum(any(name in text[begin:] for name in NAMES) for text in written) for begin in (0, asked.length // 2)
    )
    print(f"a name again in {again} of {asked.count}, in the second half in {late}, {named} names in all")


if __name__ == "__main__":
    main()
