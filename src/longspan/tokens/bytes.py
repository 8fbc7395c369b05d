"""Bytes: 256 symbols, every file can be read, nothing is lost."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike

from longspan.tokens.tokenizer import FORMAT, Ids, Tokenizer, Unit


@dataclass(frozen=True)
class ByteTokenizer(Tokenizer):
    kind: ClassVar[str] = "bytes"

    @property
    def unit(self) -> Unit:
        return "byte"

    @property
    def size(self) -> int:
        return 256

    def encode_stream(self, blocks: Iterable[bytes], name: str = "the text", goes_on: bool = False) -> Iterator[Ids]:  # noqa: ARG002
        for block in blocks:
            yield np.frombuffer(block, np.uint8)

    def decode_bytes(self, ids: ArrayLike) -> bytes:
        return self._checked(ids).astype(np.uint8).tobytes()

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "format": FORMAT}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "ByteTokenizer":  # noqa: ARG003
        return cls()
