"""WikiText as prose: articles without the marks of its tokenizer, for models that never saw them.

Radford et al. 2019 score WikiText this way. As in the detokenisation of Megatron-LM and lm-eval, headings keep their
marks (= Title =, == Section ==) and empty lines stay. The number of words is that of the original tokens, with an end
of each line, so perplexities per word can be compared with those of models over words.
"""

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

_TITLE = re.compile(r"^ = [^=].* = $")
_RULES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r" @([-,.])@ ", r"\1"),  # inside of compounds and numbers
        (r"([(\[“]) ", r"\1"),
        (r" ([)\]”])", r"\1"),
        (r'"\s*([^"\n]*?)\s*"', r'"\1"'),
        (r"(?<!\w)' ([^'\n]*?) '(?!\w)", r"'\1'"),
        (r" (['’](?:s|re|ve|ll|d|m|t)\b)", r"\1"),
        (r"s ' ", "s' "),
        (r" n't\b", "n't"),
        (r" ([.,;:!?%])(?=[\s\"')\]]|$)", r"\1"),
        (r"([$£€¥]) (?=\d)", r"\1"),
        (r" ([–—/⁄]) ", r"\1"),
        (r"(?<=\d) ([°′″]) ?(?=[CFNSEW\d\s])", r"\1 "),
    )
)


def prose(line: str) -> str:
    """A line of WikiText as people write it."""
    text = line.strip()
    if heading := re.fullmatch(r"((?:= )+)(.*?)((?: =)+)", text):
        before, name, after = heading.groups()
        text = f"{before.replace(' ', '')} {name} {after.replace(' ', '')}"
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    return text


def articles(text: str) -> Iterator[dict[str, Any]]:
    """Every article as `text`, and `words`, the tokens it has in WikiText. Lines before the first title belong to the
    first article."""
    lines = text.splitlines()
    titles = [k for k, line in enumerate(lines) if _TITLE.match(line)]
    for begin, end in pairwise([0, *titles[1:], len(lines)] if titles else []):
        article = lines[begin:end]
        words = sum(len(line.split()) + 1 for line in article)
        yield {"text": "\n".join(map(prose, article)).strip("\n"), "words": words}
