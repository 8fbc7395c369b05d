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
from longspan.data.splits import ByFile, ByPercent
from longspan.errors import DataError, DataWarning, UnknownNameError

TEXT = b"a small text\n" * 100


def known(name: str, content: bytes) -> CorpusFile:
    return CorpusFile(name, len(content), hashlib.sha256(content).hexdigest())


ONE = Corpus("one", "a test", "none", "bytes", ByPercent(), (known("one.txt", TEXT),))
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


def files_in(cache: Path) -> list[str]:
    return sorted(path.relative_to(cache).as_posix() for path in cache.rglob("*") if path.is_file())


@pytest.mark.parametrize("form", ["plain", "xz", "zip", "folder"])
def test_one_file_in_every_form(form: str, tmp_path: Path) -> None:
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
    assert files_in(cache) == ["corpora/one/one.txt"]
    assert open_corpus("one", cache=cache).ids.tobytes() == TEXT
    assert next(row for row in list_corpora(cache) if row.name == "one").installed


def test_three_files_from_an_archive(tmp_path: Path) -> None:
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


def test_wrong_files_install_nothing(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    wrong = tmp_path / "one.txt"
    for content, message in ((TEXT[:-1], "1,299 bytes"), (TEXT[:-1] + b"!", "SHA-256"), (b"", "0 bytes")):
        wrong.write_bytes(content)
        with pytest.raises(DataError, match=message):
            get("one", wrong, cache)
        assert files_in(cache) == []
    bomb = tmp_path / "one.xz"
    bomb.write_bytes(lzma.compress(b"0" * 100_000))
    with pytest.raises(DataError, match="1,300 bytes"):
        get("one", bomb, cache)
    with pytest.raises(DataError, match=r"no files .*a\.train"):
        get("three", wrong, cache)
    with pytest.raises(DataError, match="/missing"):
        get("one", tmp_path / "missing", cache)
    with pytest.raises(DataError, match="--from FILE"):
        get("one", cache=cache)
    with pytest.raises(DataError, match="stdlib"):
        get("stdlib", cache=cache)
    with pytest.raises(UnknownNameError, match=r"'enwik9'.*'enwik8'"):
        get("enwik9", cache=cache)
    assert files_in(cache) == []
    assert not any(path.name.startswith(".part") for path in cache.rglob("*"))


def test_files_without_a_known_sha256_are_checked_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By their SHA-1. enwik8 has as many bytes as text8, which may have any name."""
    hashed = CorpusFile("one.txt", len(TEXT), sha1=hashlib.sha1(TEXT).hexdigest())
    monkeypatch.setitem(CORPORA, "one", dataclasses.replace(ONE, files=(hashed,)))
    (tmp_path / "other").write_bytes(TEXT[::-1])
    with pytest.raises(DataError, match=f"SHA-1 {hashlib.sha1(TEXT[::-1]).hexdigest()}"):
        get("one", tmp_path / "other", tmp_path / "cache")
    (tmp_path / "right").write_bytes(TEXT)
    get("one", tmp_path / "right", tmp_path / "cache")
    with pytest.warns(DataWarning, match=r"other is not used"):
        get("one", tmp_path / "other", tmp_path / "cache")
    fetched = [corpus for corpus in CORPORA.values() if corpus.url and corpus.files]
    assert all(file.sha256 or file.sha1 for corpus in fetched for file in corpus.files)


def test_a_corpus_of_many_files_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    many = dataclasses.replace(ONE, files=(), complete=("a-*", 3))
    monkeypatch.setitem(CORPORA, "one", many)
    (tmp_path / "source").mkdir()
    for name in ("a-1", "b-1", "a-2"):
        (tmp_path / "source" / name).write_bytes(TEXT)
    with pytest.raises(DataError, match="2 of the 3 files"):
        get("one", tmp_path / "source", tmp_path / "cache")
    (tmp_path / "source" / "a-3").write_bytes(TEXT)
    assert len(list(get("one", tmp_path / "source", tmp_path / "cache").iterdir())) == 4


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


def test_from_its_url(served: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address, folder = served
    packed = lzma.compress(TEXT)
    (folder / "one.txt.xz").write_bytes(packed)
    cache = tmp_path / "cache"
    wrong = dataclasses.replace(ONE, url=f"{address}/one.txt.xz", archive_sha256="0" * 64)
    monkeypatch.setitem(CORPORA, "one", wrong)
    with pytest.raises(DataError, match="0" * 64):
        get("one", cache=cache)
    assert files_in(cache) == []
    right = dataclasses.replace(wrong, archive_sha256=hashlib.sha256(packed).hexdigest())
    monkeypatch.setitem(CORPORA, "one", right)
    reports: list[int] = []
    get("one", cache=cache, progress=lambda done, _: reports.append(done))
    assert reports[-1] == len(packed)
    assert files_in(cache) == ["corpora/one/one.txt"]


def test_the_size_of_a_download_is_limited_by_the_corpus(
    served: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, folder = served
    (folder / "one.txt").write_bytes(b"\0" * 3000)
    monkeypatch.setattr("longspan.data.corpora._OTHER_FILES", 1000)
    with pytest.raises(DataError, match=r"3,000.* 2,300"):
        get("one", f"{address}/one.txt", tmp_path / "cache")
    assert files_in(tmp_path / "cache") == []
    assert all(corpus.download_limit > (corpus.bytes or 0) for corpus in CORPORA.values())


def test_the_list_describes_the_tokenizers(tmp_path: Path) -> None:
    rows = {row.name: row for row in list_corpora(tmp_path)}
    names = ("stdlib", "enwik8", "enwik8-authors", "text8", "text8-authors", "wikitext-103", "ptb", "tinyshakespeare")
    assert set(rows) >= {*names, "english-novels"}
    assert "every byte" in rows["enwik8"].tokenizer
    assert "newlines dropped" in rows["enwik8-authors"].tokenizer
    assert rows["enwik8"].sha256["enwik8"].startswith("2b49720e")
    assert rows["stdlib"].installed
