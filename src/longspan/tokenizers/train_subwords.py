"""Train a SubwordTokenizer. Its round trip is exact for every text: nothing is normalised, no byte is unknown."""

import json
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, get_args

from longspan.errors import ConfigError, DataError, DataWarning, LongspanError, UnknownNameError
from longspan.threads import run_interruptibly
from longspan.tokenizers.subwords import SubwordTokenizer, byte_characters, import_library

Kind = Literal["bpe", "unigram", "wordpiece"]
BYTES = 256
_BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(BYTES)]
# The pattern of GPT-2, which the byte-level pre-tokenizer of the library uses.
_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Marks WordPiece tokens that continue a word. No byte is written with this character, unlike the usual "##".
_CONTINUED = "\u2026"
_LONGEST_WORD = 64  # characters; the time of WordPiece grows with the square of it
_ASCII = [chr(code) for code in (9, 10, 13, *range(32, 127))]
_UNKNOWN = "<unk>"


def train_subwords(
    texts: Iterable[str],
    vocabulary: int,
    kind: str = "bpe",
    *,
    byte_fallback: bool = False,
    special: Sequence[str] = (),
    document_end: str | None = None,
) -> SubwordTokenizer:
    """A tokenizer with `vocabulary` tokens, or fewer if the texts have too few different words.

    Tokens are sequences of bytes. With `byte_fallback` they are sequences of characters, and rare characters are
    written as bytes. `special` tokens are never divided. Documents of a corpus end in `document_end`.
    """
    if kind not in get_args(Kind):
        raise UnknownNameError("kind of subword tokenizer", kind, get_args(Kind))
    if byte_fallback and kind == "wordpiece":
        raise ConfigError("wordpiece has no byte fallback; use bpe or unigram, or leave out the byte fallback")
    special = list(dict.fromkeys([*special, *([] if document_end is None else [document_end])]))
    least = BYTES + len(special) + (len(_ASCII) + 1 if byte_fallback else BYTES if kind == "wordpiece" else 0)
    if vocabulary < least:
        raise ConfigError(f"a vocabulary of {vocabulary} is too small for {kind}; use at least {least}")
    for token in special:
        if not token or token in byte_characters() or token in _BYTE_TOKENS or token == _UNKNOWN:
            raise ConfigError(
                f"{token!r} cannot be a special token, because the tokenizer uses this name itself; use a longer "
                "name, for example <|end|>"
            )
    train = _train_characters if byte_fallback else _train_bytes
    found = SubwordTokenizer(json.dumps(train(texts, vocabulary, kind, special)), document_end)
    if found.size < vocabulary:
        warnings.warn(
            f"the tokenizer has {found.size:,} tokens instead of {vocabulary:,}, because the text has too few "
            "different words; use more text or a smaller vocabulary",
            DataWarning,
            stacklevel=2,
        )
    return found


def _train_bytes(texts: Iterable[str], vocabulary: int, kind: str, special: list[str]) -> dict[str, Any]:
    """A tokenizer of the characters that stand for bytes."""
    library = import_library()
    parts = library.pre_tokenizers, library.decoders
    pre, decoder = (part.ByteLevel(add_prefix_space=False) for part in parts)
    if kind == "wordpiece":
        longest = library.Regex(f".{{1,{_LONGEST_WORD}}}")
        pre = parts[0].Sequence([pre, parts[0].Split(longest, "isolated")])
        decoder = parts[1].Sequence([parts[1].Replace(_CONTINUED, ""), decoder])
    found = _train(texts, vocabulary, kind, special, sorted(byte_characters()), pre)
    found.decoder = decoder
    values: dict[str, Any] = json.loads(found.to_str())
    if kind == "wordpiece":
        model = values["model"]
        # A word that has a byte without a token would be unknown. The last tokens are the least frequent ones.
        missing = [_CONTINUED + c for c in sorted(byte_characters()) if _CONTINUED + c not in model["vocab"]]
        kept = sorted(model["vocab"], key=model["vocab"].get)[: vocabulary - len(missing)]
        model["vocab"] = {token: k for k, token in enumerate([*kept, *missing])}
        model["max_input_chars_per_word"] = _LONGEST_WORD
    return values


def _train_characters(texts: Iterable[str], vocabulary: int, kind: str, special: list[str]) -> dict[str, Any]:
    """A tokenizer of characters with a token for every byte, in which rare characters are written."""
    library = import_library()
    pre = library.pre_tokenizers.Split(library.Regex(_WORDS), "isolated")
    texts = list(texts)
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text)
    frequent = {c for c, _ in counts.most_common((vocabulary - BYTES) // 4)} | set(_ASCII)
    rare = str.maketrans(dict.fromkeys(counts.keys() - frequent, " "))
    first = [_UNKNOWN] if kind == "unigram" else []
    found = _train((text.translate(rare) for text in texts), vocabulary - BYTES, kind, [*first, *special], _ASCII, pre)
    found.decoder = library.decoders.Sequence([library.decoders.ByteFallback(), library.decoders.Fuse()])
    values: dict[str, Any] = json.loads(found.to_str())
    model, learned = values["model"], found.get_vocab()
    if clash := next((token for token in _BYTE_TOKENS if token in learned), None):
        raise DataError(
            f"the text has {clash} as a frequent word, but a byte fallback uses this name for a byte; leave "
            "out the byte fallback"
        )
    if kind == "unigram":
        lowest = min(score for _, score in model["vocab"])
        model["vocab"] += [[token, lowest - 100] for token in _BYTE_TOKENS]
    else:
        model["vocab"] |= {token: len(learned) + k for k, token in enumerate(_BYTE_TOKENS)}
    model["byte_fallback"] = True
    return values


def _train(texts: Iterable[str], vocabulary: int, kind: str, special: list[str], alphabet: list[str], pre: Any) -> Any:
    library = import_library()
    options: dict[str, Any] = {
        "vocab_size": vocabulary,
        "special_tokens": special,
        "initial_alphabet": alphabet,
        "show_progress": False,
    }
    if kind == "bpe":
        model, trainer = library.models.BPE(), library.trainers.BpeTrainer(**options)
    elif kind == "unigram":
        unknown = {"unk_token": _UNKNOWN} if _UNKNOWN in special else {}
        model, trainer = library.models.Unigram(), library.trainers.UnigramTrainer(**options, **unknown)
    else:
        model = library.models.WordPiece(continuing_subword_prefix=_CONTINUED)
        trainer = library.trainers.WordPieceTrainer(**options, continuing_subword_prefix=_CONTINUED)
    found = library.Tokenizer(model)
    found.pre_tokenizer = pre
    try:
        run_interruptibly(lambda: found.train_from_iterator(_nonempty(texts), trainer))
    except LongspanError:
        raise
    except Exception as error:
        raise DataError(f"the tokenizer cannot be trained on this text: {str(error)[:120]}; use more text") from None
    return found


def _nonempty(texts: Iterable[str]) -> Iterator[str]:
    found = False
    for text in texts:
        if text:
            found = True
            yield text
    if not found:
        raise DataError("the text to train a tokenizer on is empty; use more text")
