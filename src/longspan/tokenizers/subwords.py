"""SubwordTokenizer: a tokenizer.json of the `tokenizers` library (BPE, Unigram, WordPiece)."""

import json
import re
import tempfile
import warnings
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike

from longspan.errors import CheckpointError, DataError, DataWarning, not_read
from longspan.tokenizers.characters import code_points, utf8_sizes
from longspan.tokenizers.text import decode_utf8, space_hint, to_bytes
from longspan.tokenizers.tokenizer import FORMAT, Ids, Offsets, Tokenizer, Unit, stored_value

# A text is encoded in segments of at least _SEGMENT and at most _LONGEST characters. Where a line or a word begins
# after exactly one newline or space, the pre-tokenizers in use (GPT-2, Llama 3, ...) divide the text anyway.
_SEGMENT, _LONGEST, _BATCH = 1 << 14, 1 << 16, 16
_LINE, _WORD = re.compile(r"\S\n(?=\S)"), re.compile(r"\S(?= \S)")
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


@dataclass(frozen=True)
class SubwordTokenizer(Tokenizer):
    """The tokenizer of a tokenizer.json.

    `definition` is its JSON text, as `json.dumps` writes it. Documents of a corpus end in the token `document_end`, if
    there is one. Truncation, padding, dropout and templates of the file are not used.
    """

    definition: str
    document_end: str | None = None

    kind: ClassVar[str] = "subwords"

    def __post_init__(self) -> None:
        library = self._library  # an invalid definition is an error here
        if self.document_end is not None and library.token_to_id(self.document_end) is None:
            raise DataError(f"the tokenizer has no token {self.document_end[:40]!r}; add it as a special token")

    @property
    def unit(self) -> Unit:
        return "subword"

    @cached_property
    def size(self) -> int:
        return 1 + max(self._library.get_vocab(with_added_tokens=True).values())

    def token_id(self, token: str) -> int | None:
        found = self._library.token_to_id(token)
        return None if found is None else int(found)

    @property
    def document_end_id(self) -> int | None:
        return None if self.document_end is None else int(self._library.token_to_id(self.document_end))

    @cached_property
    def unknown(self) -> int | None:
        model = json.loads(self.definition)["model"]
        return model.get("unk_id") if model.get("unk_token") is None else self.token_id(model["unk_token"])

    @cached_property
    def _library(self) -> Any:
        return _from_json(self.definition)

    @cached_property
    def _divides(self) -> bool:
        """Whether a text can be encoded in segments: nothing is added or joined at their ends."""
        pairs = (("a b.\n", "c d"), ("a b", " c d"))
        return all(
            np.array_equal(self._encode([first + second])[0], np.concatenate(self._encode([first, second])))
            for first, second in pairs
        )

    @cached_property
    def _decoded(self) -> list[bytes]:
        return decoded_tokens(json.loads(self.definition), self._library, self.size)

    def encode_stream(self, blocks: Iterable[bytes], name: str = "the text", partial: bool = False) -> Iterator[Ids]:  # noqa: ARG002
        parts = self._segments(blocks, name)
        while batch := list(islice(parts, _BATCH)):
            yield self._concatenate(self._encode(batch))

    def encode_many(self, texts: Sequence[bytes], name: str = "the text", partial: bool = False) -> list[Ids]:  # noqa: ARG002
        parts = [list(self._segments([text], name)) for text in texts]
        flat = [segment for segments in parts for segment in segments]
        found = iter([ids for k in range(0, len(flat), _BATCH) for ids in self._encode(flat[k : k + _BATCH])])
        return [self._concatenate(islice(found, len(segments))) for segments in parts]

    def _segments(self, blocks: Iterable[bytes], name: str) -> Iterator[str]:
        texts = decode_utf8(blocks, name)
        return segments(texts) if self._divides else iter(["".join(texts)])

    def _encode(self, texts: list[str]) -> list[Ids]:
        """The ids of each text. The library uses all cores and needs no lock of Python meanwhile."""
        found = self._library.encode_batch_fast(texts, add_special_tokens=False)
        # `array` converts a list of ints three times as fast as numpy does.
        return [np.frombuffer(array("I", one.ids), np.uint32).astype(self.dtype) for one in found]

    def encode_with_offsets(self, text: str | bytes) -> tuple[Ids, Offsets]:
        """Offsets of the library count whole characters, so they are used only where tokens do not decode to the text
        (lower case, added spaces). Several tokens of one character then have the same offsets."""
        data = to_bytes(text)
        ids = self.encode(data)
        exact = self._lossless_offsets(data, ids)
        if exact is not None:
            return ids, exact
        found: list[tuple[int, int]] = []
        begin = 0
        for part in self._segments([data], "the text"):
            encoded = self._library.encode(part, add_special_tokens=False)
            found += [(begin + first, begin + last) for first, last in encoded.offsets]
            begin += len(part)
        places = np.concatenate([[0], np.cumsum(utf8_sizes(code_points(data.decode())))])
        return ids, places[np.array(found, np.int64).reshape(-1, 2)]

    def decode_bytes(self, ids: ArrayLike) -> bytes:
        return b"".join([self._decoded[k] for k in self._check_ids(ids).tolist()])

    def to_dict(self) -> dict[str, Any]:
        values = {"kind": self.kind, "format": FORMAT, "tokenizer": json.loads(self.definition)}
        return {**values, "document_end": self.document_end}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "SubwordTokenizer":
        definition = stored_value(values, "tokenizer", dict)
        end = None if values.get("document_end", ...) is None else stored_value(values, "document_end", str)
        try:
            return cls(json.dumps(definition), end)
        except (DataError, UnicodeEncodeError) as error:
            raise CheckpointError(f"the stored tokenizer is damaged: {error}") from None

    @classmethod
    def from_file(cls, path: Path) -> "SubwordTokenizer":
        """The tokenizer of a tokenizer.json. The eos_token of a tokenizer_config.json next to it ends documents."""
        end = _end_of_documents(path.with_name("tokenizer_config.json"))
        try:
            found = cls(json.dumps(_read_json(path)))
        except CheckpointError as error:
            raise DataError(f"{path} cannot be used: {error}") from None
        if end is not None and found.token_id(end) is None:
            warnings.warn(
                f"{path.with_name('tokenizer_config.json')} has the eos_token {end[:40]!r}, which is not in "
                f"{path.name}, so documents end without a token; add it to the added_tokens, or correct the name",
                DataWarning,
                stacklevel=2,
            )
            return found
        return found if end is None else cls(found.definition, end)

    def save(self, folder: Path) -> None:
        """Write tokenizer.json and tokenizer_config.json, which `transformers` and the `tokenizers` library read."""
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        end = {} if self.document_end is None else {"eos_token": self.document_end}
        readable = json.dumps(json.loads(self.definition), ensure_ascii=False, indent=1)
        files = {"tokenizer_config.json": json.dumps(config | end, indent=1), "tokenizer.json": readable}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".part-", dir=folder) as part:
                for name, text in files.items():
                    Path(part, name).write_text(text, "utf-8")
                for name in files:  # complete files, so that neither a full disk nor Ctrl-C leaves a part of one
                    Path(part, name).replace(folder / name)
        except OSError as error:
            reason = f"{error.strerror or error}; {space_hint(error)}use another folder"
            raise DataError(f"{folder} cannot be written: {reason}") from None


def _end_of_documents(config: Path) -> str | None:
    """The eos_token of a tokenizer_config.json, if there is one."""
    values = _read_json(config) if config.is_file() else {}
    end = values.get("eos_token") if isinstance(values, dict) else None
    end = end.get("content") if isinstance(end, dict) else end
    return end if isinstance(end, str) else None


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise not_read(path, error) from None
    except (ValueError, RecursionError):
        raise DataError(f"{path} is not JSON; it is damaged, so copy it again or remove it") from None


def segments(texts: Iterable[str]) -> Iterator[str]:
    """A text in segments that depend on the text only, not on how it is given: they end where a line ends, else where
    a word ends, else anywhere."""
    held = ""
    for text in texts:
        held, begin = held + text, 0
        while len(held) - begin > _LONGEST:
            window = held, begin + _SEGMENT, begin + _LONGEST
            found = _LINE.search(*window) or _WORD.search(*window)
            end = found.end() if found else begin + _LONGEST
            yield held[begin:end]
            begin = end
        held = held[begin:]
    if held:
        yield held


def import_library() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise DataError("subwords need the package `tokenizers`; install it with: pip install tokenizers") from None
    return tokenizers


def byte_characters() -> dict[str, int]:
    """The character that byte-level tokenizers write for each byte: printable bytes as they are, others from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + k): b for k, b in enumerate(others)}


def _from_json(definition: str) -> Any:
    library = import_library()
    try:
        found = library.Tokenizer.from_str(definition)
        found.no_padding()
        found.no_truncation()
        if getattr(found.model, "dropout", None) is not None:
            found.model.dropout = None
        if not found.get_vocab_size():
            raise CheckpointError("the stored tokenizer has no tokens; it is damaged")
    except CheckpointError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # a panic of Rust code
            raise
        raise CheckpointError(
            f"the stored tokenizer cannot be loaded by the package `tokenizers`: {str(error)[:120]}"
        ) from None
    return found


def decoded_tokens(definition: Mapping[str, Any], library: Any, size: int) -> list[bytes]:
    """The bytes of every token. Joined, they are the text, without what a decoder of the library does at its ends."""
    added = {token.content for token in library.get_added_tokens_decoder().values()}
    steps = _decoder_steps(definition.get("decoder"))
    characters = byte_characters()

    def decode(token: str) -> bytes:
        if token in added:
            return token.encode()
        for step in steps:
            kind = step["type"]
            if kind == "ByteLevel" and all(c in characters for c in token):
                return bytes(characters[c] for c in token)
            if kind == "ByteFallback" and (found := _BYTE.fullmatch(token)):
                return bytes([int(found[1], 16)])
            if kind == "Metaspace":
                token = token.replace(step["replacement"], " ")
            elif kind == "Replace" and "String" in step["pattern"]:
                token = token.replace(step["pattern"]["String"], step["content"])
            elif kind == "WordPiece":
                prefix = step["prefix"]
                token = token.removeprefix(prefix) if token.startswith(prefix) else f" {token}"
            elif kind == "BPEDecoder":
                token = token.replace(step["suffix"], " ")
        return (token if steps else f"{token} ").encode()

    return [b"" if (token := library.id_to_token(k)) is None else decode(token) for k in range(size)]


def _decoder_steps(decoder: Any) -> list[dict[str, Any]]:
    if not isinstance(decoder, dict):
        return []
    if decoder.get("type") == "Sequence":
        return [step for inner in decoder["decoders"] for step in _decoder_steps(inner)]
    return [decoder]
