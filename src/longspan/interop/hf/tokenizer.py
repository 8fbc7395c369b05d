"""The tokenizers of longspan as tokenizers of `transformers`, with the same ids."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from longspan.errors import ConfigError
from longspan.tokenizers import (
    ByteTokenizer,
    CharacterTokenizer,
    SubwordTokenizer,
    Tokenizer,
    WordTokenizer,
    tokenizer_from_json,
)
from longspan.tokenizers.bytes import BYTE_ORDER_MARK
from longspan.tokenizers.subwords import byte_characters

PAD = "<pad>"
"""Its id follows the vocabulary. It needs no embedding, because padding is never read."""
FILE = "longspan_tokenizer.json"


class LongspanTokenizer(PreTrainedTokenizer):
    """A tokenizer of characters or words. As with a prompt, no end-of-line token is added after an unfinished line."""

    vocab_files_names = {"longspan_file": FILE}  # noqa: RUF012 (a dict in `transformers`)
    model_input_names = ["input_ids", "attention_mask"]  # noqa: RUF012

    def __init__(self, longspan_file: str | Path | None = None, tokenizer: Tokenizer | None = None, **kwargs: Any):
        if tokenizer is None:
            if longspan_file is None:
                raise ConfigError(f"LongspanTokenizer needs the file {FILE}, which `longspan export --to hf` writes")
            tokenizer = tokenizer_from_json(Path(longspan_file).read_bytes())
        self.tokenizer = tokenizer
        self._names = _names(tokenizer)
        self._numbers = {name: k for k, name in enumerate(self._names)}
        super().__init__(**{"pad_token": PAD, "padding_side": "left", **kwargs})

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.size

    def get_vocab(self) -> dict[str, int]:
        return self._numbers | self.added_tokens_encoder

    def _tokenize(self, text: str, **_: Any) -> list[str]:
        return [self._names[k] for k in self.tokenizer.encode_prompt(text).tolist()]

    def _convert_token_to_id(self, token: str) -> int | None:
        return self._numbers.get(token)

    def _convert_id_to_token(self, index: int) -> str:
        return self._names[index]

    def convert_tokens_to_string(self, tokens: Iterable[str]) -> str:
        return self.tokenizer.decode([self._numbers[token] for token in tokens if token in self._numbers])

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str, ...]:
        path = Path(save_directory) / (f"{filename_prefix}-{FILE}" if filename_prefix else FILE)
        path.write_text(json.dumps(self.tokenizer.to_dict(), ensure_ascii=False, indent=1), encoding="utf-8")
        return (str(path),)


def _names(tokenizer: Tokenizer) -> list[str]:
    if isinstance(tokenizer, WordTokenizer):
        return list(tokenizer.words)
    if isinstance(tokenizer, CharacterTokenizer):
        return list(tokenizer.symbols)
    raise ConfigError(f"LongspanTokenizer is for characters and words, not {tokenizer.kind}; use convert_tokenizer")


def convert_tokenizer(tokenizer: Tokenizer) -> PreTrainedTokenizerBase:
    """The tokenizer of `transformers` with the same ids: fast ones for bytes and subwords."""
    if isinstance(tokenizer, WordTokenizer | CharacterTokenizer):
        return LongspanTokenizer(tokenizer=tokenizer)
    from tokenizers import Tokenizer as Library

    end: dict[str, str] = {}
    if isinstance(tokenizer, ByteTokenizer):
        library = byte_library(tokenizer.plain)
    elif isinstance(tokenizer, SubwordTokenizer):
        library = Library.from_str(tokenizer.definition)
        end = {} if tokenizer.document_end is None else {"eos_token": tokenizer.document_end}
    else:
        raise ConfigError(f"the tokenizer {tokenizer.kind!r} cannot be converted; known: bytes, characters, words")
    return PreTrainedTokenizerFast(
        tokenizer_object=library,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        **end,
        pad_token=PAD,
    )


def byte_library(plain: bool = False) -> Any:
    """Bytes as a byte-level BPE without merges: token k is byte k."""
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    library = Library(models.BPE(vocab=byte_characters(), merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    if plain:
        dropped = (BYTE_ORDER_MARK.decode(), "\r")
        library.normalizer = normalizers.Sequence([normalizers.Replace(each, "") for each in dropped])
    return library
