import gzip
import json
import multiprocessing
import os
import pwd
import re
import shutil
import sys
import tarfile
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longspan.data import BatchStreams, Encoded, TokenizerSpec, documents, encoding, open_corpus
from longspan.data.cache import atomic_folder, cache_folder, locked
from longspan.data.documents import read_documents, tasks
from longspan.data.encoding import encode_task, encoder, run_tasks
from longspan.data.splits import SPLITS, ByCount, ByDocument, ByPercent, Document, Piece
from longspan.errors import DataError, UnknownNameError
from longspan.tokenizers import ByteTokenizer, CharacterTokenizer, Tokenizer, Unit, WordTokenizer


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "texts"
    for name in ("b.txt", "a/z.txt", "c.txt", "empty.txt", ".hidden"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("" if name == "empty.txt" else f"text of {name}\n")
    return root


def test_a_file_is_one_document_divided_by_bytes(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(bytes(range(256)) * 4)
    parts = [open_corpus(path, split, cache=cache) for split in ("train", "valid", "test")]
    assert [len(part) for part in parts] == [922, 51, 51]
    assert np.array_equal(np.concatenate([part.ids for part in parts]), open_corpus(path, cache=cache).ids)
    assert all(part.starts.tolist() == [0] and part.bytes == len(part) for part in parts)
    assert isinstance(parts[0].ids, np.memmap)
    assert len({part.fingerprint for part in parts}) == 3


def test_a_folder_is_documents_sorted_by_name(folder: Path, cache: Path) -> None:
    opened = open_corpus(folder, cache=cache)
    text = opened.tokenizer.decode(opened.ids)
    assert text == "text of a/z.txt\ntext of b.txt\ntext of c.txt\n"
    assert [text[start:].partition("\n")[0] for start in opened.starts] == text.splitlines()
    found = [open_corpus(folder, split, cache=cache) for split in SPLITS]
    assert [part.tokenizer.decode(part.ids) for part in found] == text.splitlines(keepends=True)


@pytest.mark.parametrize("count", [1, 2])
def test_a_folder_of_few_documents_fills_every_split(count: int, tmp_path: Path, cache: Path) -> None:
    for name in "ab"[:count]:
        (tmp_path / "few").mkdir(exist_ok=True)
        (tmp_path / "few" / name).write_bytes(name.encode() * 200)
    (tmp_path / "few" / "empty").touch()
    parts = [open_corpus(tmp_path / "few", split, cache=cache) for split in SPLITS]
    assert [bytes(part.ids) for part in parts] == [b"a" * n + b"b" * n * (count - 1) for n in (180, 10, 10)]
    assert [part.starts.tolist() for part in parts] == [[0, n][:count] for n in (180, 10, 10)]


def test_pipes_and_empty_names_are_refused(tmp_path: Path, cache: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="/pipe "):
        open_corpus(tmp_path / "pipe", cache=cache)
    with pytest.raises(DataError, match="empty"):
        open_corpus("", cache=cache)


def test_every_twentieth_document_is_held_out() -> None:
    def held(count: int, split: str) -> list[int]:
        documents = [Document(str(k), Path(str(k)), 1) for k in range(count)]
        return [int(piece.path.name) for piece in ByDocument().pieces(documents, split, "byte")]

    assert held(1, "train") == [0]
    assert (held(2, "train"), held(2, "valid"), held(2, "test")) == ([0], [], [1])
    assert (held(3, "train"), held(3, "valid"), held(3, "test")) == ([0], [1], [2])
    assert (held(45, "valid"), held(45, "test")) == ([18, 38], [19, 39])
    assert sorted(held(45, "train") + held(45, "valid") + held(45, "test")) == list(range(45))


def test_documents_are_held_out_by_count() -> None:
    """By hand: the midpoints of eight equal intervals of 98 are 6.125, 18.375, 30.625 and so on."""
    rule = ByCount(valid=3, test=5)

    def held(count: int, split: str) -> list[int]:
        documents = [Document(str(k), Path(str(k)), 1) for k in range(count)]
        return [int(piece.path.name) for piece in rule.pieces(documents, split, "byte")]

    assert (held(98, "valid"), held(98, "test")) == ([18, 55, 79], [6, 30, 42, 67, 91])
    assert (held(2, "train"), held(2, "valid"), held(2, "test")) == ([], [0, 1], [])
    for count in range(8, 120):
        parts = [held(count, split) for split in SPLITS]
        assert [len(part) for part in parts[1:]] == [3, 5]
        assert sorted(k for part in parts for k in part) == list(range(count))


def test_a_changed_text_is_encoded_again(tmp_path: Path, cache: Path) -> None:
    """Also with the same size in the same instant, and with the old size and time restored."""
    path = tmp_path / "text"
    fingerprints = set()
    for content in (b"first", b"other", b"other text"):
        path.write_bytes(content)
        opened = open_corpus(path, cache=cache)
        assert opened.ids.tobytes() == content
        fingerprints.add(opened.fingerprint)
    assert len(fingerprints) == 3
    os.utime(path, ns=(0, 0))
    open_corpus(path, cache=cache)
    path.write_bytes(b"texts same")
    os.utime(path, ns=(0, 0))
    assert open_corpus(path, cache=cache).ids.tobytes() == b"texts same"
    assert len(list((cache / "encoded").iterdir())) == 1


def test_a_text_is_encoded_once(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "text"
    path.write_text("a b\nc")
    first = open_corpus(path, tokenizer="words", cache=cache)
    monkeypatch.setattr("longspan.data.encoded.run_tasks", None)
    again = open_corpus(path, tokenizer="words", cache=cache)
    assert again.fingerprint == first.fingerprint
    assert again.tokenizer == first.tokenizer == WordTokenizer(("<eos>", "<unk>", "a", "b", "c"))
    os.utime(path)
    assert open_corpus(path, tokenizer="words", cache=cache).fingerprint == first.fingerprint


def test_a_damaged_cache_entry_is_replaced(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"some text")
    first = open_corpus(path, cache=cache)
    (entry,) = (cache / "encoded").iterdir()
    good = {file.name: file.read_bytes() for file in entry.iterdir()}
    changes: list[tuple[str, bytes | None]] = [
        ("ids.bin", b"some"),
        ("ids.bin", b"same text"),
        ("about.json", b"{"),
        ("about.json", good["about.json"].replace(b'"bytes": 9', b'"bytes": 8')),
        ("about.json", good["about.json"].replace(first.fingerprint.encode(), b"0" * 64)),
        ("starts.npy", b""),
        ("starts.npy", good["starts.npy"][:-1] + b"\1"),
        ("starts.npy", good["starts.npy"].replace(b"(1,), } ", b"(1,1), }")),
        ("starts.npy", None),
    ]
    for name, content in changes:
        assert content != good[name]
        if content is None:
            (entry / name).unlink()
        else:
            (entry / name).write_bytes(content)
        again = open_corpus(path, cache=cache)
        assert (again.ids.tobytes(), again.bytes, again.fingerprint) == (b"some text", 9, first.fingerprint)
        assert {file.name: file.read_bytes() for file in entry.iterdir()} == good


def test_a_changed_cached_tokenizer_is_replaced(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "text"
    path.write_text("a b\nc")
    expected = open_corpus(path, tokenizer="words", cache=cache).tokenizer
    (cached,) = (cache / "tokenizers").iterdir()
    for content in (cached.read_bytes().replace(b'"a", "b"', b'"b", "a"'), b"{}", b"[]", b"1"):
        assert content != cached.read_bytes()
        cached.write_bytes(content)
        assert open_corpus(path, tokenizer="words", cache=cache).tokenizer == expected


def test_a_folder_that_cannot_be_read_is_named(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Listing it fails, or entering it. Root may do both, so for root the system calls are patched."""
    closed = str(folder / "a")
    original_scandir, original_stat = os.scandir, os.stat

    def scandir(path: str) -> object:
        if path == closed:
            raise PermissionError(13, "Permission denied", path)
        return original_scandir(path)

    def stat(path: object, **options: object) -> object:
        if os.path.dirname(os.fspath(path)) == closed:  # type: ignore[call-overload]  # noqa: PTH120
            raise PermissionError(13, "Permission denied", path)
        return original_stat(path, **options)  # type: ignore[call-overload, arg-type]

    for mode, name, failing in ((0o000, "scandir", scandir), (0o400, "stat", stat)):
        os.chmod(closed, mode)  # noqa: PTH101
        with monkeypatch.context() as patch:
            if os.geteuid() == 0:
                patch.setattr(os, name, failing)
            with pytest.raises(DataError, match=re.escape(closed)):
                open_corpus(folder, cache=cache)
        os.chmod(closed, 0o700)  # noqa: PTH101
    assert len(open_corpus(folder, cache=cache).starts) == 3


def test_the_vocabulary_comes_from_the_training_split(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "text"
    path.write_text("ab" * 95 + "ac" * 5)
    train = open_corpus(path, "train", "characters", cache=cache)
    assert train.tokenizer == CharacterTokenizer("ab")
    with pytest.raises(DataError, match=r"character 191 .*'c' \(U\+0063\).* 2 symbols"):
        open_corpus(path, "test", "characters", cache=cache)
    assert open_corpus(path, None, "characters", cache=cache).tokenizer == CharacterTokenizer("abc")
    wider = TokenizerSpec("characters", "all", vocabulary_splits=("train", "valid", "test"))
    assert open_corpus(path, "test", wider, cache=cache).tokenizer == CharacterTokenizer("abc")


UNITS: tuple[Unit, ...] = ("byte", "character", "word")


def test_splits_begin_between_tokens(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("éü\n" * 40, encoding="utf-8")
    document = Document("text", path, path.stat().st_size)
    for unit in UNITS:
        bounds = [(p.start, p.stop) for s in SPLITS for p in ByPercent(7, 7).pieces([document], s, unit)]
        assert [bounds[0][0], bounds[1][0], bounds[2][0]] == [0, bounds[0][1], bounds[1][1]]
        data = path.read_bytes()
        for start, stop in bounds:
            if unit != "byte":
                data[start:stop].decode()
            if unit == "word":
                assert start % 5 == 0


@pytest.mark.parametrize("kind", ["a.txt.gz", "a.tar.xz", "a.zip"])
def test_archives_are_read_like_folders(kind: str, folder: Path, tmp_path: Path, cache: Path) -> None:
    path = tmp_path / kind
    if kind == "a.txt.gz":
        with gzip.open(path, "wb") as out:
            out.write(b"text of c.txt\n")
    elif kind == "a.zip":
        shutil.make_archive(str(path.with_suffix("")), "zip", folder)
    else:
        with tarfile.open(path, "w:xz") as archive:
            archive.add(folder, "texts")
    opened = open_corpus(path, cache=cache)
    expected = "text of c.txt\n" if kind == "a.txt.gz" else "text of a/z.txt\ntext of b.txt\ntext of c.txt\n"
    assert opened.tokenizer.decode(opened.ids) == expected
    (unpacked,) = (cache / "unpacked").iterdir()
    for change in (lambda text: b"", lambda text: text.replace(b"text", b"next")):
        file = next(p for p in unpacked.rglob("*.txt") if p.stat().st_size)
        file.write_bytes(change(file.read_bytes()))
        assert open_corpus(path, cache=cache).ids.tobytes() == expected.encode()


def test_errors_name_what_cannot_be_read(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(DataError, match="/empty is empty"):
        open_corpus(tmp_path / "empty", cache=cache)
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError, match="/none is empty"):
        open_corpus(tmp_path / "none", cache=cache)
    with pytest.raises(DataError, match="/missing"):
        open_corpus(str(tmp_path / "missing"), cache=cache)
    with pytest.raises(UnknownNameError, match=r"'enwick8'.*'enwik8'"):
        open_corpus("enwick8", cache=cache)
    with pytest.raises(DataError, match="longspan data get enwik8"):
        open_corpus("enwik8", cache=cache)
    (tmp_path / "bad.gz").write_bytes(b"not gzip")
    with pytest.raises(DataError, match=r"/bad\.gz"):
        open_corpus(tmp_path / "bad.gz", cache=cache)
    (tmp_path / "bytes").write_bytes(b"ab\xff")
    with pytest.raises(DataError, match=r"/bytes .*byte 2"):
        open_corpus(tmp_path / "bytes", tokenizer="characters", cache=cache)
    with pytest.raises(UnknownNameError, match=r"split.*'dev'"):
        open_corpus(tmp_path / "bytes", "dev", cache=cache)
    with pytest.raises(UnknownNameError, match=r"tokenizer.*'syllables'"):
        open_corpus(tmp_path / "bytes", tokenizer="syllables", cache=cache)
    with pytest.raises(DataError, match=r"no tokenizer file or folder bpe/tokenizer\.json;"):
        open_corpus(tmp_path / "bytes", tokenizer="bpe/tokenizer.json", cache=cache)
    assert not list(cache.rglob(".part-*"))
    assert not list((cache / "encoded").glob("*"))


def test_a_failure_leaves_no_folder(tmp_path: Path) -> None:
    def fill() -> None:
        with atomic_folder(tmp_path / "new") as folder:
            (folder / "half").touch()
            raise OSError(28, "No space left on device")

    with pytest.raises(DataError, match=r"/new .*No space left"):
        fill()
    assert list(tmp_path.iterdir()) == []


def test_without_a_home_the_error_names_the_variable_to_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(_: int) -> None:
        raise KeyError("uid not found")

    for name in ("HOME", "LONGSPAN_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    with pytest.raises(DataError, match="LONGSPAN_CACHE"):
        cache_folder()
    monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path / "cache"))
    assert cache_folder() == (tmp_path / "cache").resolve()


TEXTS = st.lists(st.text(st.sampled_from("ab é€\n\r"), max_size=60), min_size=1, max_size=4)


def encode_with_workers(pieces: list[Piece], tokenizer: Tokenizer, size: int = 1000, workers: int = 2) -> list[int]:
    found = run_tasks(encoder(tokenizer), tasks(pieces, tokenizer.unit, size), workers)
    return [int(k) for _, result in found for k in result.ids]


@given(TEXTS, st.integers(1, 9))
def test_chunks_are_the_text_and_divide_no_token(texts: list[str], size: int) -> None:
    """For every task size, the chunks of the workers give the same ids as the complete text."""
    tokenizers = [
        ByteTokenizer(),
        CharacterTokenizer("ab é€\n\r"),
        WordTokenizer(("<eos>", "<unk>", "a", "b", "ab")),
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "text"
        for tokenizer in tokenizers:
            for text in texts:
                data = text.encode()
                path.write_bytes(data)
                cut = list(tasks([Piece(path, 0, len(data))], tokenizer.unit, size))
                assert b"".join(part for task in cut for chunk in task for part in read_documents(chunk)) == data
                found = [encode_task(tokenizer, task) for task in cut]
                assert [k for one in found for k in one.ids] == tokenizer.encode(data).tolist()
                assert sum(one.words for one in found) == len(data.split())
                assert sum(one.bytes for one in found) == len(data)


def test_chunks_begin_with_a_line(tmp_path: Path) -> None:
    """A tokenizer that begins every line with a token adds it once."""
    tokenizer = WordTokenizer(("<S>", "<UNK>", "a", "b"), boundary="<S>")
    text = "a b\n\nb a a\r\na\n \nb"
    (tmp_path / "text").write_bytes(text.encode())
    expected = [0, 2, 3, 0, 0, 3, 2, 2, 0, 2, 0, 0, 3, 0]
    assert tokenizer.encode(text).tolist() == expected
    for size in range(1, 20):
        pieces = [Piece(tmp_path / "text", 0, len(text))]
        assert encode_with_workers(pieces, tokenizer, size, workers=1) == expected


def test_workers_give_the_ids_of_one_process(tmp_path: Path) -> None:
    texts = [("ab é\r\n" * 700), "b", "a b\n" * 30, "é" * 2000]
    pieces = []
    for k, text in enumerate(texts):
        (tmp_path / str(k)).write_bytes(text.encode())
        pieces.append(Piece(tmp_path / str(k), 0, len(text.encode())))
    for tokenizer in (WordTokenizer(("<eos>", "<unk>", "a", "b")), CharacterTokenizer("ab é\r\n")):
        complete = [k for text in texts for k in tokenizer.encode(text).tolist()]
        assert encode_with_workers(pieces, tokenizer) == complete
        assert encode_with_workers(pieces, tokenizer, workers=1) == complete
    (tmp_path / "0").write_bytes(texts[0].encode()[:-2] + b"\xff\n")
    with pytest.raises(DataError, match=f"byte {pieces[0].size - 2} "):
        encode_with_workers(pieces, CharacterTokenizer("ab é\r\n"))


def test_subwords_are_encoded_by_processes(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tokenizers")
    from longspan.tokenizers.train_subwords import train_subwords

    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": f"Article {k} about a river in a town."}) + "\n" for k in range(400)))
    tokenizer = train_subwords([path.read_text()], 300)
    alone = open_corpus(path, None, tokenizer, cache / "one")
    monkeypatch.setattr(encoding, "_PARALLEL_MIN_BYTES", 0)
    pieces = [Piece(path, 0, 1)]
    counts = {}
    for cores in (2, 8, 16, 64):
        monkeypatch.setattr(encoding, "_cores", lambda cores=cores: cores)
        counts[cores] = encoding.subword_workers(pieces, 32_000)
    assert counts == {2: (2, 1), 8: (6, 2), 16: (6, 3), 64: (6, 11)}
    assert [encoding.byte_workers([Piece(path, 0, 1, field)]) for field in (None, "text")] == [1, 8]
    monkeypatch.setattr(encoding, "_cores", lambda: 3)
    monkeypatch.setattr(encoding, "_MEMORY", 2 * 110 << 20)
    monkeypatch.setattr(documents, "TASK_BYTES", 5000)
    started = []
    begin = encoding._Workers.__init__
    monkeypatch.setattr(encoding._Workers, "__init__", lambda *given: started.append(given[2:]) or begin(*given))
    divided = open_corpus(path, None, tokenizer, cache / "two")
    assert started == [(2, 2)]
    assert np.array_equal(alone.ids, divided.ids)
    assert alone.fingerprint == divided.fingerprint
    assert len(divided.starts) == 400


def test_workers_import_nothing_from_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text").write_text("a b\n" * 100)
    pieces = [Piece(tmp_path / "text", 0, 400)]
    here = tmp_path / "here"
    here.mkdir()
    for name in ("queue", "numpy", "signal", "longspan", "sitecustomize"):
        (here / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r})\nraise SystemExit(3)\n")
    monkeypatch.chdir(here)
    assert len(encode_with_workers(pieces, WordTokenizer(("<eos>", "<unk>", "a", "b")))) == 300
    assert not (tmp_path / "ran").exists()


def _open(path: Path, cache: Path, results: "multiprocessing.Queue[str]") -> None:
    results.put(open_corpus(path, tokenizer="characters", cache=cache).fingerprint)


def test_a_lock_survives_its_file_being_removed(tmp_path: Path) -> None:
    """The file is removed with every release. With six threads, that happens at every point of taking the lock."""
    holders, most, finished = 0, 0, []

    def hold() -> None:
        nonlocal holders, most
        for _ in range(200):
            with locked(tmp_path / "lock"):
                holders += 1
                most = max(most, holders)
                holders -= 1
        finished.append(True)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=hold) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert len(finished) == 6
    assert most == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(sys.platform == "win32", reason="forks")
def test_concurrent_processes_share_one_cache_entry(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "text"
    path.write_text("some text " * 20_000)
    context = multiprocessing.get_context("fork")
    results: multiprocessing.Queue[str] = context.Queue()
    processes = [context.Process(target=_open, args=(path, cache, results)) for _ in range(4)]
    for process in processes:
        process.start()
    found = {results.get(timeout=60) for _ in processes}
    for process in processes:
        process.join()
    assert found == {open_corpus(path, tokenizer="characters", cache=cache).fingerprint}
    assert len(list((cache / "encoded").iterdir())) == 1
    assert not list(cache.rglob(".part-*"))


def test_the_standard_library_is_a_corpus(cache: Path) -> None:
    parts: list[Encoded] = [open_corpus("stdlib", split, cache=cache) for split in ("train", "valid", "test")]
    assert all(len(part.starts) > 5 for part in parts)
    assert len(parts[0]) > 5 * len(parts[1]) > 0
    streams = BatchStreams(parts[1].ids, parts[1].starts, 4, parts[1].fingerprint, "stdlib")
    assert streams.next(16).tokens.shape == (4, 16)


def test_reversed_documents(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "abc"}\n{"text": "de"}\n')
    text = open_corpus(tmp_path / "a.jsonl", None, "bytes", tmp_path / "cache")
    backward = text.reversed()
    assert bytes(backward.ids.tolist()) == bytes(text.ids.tolist())[::-1]
    parts = [bytes(part.tolist())[::-1] for part in np.split(backward.ids, backward.starts[1:])]
    assert parts == [bytes(part.tolist()) for part in np.split(text.ids, text.starts[1:])][::-1]
    assert backward.fingerprint != text.fingerprint
    assert backward.reversed().starts.tolist() == text.starts.tolist()
