import dataclasses
import hashlib
import http.server
import lzma
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from longspan.data import CORPORA, get, list_corpora, open_corpus
from longspan.data.corpora import Corpus, CorpusFile
from longspan.data.splits import ByFile, ByShare
from longspan.errors import DataError, UnknownNameError

TEXT = b"a small text\n" * 100


def known(name: str, content: bytes) -> CorpusFile:
    return CorpusFile(name, len(content), hashlib.sha256(content).hexdigest())


ONE = Corpus("one", "a test", "none", "bytes", ByShare(), (known("one.txt", TEXT),))
THREE = Corpus(
    "three",
    "a test",
    "none",
    "ptb-authors",
    ByFile("a.train", "a.valid", "a.test"),
    tuple(known(f"a.{split}", split.encode()) for split in ("train", "valid", "test")),
)


@pytest.fixture(autouse=True)
def corpora(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CORPORA, "one", ONE)
    monkeypatch.setitem(CORPORA, "three", THREE)


def left(cache: Path) -> list[str]:
    return sorted(path.relative_to(cache).as_posix() for path in cache.rglob("*") if path.is_file())


@pytest.mark.parametrize("form", ["plain", "xz", "zip", "folder"])
def test_one_file_in_any_form(form: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    if form == "plain":
        source.write_bytes(TEXT)
    elif form == "xz":
        source = tmp_path / "any.xz"
        source.write_bytes(lzma.compress(TEXT))
    elif form == "zip":
        source = tmp_path / "one.zip"
        with zipfile.ZipFile(source, "w") as archive:
            archive.writestr("folder/one.txt", TEXT)
            archive.writestr("folder/README", b"not it")
    else:
        source.mkdir()
        (source / "one.txt.xz").write_bytes(lzma.compress(TEXT))
        (source / "other").write_bytes(b"not it")
    cache = tmp_path / "cache"
    assert (get("one", source, cache) / "one.txt").read_bytes() == TEXT
    assert left(cache) == ["corpora/one/one.txt"]
    assert open_corpus("one", cache=cache).ids.tobytes() == TEXT
    assert next(row for row in list_corpora(cache) if row.name == "one").here


def test_three_files_of_an_archive(tmp_path: Path) -> None:
    source = tmp_path / "a.tgz"
    for split in ("train", "valid", "test"):
        (tmp_path / f"a.{split}").write_text(split)
    (tmp_path / "other").write_bytes(b"0" * 10_000)
    with tarfile.open(source, "w:gz") as archive:
        for name in ("other", "a.train", "a.valid", "a.test"):
            archive.add(tmp_path / name, f"data/{name}")
    cache = tmp_path / "cache"
    get("three", source, cache)
    opened = open_corpus("three", "valid", cache=cache)
    assert opened.tokenizer.decode(opened.ids) == "valid \n"
    assert opened.tokenizer.size == 4


def test_wrong_files_leave_nothing(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    wrong = tmp_path / "one.txt"
    for content, message in ((TEXT[:-1], "1,299 bytes"), (TEXT[:-1] + b"!", "SHA-256"), (b"", "0 bytes")):
        wrong.write_bytes(content)
        with pytest.raises(DataError, match=message):
            get("one", wrong, cache)
        assert left(cache) == []
    bomb = tmp_path / "one.xz"
    bomb.write_bytes(lzma.compress(b"0" * 100_000))
    with pytest.raises(DataError, match="beyond 1,300 bytes"):
        get("one", bomb, cache)
    with pytest.raises(DataError, match=r"holds no files called a\.train"):
        get("three", wrong, cache)
    with pytest.raises(DataError, match="there is no file or folder"):
        get("one", tmp_path / "missing", cache)
    with pytest.raises(DataError, match="--from FILE"):
        get("one", cache=cache)
    with pytest.raises(DataError, match="needs no fetching"):
        get("stdlib", cache=cache)
    with pytest.raises(UnknownNameError, match="did you mean 'enwik8'"):
        get("enwik9", cache=cache)
    assert left(cache) == []
    assert not any(path.name.startswith(".part") for path in cache.rglob("*"))


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    folder = tmp_path / "served"
    folder.mkdir()

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args: object) -> None:
            super().__init__(*args, directory=str(folder))  # type: ignore[arg-type]

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}", folder
        server.shutdown()
        thread.join()


def test_from_its_public_place(served: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address, folder = served
    packed = lzma.compress(TEXT)
    (folder / "one.txt.xz").write_bytes(packed)
    cache = tmp_path / "cache"
    at = dataclasses.replace(ONE, url=f"{address}/one.txt.xz", archive_sha256="0" * 64)
    monkeypatch.setitem(CORPORA, "one", at)
    with pytest.raises(DataError, match="not 0000"):
        get("one", cache=cache)
    assert left(cache) == []
    right = dataclasses.replace(at, archive_sha256=hashlib.sha256(packed).hexdigest())
    monkeypatch.setitem(CORPORA, "one", right)
    heard: list[int] = []
    get("one", cache=cache, progress=lambda done, _: heard.append(done))
    assert heard[-1] == len(packed)
    assert left(cache) == ["corpora/one/one.txt"]


def test_a_download_is_bounded_by_the_corpus(
    served: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, folder = served
    (folder / "one.txt").write_bytes(b"\0" * 3000)
    monkeypatch.setattr("longspan.data.corpora._OTHER_FILES", 1000)
    with pytest.raises(DataError, match=r"3,000.* 2,300"):
        get("one", f"{address}/one.txt", tmp_path / "cache")
    assert left(tmp_path / "cache") == []
    assert all(corpus.download_limit > (corpus.bytes or 0) for corpus in CORPORA.values())


def test_the_list_names_both_readings(tmp_path: Path) -> None:
    rows = {row.name: row for row in list_corpora(tmp_path)}
    names = ("stdlib", "enwik8", "enwik8-authors", "text8", "text8-authors", "wikitext-103", "ptb", "tinyshakespeare")
    assert set(rows) >= {*names, "english-novels"}
    assert "every byte" in rows["enwik8"].reading
    assert "newlines dropped" in rows["enwik8-authors"].reading
    assert rows["enwik8"].sha256["enwik8"].startswith("2b49720e")
    assert rows["stdlib"].here
