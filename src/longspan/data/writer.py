"""Writer: the files of an encoded text, written so that a killed process can be continued."""

import dataclasses
import hashlib
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from longspan.data.cache import key, read_json, sync, write_json
from longspan.data.encoding import EncodedTask
from longspan.tokenizers import Tokenizer
from longspan.tokenizers.text import read_blocks

IDS, STARTS, ABOUT = "ids.bin", "starts.npy", "about.json"
FORMAT = 2
_NEW_STARTS, _JOURNAL = "starts.bin", "journal.json"
_SECONDS = 5.0


@dataclass
class Done:
    """What is safely on disk: tasks, tokens, documents, and bytes and words of the text; `read` is bytes of files."""

    tasks: int = 0
    tokens: int = 0
    documents: int = 0
    bytes: int = 0
    words: int = 0
    read: int = 0
    empty: bool = False
    """The last document has no token so far."""


class Writer:
    """Appends encoded tasks to two files and notes every few seconds how far they are on disk.

    The fingerprint is the SHA-256 of the tokenizer, the ids and the document starts.
    """

    def __init__(self, folder: Path, tokenizer: Tokenizer) -> None:
        self.folder, self.dtype = folder, tokenizer.dtype.newbyteorder("<")
        self.digest = hashlib.sha256(tokenizer.fingerprint.encode("ascii"))
        self.done = self._restore()
        self.noted = time.monotonic()

    def _restore(self) -> Done:
        """What a killed process noted, if its files are as long as that."""
        try:
            done = Done(**read_json(self.folder / _JOURNAL))
            sizes = {IDS: done.tokens * self.dtype.itemsize, _NEW_STARTS: done.documents * 8}
            if any((self.folder / name).stat().st_size < size for name, size in sizes.items()):
                raise ValueError
        except (OSError, TypeError, ValueError):
            done, sizes = Done(), {IDS: 0, _NEW_STARTS: 0}
        for name, size in sizes.items():
            with (self.folder / name).open("ab") as file:
                file.truncate(size)
        for block in read_blocks(self.folder / IDS):
            self.digest.update(block)
        return done

    def __enter__(self) -> "Writer":
        self.ids, self.starts = ((self.folder / name).open("ab") for name in (IDS, _NEW_STARTS))
        return self

    def __exit__(self, *_: object) -> None:
        self.ids.close()
        self.starts.close()

    def add(self, result: EncodedTask, read: int) -> None:
        """Append the result of a task that `read` so many bytes of files."""
        done = self.done
        data = np.ascontiguousarray(result.ids, self.dtype).data
        self.ids.write(data)
        self.digest.update(data)
        self._add_starts(result)
        done.tasks += 1
        done.tokens += len(result.ids)
        done.bytes, done.words, done.read = done.bytes + result.bytes, done.words + result.words, done.read + read
        if time.monotonic() - self.noted > _SECONDS:
            self._note()

    def _add_starts(self, result: EncodedTask) -> None:
        """A document starts at its first token; one without tokens has no start."""
        begins = result.begins.copy()
        if len(begins) and not begins[0]:
            begins[0] = self.done.empty
        offsets = self.done.tokens + np.cumsum(result.lengths) - result.lengths
        starts = offsets[begins & (result.lengths > 0)]
        self.starts.write(starts.astype("<i8").tobytes())
        self.done.documents += len(starts)
        if len(begins):
            self.done.empty = bool(begins[-1] and result.lengths[-1] == 0)

    def _note(self) -> None:
        for file in (self.ids, self.starts):
            _flush(file)
        write_json(self.folder / _JOURNAL, dataclasses.asdict(self.done))
        self.noted = time.monotonic()

    def finish(self) -> None:
        """Write the remaining files and remove the journal."""
        for file in (self.ids, self.starts):
            _flush(file)
        starts = np.fromfile(self.folder / _NEW_STARTS, "<i8")
        self.digest.update(starts.tobytes())
        np.save(self.folder / STARTS, starts)
        sync(self.folder / STARTS)
        facts = {name: getattr(self.done, name) for name in ("tokens", "bytes", "words")}
        about = {"format": FORMAT, **facts, "fingerprint": self.digest.hexdigest()}
        write_json(self.folder / ABOUT, about | {"check": key(about)})
        for name in (_NEW_STARTS, _JOURNAL):
            (self.folder / name).unlink(missing_ok=True)


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
