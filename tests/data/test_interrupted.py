"""Preparation of a text: killed and continued, on a full disk, and in bounded memory."""

import errno
import gzip
import io
import json
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from longspan.data import documents, open_corpus, writer
from longspan.data.encoding import EncodedTask
from longspan.data.sources import read_standard_input
from longspan.data.writer import Done, Writer
from longspan.errors import DataError
from longspan.tokenizers import WordTokenizer, read_tokenizer
from longspan.tokenizers.train_subwords import train_subwords

PROGRAM = """
import sys, longspan.data.writer as writer, longspan.data.documents as documents
writer._SECONDS, documents.TASK_BYTES = 0.0, 2000
from longspan.data import open_corpus
from pathlib import Path
open_corpus(Path(sys.argv[1]), None, sys.argv[2], cache=Path(sys.argv[3]))
"""


@pytest.mark.parametrize("tokenizer", ["bytes", "words"])
def test_a_killed_preparation_is_continued(tokenizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, cache = tmp_path / "text.jsonl", tmp_path / "cache"
    rows = [{"text": " ".join(random.Random(k).choices("abcdef", k=200))} for k in range(1000)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(documents, "TASK_BYTES", 2000)
    expected = open_corpus(path, None, tokenizer, cache=tmp_path / "other")
    entries = cache / "encoded"
    noted = 0
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-c", PROGRAM, path, tokenizer, cache], stderr=subprocess.PIPE)
        while process.poll() is None and len(list(entries.glob(".part-*/journal.json"))) == 0:
            time.sleep(0.005)
        time.sleep(random.Random(noted).uniform(0.0, 0.1))
        if process.poll() is not None:
            break
        process.send_signal(signal.SIGKILL)
        process.wait()
        for journal in entries.glob(".part-*/journal.json"):
            tasks = json.loads(journal.read_text())["tasks"]
            assert tasks >= noted  # a later process begins where the earlier one stopped
            noted = tasks
    assert noted > 0
    found = open_corpus(path, None, tokenizer, cache=cache)
    assert found.fingerprint == expected.fingerprint
    assert (found.bytes, found.words) == (expected.bytes, expected.words)
    assert np.array_equal(found.ids, expected.ids)
    assert len(list(entries.iterdir())) == 1


def test_any_prefix_of_the_files_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power failure leaves the files longer than noted, or shorter. Documents may have no token, or cross tasks."""
    monkeypatch.setattr(writer, "_SECONDS", 0.0)
    tokenizer = WordTokenizer(("a",))

    def task(lengths: list[int], continues: bool) -> EncodedTask:
        begins = np.array([not continues, *[True] * (len(lengths) - 1)], np.bool_)
        return EncodedTask(np.zeros(sum(lengths), np.uint8), np.array(lengths, np.int64), begins, 9, 2)

    tasks = [task([2, 0, 3], False), task([0], True), task([1, 0], True), task([0], True), task([4], True)]
    starts = []
    for stop in range(len(tasks) + 1):
        for extra in (b"", b"\1" * 9):
            folder = tmp_path / f"{stop}{len(extra)}"
            folder.mkdir()
            with Writer(folder, tokenizer) as out:
                for one in tasks[:stop]:
                    out.add(one, 10)
            for name in ("ids.bin", "starts.bin"):
                with (folder / name).open("ab") as file:
                    file.write(extra)
            with Writer(folder, tokenizer) as out:
                assert out.done.tasks == stop
                for one in tasks[stop:]:
                    out.add(one, 10)
                out.finish()
            about = json.loads((folder / "about.json").read_text())
            starts.append((np.load(folder / "starts.npy").tolist(), about["tokens"], about["fingerprint"]))
    assert starts == [starts[0]] * len(starts)
    assert starts[0][:2] == ([0, 2, 6], 10)  # by hand: 2 + 3 + 1 tokens, then a document that begins with the 4
    (folder / "ids.bin").unlink()
    (folder / "journal.json").write_text(json.dumps({"tasks": 3, "tokens": 5, "documents": 1}))
    assert Writer(folder, tokenizer).done == Done()


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """No file may have more than `size` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.zip", "stdin"])
def test_a_full_disk_leaves_nothing_behind(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, path, cache = b"some words of a text\n" * 20_000, tmp_path / name, tmp_path / "cache"
    if name == "a.zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("b.txt", data)
    elif name != "stdin":
        path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    for limit in (10_000, 200_000, None):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        find = partial(read_standard_input, cache) if name == "stdin" else lambda: path
        if limit is None:
            assert open_corpus(find(), cache=cache).ids.tobytes() == data
            continue
        with full_disk(limit), pytest.raises(DataError, match=r"written: File too large; free .*LONGSPAN_CACHE"):
            open_corpus(find(), cache=cache)
        assert not list(cache.rglob(".part-*"))


def test_errors_of_the_file_system_name_the_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("text")
    denied = PermissionError(errno.EACCES, "Permission denied")
    (tmp_path / "cache").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "mkstemp", Mock(side_effect=denied))
        with pytest.raises(DataError, match=r"digests.*Permission denied; set LONGSPAN_CACHE"):
            open_corpus(tmp_path / "a.txt", cache=tmp_path / "cache")
    monkeypatch.setattr(Path, "open", Mock(side_effect=denied))
    with pytest.raises(DataError, match=r"a\.txt.*Permission denied; change its permissions"):
        open_corpus(tmp_path / "a.txt", cache=tmp_path / "cache")


def test_a_full_disk_leaves_no_part_of_a_tokenizer(tmp_path: Path) -> None:
    made = train_subwords(["some words of a text"] * 9, 260)
    with full_disk(1000), pytest.raises(DataError, match="bpe cannot be written: File too large"):
        made.save(tmp_path / "bpe")
    assert not any((tmp_path / "bpe").iterdir())
    made.save(tmp_path / "bpe")
    assert read_tokenizer(tmp_path / "bpe").fingerprint == made.fingerprint


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_200_megabytes_are_prepared_in_bounded_memory(tmp_path: Path) -> None:
    """Measured by hand with 5 GB: docs/LOG.md."""
    row = json.dumps({"text": "some words of a text\n" * 100}).encode() + b"\n"
    with (tmp_path / "large.jsonl").open("wb") as out:
        for _ in range(10):
            out.write(row * (20_000_000 // len(row)))
    program = (
        "import sys; from pathlib import Path; from longspan.data import open_corpus\n"
        "from resource import RUSAGE_CHILDREN, getrusage\n"
        "text = open_corpus(Path(sys.argv[1]), None, cache=Path(sys.argv[2]))\n"
        "own = Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0]\n"
        "print(text.bytes, text.words, len(text.starts), own, getrusage(RUSAGE_CHILDREN).ru_maxrss)"
    )
    command = [sys.executable, "-c", program, tmp_path / "large.jsonl", tmp_path / "cache"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    size, words, rows, parent, worker = map(int, done.stdout.split())
    assert size > 180_000_000
    assert (size, words) == (2100 * rows, 500 * rows)
    assert parent < 200_000
    assert worker < 100_000  # the largest; there are at most eight of them
