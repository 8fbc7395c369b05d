"""A sample of a text as strings, to train a tokenizer on."""

from collections.abc import Iterator
from pathlib import Path

from longspan.data.cache import cache_folder
from longspan.data.documents import read_documents, tasks
from longspan.data.sources import TextFormat, find_source
from longspan.data.splits import split_pieces
from longspan.tokenizers.text import decode_utf8

_PART = 1 << 16


def sample_text(
    name_or_path: str | Path,
    size: int | None = None,
    split: str = "train",
    cache: Path | None = None,
    field: str | None = None,
    encoding: str | None = None,
) -> Iterator[str]:
    """About `size` bytes of the files of a split in evenly spaced parts, or all of it. Memory is bounded by a part."""
    source = find_source(name_or_path, cache_folder(cache), form=TextFormat(field, encoding))
    pieces = split_pieces(source.name, source.documents, source.split, split, "subword")
    total = sum(piece.size for piece in pieces)
    every = max(1.0, total / size) if size else 1.0
    taken = seen = 0
    for task in tasks(pieces, "subword", _PART):
        seen += sum(chunk.size for chunk in task)
        if seen < taken * every:
            continue
        for chunk in task:
            taken += chunk.size
            for data in read_documents(chunk):
                yield from decode_utf8([data], chunk.name)
