"""Reads the vocabulary of a TransfoXLTokenizer from the vocab.pkl that `transformers` 4.x writes. Nothing is executed.

The file is a pickle of the tokenizer's attributes. Used here are `idx2sym` (word k has id k), `sym2idx` (its inverse),
`lower_case`, `delimiter`, `unk_idx` and the tokens added after the vocabulary. The rest, such as Moses rules, is not
read: our tokenizer splits at whitespace, so the ids agree with `transformers` for text that Moses has already split.
"""

from pathlib import Path
from typing import Any

from longspan.errors import CheckpointError, ConfigError, DataError
from longspan.interop.pickles import is_pickle, read_values
from longspan.tokenizers import ByteTokenizer, CharacterTokenizer, Tokenizer, WordTokenizer

WANTED = "use the vocab.pkl of a TransfoXLTokenizer, or a VOCAB.txt with one word per line"


def read_vocabulary(path: Path, size: int | None = None) -> WordTokenizer:
    """The tokenizer in `path`. Added tokens are included if the vocabulary then has `size` tokens."""
    values = read_values(path, WANTED)
    words, lower = values.get("idx2sym"), values.get("lower_case", False)
    if type(words) is not list or not all(type(word) is str for word in words) or type(lower) is not bool:
        raise CheckpointError(f"{path} has no vocabulary (idx2sym, lower_case); {WANTED}")
    if values.get("sym2idx") != {word: k for k, word in enumerate(words)}:
        raise CheckpointError(f"{path} is damaged: idx2sym and sym2idx disagree; {WANTED}")
    if values.get("delimiter") == "":
        raise CheckpointError(f"{path} is a character tokenizer (delimiter=''); only word tokenizers are supported")
    added = _added(values, len(words))
    try:
        tokenizer = WordTokenizer(tuple(words + added if size == len(words) + len(added) else words), lower)
    except DataError as error:
        raise CheckpointError(f"{path} cannot be used: {error}") from None
    unknown = values.get("unk_idx", tokenizer.unknown)
    if unknown != tokenizer.unknown:
        raise CheckpointError(
            f"{path} has unk_idx={unknown!r:.40}, but longspan would use {tokenizer.unknown} for unknown "
            "words; keep only one of <unk> and <UNK> in the vocabulary"
        )
    return tokenizer


def _added(values: dict[str, Any], count: int) -> list[str]:
    """Tokens added after a vocabulary of `count` words, in the order of their ids; none if there is a gap."""
    table = values.get("_added_tokens_encoder", values.get("added_tokens_encoder"))
    ids = {index: word for word, index in table.items() if type(index) is int} if type(table) is dict else {}
    added = sorted(index for index in ids if index >= count)
    return [ids[index] for index in added] if added == list(range(count, count + len(added))) else []


def tokenizer_for(tokens: str, vocabulary: int | None) -> Tokenizer:
    """The tokenizer called `bytes` or `characters`, or that of a vocabulary file, for a model with this many tokens.

    With bytes, a model may have fewer than 256 tokens (it then refuses texts with other bytes) or more (it never
    generates those).
    """
    if tokens == "bytes":
        return ByteTokenizer()
    if tokens == "characters":
        if vocabulary is None or not 0 < vocabulary <= 0xD800:
            raise ConfigError(
                f"the tokenizer 'characters' needs model.vocabulary between 1 and 55296, not {vocabulary}; "
                "its characters are the code points below that number"
            )
        return CharacterTokenizer("".join(map(chr, range(vocabulary))))
    path = Path(tokens)
    if not path.is_file():
        raise ConfigError(f"the tokenizer {tokens!r} is not a file; use bytes, characters, a VOCAB.txt or a vocab.pkl")
    words = read_vocabulary(path, vocabulary) if is_pickle(path) else WordTokenizer.from_vocabulary(path)
    if vocabulary is not None and words.size != vocabulary:
        raise ConfigError(
            f"{path} has {words.size} words, but the model has {vocabulary} tokens; the numbers must be equal"
        )
    return words
