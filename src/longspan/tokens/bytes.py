"""Bytes: 256 symbols, every file can be read, nothing is lost; `plain` leaves out what only typewriters need."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike

from longspan.tokens.tokenizer import FORMAT, Ids, Tokenizer, Unit, stored

BYTE_ORDER_MARK = "\ufeff".encode()


@dataclass(frozen=True)
class ByteTokenizer(Tokenizer):
    """Every byte a token. Where it is `plain`, carriage returns and byte-order marks are left out."""

    kind: ClassVar[str] = "bytes"
    plain: bool = False

    @property
    def unit(self) -> Unit:
        return "byte"

    @property
    def size(self) -> int:
        return 256

    def encode_stream(self, blocks: Iterable[bytes], name: str = "the text", goes_on: bool = False) -> Iterator[Ids]:  # noqa: ARG002
        for block in plain_bytes(blocks) if self.plain else blocks:
            yield np.frombuffer(block, np.uint8)

    def decode_bytes(self, ids: ArrayLike) -> bytes:
        return self._checked(ids).astype(np.uint8).tobytes()

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "format": FORMAT} | ({"plain": True} if self.plain else {})

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "ByteTokenizer":
        return cls(stored(values, "plain", bool) if "plain" in values else False)


def plain_bytes(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Blocks without carriage returns and byte-order marks, wherever the text was cut."""
    held = b""
    for block in blocks:
        data = (held + block).replace(BYTE_ORDER_MARK, b"").replace(b"\r", b"")
        # What may be the beginning of a mark waits for the next block.
        kept = next((n for n in (2, 1) if data.endswith(BYTE_ORDER_MARK[:n])), 0)
        data, held = data[: len(data) - kept], data[len(data) - kept :]
        yield data
    yield held
