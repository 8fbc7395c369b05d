"""The surprisal of many files in one table: CSV, JSON lines or Parquet."""

import csv
import io
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from longspan.contract import LanguageModel
from longspan.errors import ConfigError, DataError, UnknownNameError, not_read
from longspan.reading import Reading
from longspan.scoring.batches import losses_of_texts
from longspan.scoring.losses import Progress
from longspan.scoring.surprisal import COLUMNS, Per, Surprisal, surprisal
from longspan.tokenizers import Tokenizer

GROUP_BYTES = 1 << 24
"""Files are held in groups of about this size. The files of a group are sorted by length and read in parallel."""
ROWS = 1 << 16
"""Rows of a Parquet file that are written together."""


def read_files(paths: Sequence[Path]) -> Iterator[tuple[str, bytes]]:
    """The name and contents of each file."""
    for path in paths:
        try:
            yield str(path), path.read_bytes()
        except OSError as error:
            raise not_read(path, error) from None


def check_files(paths: Sequence[Path]) -> int:
    """The size of all files. Refuses missing files and folders before any of them is scored."""
    for path in paths:
        if path.is_dir():
            raise DataError(f"{path} is a folder; list its files, for example {path}/*.txt")
        if not path.exists():
            raise DataError(f"there is no file {path}; check the name")
    return sum(path.stat().st_size for path in paths)


def surprisals(
    model: LanguageModel,
    tokenizer: Tokenizer,
    texts: Iterable[tuple[str, bytes]],
    per: Per,
    reading: Reading | None = None,
    *,
    batch: int = 8,
    total: int = 0,
    progress: Progress | None = None,
) -> Iterator[tuple[str, Surprisal]]:
    """The surprisal of named texts, in order. `total` is the size of all texts, for `progress`."""
    done = 0
    for group in _groups(texts):
        encoded = []
        for name, data in group:
            try:
                encoded.append(tokenizer.encode_with_offsets(data))
            except DataError as error:
                raise DataError(f"{name}: {error}") from None
        size, before = sum(len(data) for _, data in group), done

        def update(scored: int, tokens: int, size: int = size, before: int = before) -> None:
            if progress is not None:
                progress(before + size * scored // tokens, max(total, before + size))

        losses = losses_of_texts(model, [ids for ids, _ in encoded], reading, batch=batch, progress=update)
        for (name, data), (_, offsets), found in zip(group, encoded, losses, strict=True):
            yield name, surprisal(data, offsets, found, per)
        done += size


def _groups(texts: Iterable[tuple[str, bytes]]) -> Iterator[list[tuple[str, bytes]]]:
    group: list[tuple[str, bytes]] = []
    size = 0
    for name, data in texts:
        group.append((name, data))
        size += len(data)
        if size >= GROUP_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


class TableWriter(ABC):
    """Writes rows with the columns `file` and COLUMNS to a binary file."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file

    @abstractmethod
    def add(self, name: str, found: Surprisal) -> None:
        """Write the rows of one text."""

    def close(self) -> None:  # noqa: B027 (only Parquet has an end)
        """Finish the table; the file stays open."""


class CsvWriter(TableWriter):
    """RFC 4180 with \\n as line end, UTF-8. A missing value is an empty field."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)
        self._write([("file", *COLUMNS)])

    def add(self, name: str, found: Surprisal) -> None:
        self._write((name, *row.values()) for row in found.rows())

    def _write(self, rows: Iterable[Sequence[Any]]) -> None:
        text = io.StringIO(newline="")
        csv.writer(text, lineterminator="\n").writerows(rows)
        self.file.write(text.getvalue().encode("utf-8", errors="backslashreplace"))


class JsonLinesWriter(TableWriter):
    def add(self, name: str, found: Surprisal) -> None:
        lines = (json.dumps({"file": name} | row, ensure_ascii=False) + "\n" for row in found.rows())
        self.file.write("".join(lines).encode("utf-8", errors="backslashreplace"))


class ParquetWriter(TableWriter):
    """One row group per ROWS rows or text. `file` and `text` are strings, `bits` is a double, the others are int64."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError:
            raise DataError("Parquet files need pyarrow; install it with: pip install 'longspan[arrow]'") from None
        self.arrow = pyarrow
        kinds = {"file": pyarrow.string(), "text": pyarrow.string(), "bits": pyarrow.float64()}
        fields = [(column, kinds.get(column, pyarrow.int64())) for column in ("file", *COLUMNS)]
        self.schema = pyarrow.schema(fields)
        self.rows: list[dict[str, Any]] = []
        self.out = pyarrow.parquet.ParquetWriter(pyarrow.PythonFile(file, mode="w"), self.schema)

    def add(self, name: str, found: Surprisal) -> None:
        name = name.encode("utf-8", errors="backslashreplace").decode()
        for row in found.rows():
            self.rows.append({"file": name} | row)
            if len(self.rows) == ROWS:
                self._flush()

    def _flush(self) -> None:
        if self.rows:
            self.out.write_table(self.arrow.Table.from_pylist(self.rows, schema=self.schema))
        self.rows = []

    def close(self) -> None:
        self._flush()
        self.out.close()


FORMATS: dict[str, type[TableWriter]] = {"csv": CsvWriter, "jsonl": JsonLinesWriter, "parquet": ParquetWriter}


def table_writer(format: str, file: IO[bytes]) -> TableWriter:
    """The writer of a format: csv, jsonl or parquet."""
    if format not in FORMATS:
        raise UnknownNameError("format", format, FORMATS)
    return FORMATS[format](file)


def format_of(path: Path | None, format: str | None) -> str:
    """The format that was given, or that of the file's suffix. Default: csv."""
    if format is not None:
        if format not in FORMATS:
            raise UnknownNameError("format", format, FORMATS)
        return format
    if path is None:
        return "csv"
    found = path.suffix.lower().removeprefix(".")
    if found not in FORMATS:
        raise ConfigError(f"{path} has an unknown suffix; use .csv, .jsonl or .parquet, or add --format")
    return found
