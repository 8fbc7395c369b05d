"""The vocabulary of a TransfoXLTokenizer, read from the vocab.pkl that `transformers` 4.x writes. Nothing is executed.

The file is a pickle of the tokenizer's attributes. Used here: `idx2sym` (word k has id k), `sym2idx` (the inverse),
`lower_case`, `delimiter`, `unk_idx` and the tokens added behind the vocabulary. The rest, Moses rules among it, is left
unread: our tokenizer splits at whitespace, so it gives the package's ids for text that Moses has split before.
"""

from pathlib import Path
from typing import Any

from longspan.checkpoints.pickles import read_values
from longspan.errors import CheckpointError, DataError
from longspan.tokens import WordTokenizer

WANTED = "give the vocab.pkl of a TransfoXLTokenizer, or a VOCAB.txt with one word per line"


def read_vocabulary(path: Path, size: int | None = None) -> WordTokenizer:
    """The words of the tokenizer in `path`, with those added behind them where a model of `size` tokens has them."""
    values = read_values(path, WANTED)
    words, lower = values.get("idx2sym"), values.get("lower_case", False)
    if type(words) is not list or not all(type(word) is str for word in words) or type(lower) is not bool:
        raise CheckpointError(f"{path} holds no vocabulary (idx2sym, lower_case); {WANTED}")
    if values.get("sym2idx") != {word: k for k, word in enumerate(words)}:
        raise CheckpointError(f"{path} is damaged: idx2sym and sym2idx disagree; {WANTED}")
    if values.get("delimiter") == "":
        raise CheckpointError(f"{path} is of a tokenizer of characters (delimiter=''); longspan imports those of words")
    added = _added(values, len(words))
    try:
        tokenizer = WordTokenizer(tuple(words + added if size == len(words) + len(added) else words), lower)
    except DataError as error:
        raise CheckpointError(f"{path} cannot be used: {error}") from None
    unknown = values.get("unk_idx", tokenizer.unknown)
    if unknown != tokenizer.unknown:
        raise CheckpointError(
            f"{path} reads an unknown word as token {unknown!r:.40}, longspan as {tokenizer.unknown}; "
            "leave one of <unk> and <UNK> in the vocabulary"
        )
    return tokenizer


def _added(values: dict[str, Any], count: int) -> list[str]:
    """Tokens that were added behind a vocabulary of `count` words, in the order of their ids."""
    table = values.get("_added_tokens_encoder", values.get("added_tokens_encoder"))
    ids = {index: word for word, index in table.items() if type(index) is int} if type(table) is dict else {}
    behind = sorted(index for index in ids if index >= count)
    return [ids[index] for index in behind] if behind == list(range(count, count + len(behind))) else []
