"""ByteTokenizer: 256 symbols, lossless for every file; `plain` drops carriage returns and byte order marks."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from longspan.tokenizers.text import to_bytes
from longspan.tokenizers.tokenizer import FORMAT, Ids, Offsets, Tokenizer, Unit, stored_value

BYTE_ORDER_MARK = "\ufeff".encode()


@dataclass(frozen=True)
class ByteTokenizer(Tokenizer):
    """Every byte is a token. If `plain`, carriage returns and byte order marks are dropped."""

    kind: ClassVar[str] = "bytes"
    plain: bool = False

    @property
    def unit(self) -> Unit:
        return "byte"

    @property
    def size(self) -> int:
        return 256

    def encode_stream(self, blocks: Iterable[bytes], name: str = "the text", partial: bool = False) -> Iterator[Ids]:  # noqa: ARG002
        for block in plain_bytes(blocks) if self.plain else blocks:
            yield np.frombuffer(block, np.uint8)

    def encode_many(self, texts: Sequence[bytes], name: str = "the text", partial: bool = False) -> list[Ids]:
        if self.plain:
            return super().encode_many(texts, name, partial)
        return [np.frombuffer(text, np.uint8) for text in texts]

    def encode_with_offsets(self, text: str | bytes) -> tuple[Ids, Offsets]:
        data = to_bytes(text)
        ids = self.encode(data)
        kept = _kept(data) if self.plain else np.arange(len(data))
        return ids, np.stack([kept, kept + 1], axis=1)

    def decode_bytes(self, ids: ArrayLike) -> bytes:
        return self._check_ids(ids).astype(np.uint8).tobytes()

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "format": FORMAT} | ({"plain": True} if self.plain else {})

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "ByteTokenizer":
        return cls(stored_value(values, "plain", bool) if "plain" in values else False)


def plain_bytes(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Blocks without carriage returns and byte order marks, also where a mark spans two blocks."""
    held = b""
    for block in blocks:
        data = (held + block).replace(BYTE_ORDER_MARK, b"").replace(b"\r", b"")
        # A possible start of a mark is held until the next block.
        size = next((n for n in (2, 1) if data.endswith(BYTE_ORDER_MARK[:n])), 0)
        data, held = data[: len(data) - size], data[len(data) - size :]
        yield data
    yield held


def _kept(data: bytes) -> NDArray[np.int64]:
    """The offsets of the bytes that `plain_bytes` keeps."""
    kept = np.frombuffer(data, np.uint8) != ord("\r")
    at = data.find(BYTE_ORDER_MARK)
    while at >= 0:
        kept[at : at + len(BYTE_ORDER_MARK)] = False
        at = data.find(BYTE_ORDER_MARK, at + len(BYTE_ORDER_MARK))
    return np.flatnonzero(kept)
