"""Text as a stream of blocks: reading, UTF-8 decoding and cutting between words, in constant memory."""

import codecs
import io
from collections.abc import Iterable, Iterator
from pathlib import Path

from longspan.errors import DataError

BLOCK = 1 << 20


def read_blocks(path: Path, start: int = 0, stop: int | None = None, block: int = BLOCK) -> Iterator[bytes]:
    """The bytes of a file from `start` to `stop` (default: its end), block by block."""
    try:
        with path.open("rb") as file:
            file.seek(start)
            left = None if stop is None else stop - start
            while data := file.read(block if left is None else min(block, left)):
                yield data
                left = None if left is None else left - len(data)
    except FileNotFoundError:
        raise DataError(f"there is no file {path}; check the name") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None


def to_bytes(text: str | bytes) -> bytes:
    """The bytes of a text; strings are encoded as UTF-8."""
    if isinstance(text, bytes):
        return text
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"character {error.start} of the text is a lone surrogate (U+{ord(text[error.start]):04X}), "
            f"which UTF-8 cannot encode; remove it, or pass bytes"
        ) from None


def decode_utf8(blocks: Iterable[bytes], name: str) -> Iterator[str]:
    """Blocks as strings. A character that spans two blocks is in the second string."""
    decoder = codecs.getincrementaldecoder("utf-8")("strict")
    seen = 0

    def decode(block: bytes, final: bool) -> str:
        held = len(decoder.getstate()[0])
        try:
            return decoder.decode(block, final)
        except UnicodeDecodeError as error:
            at = seen - held + error.start
            raise DataError(
                f"{name} is not UTF-8 at byte {at} (0x{error.object[error.start]:02x}); "
                f"use the tokenizer 'bytes', or convert it to UTF-8"
            ) from None

    for block in blocks:
        if text := decode(block, final=False):
            yield text
        seen += len(block)
    decode(b"", final=True)


def universal_newlines(texts: Iterable[str]) -> Iterator[str]:
    r"""The same text with \r\n and \r replaced by \n, as when Python opens a text file."""
    decoder = io.IncrementalNewlineDecoder(None, translate=True)  # without a decoder it accepts strings
    for text in texts:
        if translated := decoder.decode(text):
            yield translated
    if rest := decoder.decode("", final=True):
        yield rest


def complete_words(texts: Iterable[str]) -> Iterator[str]:
    """The same text in other pieces, so that no piece except the last ends inside a word.

    An incomplete word is held until it is complete, so memory is bounded by a block and the longest word.
    """
    held: list[str] = []
    for text in texts:
        tail = "" if text[-1:].isspace() else text.rsplit(None, 1)[-1]
        head = text[: len(text) - len(tail)]
        if head:
            yield "".join([*held, head])
            held = []
        if tail:
            held.append(tail)
    if held:
        yield "".join(held)
