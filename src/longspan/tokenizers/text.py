"""Text as a stream of blocks: reading, UTF-8 decoding and cutting between words, in constant memory."""

import codecs
import errno
import io
from collections.abc import Iterable, Iterator
from pathlib import Path

from longspan.errors import DataError, not_read

BLOCK = 1 << 20
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Encodings that are suggested, the more common first.
_ENCODINGS = (
    *("utf_16", "utf_16_le", "utf_16_be", "cp1252", "cp1251", "koi8_r", "cp932", "euc_jp", "gb18030", "big5"),
    *("euc_kr", "cp1250", "cp1253", "cp1254", "cp1255", "cp1256"),
)
_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),  # begins with the mark of UTF-16
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_CONTINUATION = bytes(range(0x80, 0xC0))  # the second and later bytes of a character
_COINCIDENCE = 16  # some pairs of bytes of Chinese encodings are also UTF-8


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
        raise not_read(path, error) from None


def space_hint(error: OSError) -> str:
    """The first part of the fix if a disk is full."""
    return "free some space, or " if error.errno in FULL else ""


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
    before = b""

    def decode(block: bytes, final: bool) -> str:
        held = len(decoder.getstate()[0])
        try:
            return decoder.decode(block, final)
        except UnicodeDecodeError as error:
            at = seen - held + error.start
            data, start = (before, len(before) - held) if final else (error.object, error.start)
            raise DataError(
                f"{name} is not UTF-8 at byte {at} (0x{error.object[error.start]:02x}); "
                f"{encoding_hint(data, start)}, or use the tokenizer 'bytes'"
            ) from None

    for block in blocks:
        if text := decode(block, final=False):
            yield text
        seen += len(block)
        before = block
    decode(b"", final=True)


def encoding_hint(data: bytes, at: int = 0) -> str:
    """What to do about data that is not UTF-8 from `at` on: the option with its likely encoding."""
    if _is_other_utf8(data[:at]):
        return "the text before it is UTF-8, so repair or remove these bytes"
    near = data[max(0, at - 2048) : at + 8192]
    # A sample may end inside a character, and then it is in no encoding.
    samples = (near[: len(near) - cut] for cut in range(4))
    found = _marked_encoding(data) or next(filter(None, map(likely_encoding, samples)), None)
    return f"it looks like {found}, so add --encoding {found}" if found else "set its encoding with --encoding"


def _marked_encoding(data: bytes) -> str | None:
    """The encoding that a byte order mark names."""
    return next((name for mark, name in _MARKS if data.startswith(mark)), None)


def _is_other_utf8(data: bytes) -> bool:
    """Whether a text is UTF-8 with so many characters beyond ASCII that this is no coincidence."""
    try:
        text = data.lstrip(_CONTINUATION).decode()
    except UnicodeDecodeError:
        return False
    return len(data) - len(text) >= _COINCIDENCE


def likely_encoding(data: bytes) -> str | None:
    """The encoding a text is probably in; None if that cannot be told."""
    try:
        from charset_normalizer import from_bytes
    except ImportError:
        return None
    matches = from_bytes(data, cp_isolation=list(_ENCODINGS))
    names = {name: match for match in matches for name in match.could_be_from_charset if name in _ENCODINGS}
    ranks = {name: (match.chaos, -match.coherence, _ENCODINGS.index(name)) for name, match in names.items()}
    return min(ranks, key=ranks.__getitem__).replace("_", "-") if ranks else None


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
