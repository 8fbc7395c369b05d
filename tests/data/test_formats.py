"""Input formats: every one gives the same documents, splits and errors with the line and the fix."""

import bz2
import gzip
import io
import json
import lzma
import sys
import tarfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longspan.data import open_corpus
from longspan.data.sources import read_standard_input
from longspan.data.splits import SPLITS
from longspan.errors import DataError, DataWarning
from longspan.tokenizers import Tokenizer
from longspan.tokenizers.subwords import SubwordTokenizer
from longspan.tokenizers.text import likely_encoding
from longspan.tokenizers.train_subwords import train_subwords

TEXTS = [f"Text {k}: naïve\nrivers, 猫.\n" * (1 + k % 3) for k in range(40)]


def rows(texts: list[str], field: str = "text") -> bytes:
    return b"".join(json.dumps({"id": k, field: text}).encode() + b"\n" for k, text in enumerate(texts))


def documents(path: Path, split: str | None, cache: Path, tokenizer: Any = None, **options: Any) -> list[str]:
    """The documents of a split, decoded."""
    found = open_corpus(path, split, tokenizer, cache=cache, **options)
    ends = [*found.starts[1:].tolist(), len(found)]
    return [found.tokenizer.decode(found.ids[a:b]) for a, b in zip(found.starts.tolist(), ends, strict=True)]


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson.gz", "a.jsonl.xz", "a.jsonl.bz2", "a.jsonl.zst"])
def test_rows_of_json_lines_are_documents(name: str, tmp_path: Path, cache: Path) -> None:
    data = rows(TEXTS)
    if name.endswith(".zst"):
        compressed = pytest.importorskip("zstandard").compress(data)
    else:
        compress = {".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress}
        compressed = compress.get(Path(name).suffix, bytes)(data)
    (tmp_path / name).write_bytes(compressed)
    assert documents(tmp_path / name, None, cache) == TEXTS
    parts = [documents(tmp_path / name, split, cache) for split in SPLITS]
    assert parts == [TEXTS[:36], TEXTS[36:38], TEXTS[38:]]
    found = open_corpus(tmp_path / name, cache=cache)
    text = "".join(TEXTS).encode()
    assert (found.bytes, found.words) == (len(text), len(text.split()))


def test_zstandard_files_with_several_frames_and_damaged_ones(tmp_path: Path, cache: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    path, data = tmp_path / "a.txt.zst", b"some text " * 1000
    packed = zstandard.compress(data)
    path.write_bytes(packed * 3)
    assert open_corpus(path, cache=cache).ids.tobytes() == data * 3
    for damaged in (packed[:-1], packed + packed[:9], packed + b"x" * 9, b"", b"not zstandard"):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"a\.txt\.zst"):
            open_corpus(path, cache=cache)


def test_large_json_lines_are_divided_between_rows(tmp_path: Path, cache: Path) -> None:
    texts = [f"{k} " * 20_000 for k in range(100)]
    (tmp_path / "a.jsonl").write_bytes(rows(texts).replace(b"\n", b"\r\n\n"))
    parts = [documents(tmp_path / "a.jsonl", split, cache) for split in SPLITS]
    assert [text for part in parts for text in part] == texts
    assert [len(part) for part in parts[1:]] == [5, 4]


def test_documents_end_in_their_token(tmp_path: Path, cache: Path) -> None:
    tokenizer = train_subwords(TEXTS, 300, document_end="<|end|>")
    (tmp_path / "a.jsonl").write_bytes(rows(["", *TEXTS]))
    found = open_corpus(tmp_path / "a.jsonl", None, tokenizer, cache=cache)
    expected = [id for text in TEXTS for id in [*tokenizer.encode(text).tolist(), 0]]
    assert found.ids.tolist() == expected
    assert found.starts.tolist() == [0, *(k + 1 for k, id in enumerate(expected[:-1]) if id == 0)]


def test_rows_that_cannot_be_read_are_named(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "a.jsonl"
    good = rows(TEXTS[:2])
    for row, words in (
        (b'{"body": "x"}', ["no field 'text'", "'body'", "--field"]),
        (b"[1]", ["not a JSON object"]),
        (b"{x", ["not JSON"]),
        (b'{"text": 7}', ["'7'"]),
        (b'{"text": "\\ud800"}', ["surrogate"]),
        ('{"text": "Die Straße überquert die Brücke für zwölf Euro"}'.encode("cp1252"), ["not UTF-8", "cp1252"]),
    ):
        path.write_bytes(good + row + b"\n")
        with pytest.raises(DataError, match=r"line 3 of .*a\.jsonl") as caught:
            open_corpus(path, cache=cache)
        assert all(word in str(caught.value) for word in words), caught.value


def test_a_field_can_be_named(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.jsonl").write_bytes(rows(["x", "y"], "body"))
    (tmp_path / "texts" / "b.txt").write_bytes(b"plain text")
    (tmp_path / "texts" / "c.txt").write_bytes(rows(["z"], "body"))
    found = documents(tmp_path / "texts", None, cache, field="body")
    assert found == ["x", "y", "plain text", "z"]
    (tmp_path / "nested.jsonl").write_text('{"a": {"b": "x"}}\n{"a.b": "y", "a": {"b": "z"}}\n')
    assert documents(tmp_path / "nested.jsonl", None, cache, field="a.b") == ["x", "y"]
    with pytest.raises(DataError, match=r"line 1 .*'a\.c'"):
        open_corpus(tmp_path / "nested.jsonl", cache=cache, field="a.c")
    with pytest.raises(DataError, match="enwik8"):
        open_corpus("enwik8", cache=cache, field="body")


@pytest.mark.parametrize("encoding", ["cp1252", "utf-16", "utf-8-sig", "utf-16-le"])
def test_encodings(encoding: str, tmp_path: Path, cache: Path) -> None:
    text = "Die Straße überquert die Brücke.\n" * 20
    (tmp_path / "a.txt").write_bytes(text.encode(encoding))
    assert documents(tmp_path / "a.txt", None, cache, "characters", encoding=encoding) == [text]
    (tmp_path / "a.jsonl").write_bytes((json.dumps({"text": text}, ensure_ascii=False) + "\n").encode(encoding))
    assert documents(tmp_path / "a.jsonl", None, cache, "characters", encoding=encoding) == [text]


def test_errors_suggest_the_encoding(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("Der Bäcker verkauft Brötchen für zwölf Euro auf der Straße.".encode("latin-1"))
    with pytest.raises(DataError, match=r"byte 5 .*--encoding cp1252"):
        open_corpus(path, tokenizer="words", cache=cache)
    with pytest.raises(DataError, match="cp932"):
        open_corpus(path, tokenizer="words", cache=cache, encoding="cp932")
    for encoding in ("latin-0", "base64", "\0"):
        with pytest.raises(DataError, match="encoding"):
            open_corpus(path, cache=cache, encoding=encoding)
    russian = "Все счастливые семьи похожи друг на друга, каждая несчастливая семья несчастлива по-своему."
    japanese = "吾輩は猫である。名前はまだ無い。どこで生れたかとんと見当がつかぬ。"
    for text, encoding in ((russian, "cp1251"), (russian, "koi8-r"), (japanese, "cp932"), (japanese, "euc-jp")):
        assert likely_encoding(text.encode(encoding)) == encoding
    for encoding, suggested in (("utf-16", "utf-16"), ("utf-32", "utf-32"), ("cp932", "cp932")):
        (tmp_path / "a.jsonl").write_bytes("".join(f'{{"text": "{japanese}"}}\n' for _ in range(2)).encode(encoding))
        with pytest.raises(DataError, match=f"--encoding {suggested}"):
            open_corpus(tmp_path / "a.jsonl", cache=cache)
        path.write_bytes((japanese * 200).encode(encoding)[:-1])  # ends inside a character
        with pytest.raises(DataError, match=f"--encoding {suggested}"):
            open_corpus(path, tokenizer="words", cache=cache)


def test_a_damaged_text_is_not_taken_for_another_encoding(tmp_path: Path, cache: Path) -> None:
    text = ("Der Bäcker verkauft Brötchen.\n" * 40).encode()
    (tmp_path / "a.txt").write_bytes(text + b"\xc3")
    with pytest.raises(DataError, match=f"byte {len(text)} .*remove these bytes"):
        open_corpus(tmp_path / "a.txt", "test", tokenizer="characters", cache=cache)
    lines = [json.dumps({"text": line}, ensure_ascii=False).encode() + b"\n" for line in text.decode().split("\n")]
    (tmp_path / "a.jsonl").write_bytes(b"".join(lines) + b'{"text": "\xff"}\n')
    with pytest.raises(DataError, match=r"line 42 .*remove these bytes"):
        open_corpus(tmp_path / "a.jsonl", cache=cache)
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "\\ud800"}\n')
    with pytest.raises(DataError, match=r"line 1 .*surrogate \(U\+D800\)"):
        open_corpus(tmp_path / "b.jsonl", cache=cache)


def test_a_field_that_no_file_has_is_an_error(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps([{"text": "a"}], indent=1))
    with pytest.raises(DataError, match="'text' has no effect"):
        open_corpus(tmp_path / "a.json", field="text", cache=cache)


def test_a_tokenizer_that_loses_text_is_reported(tmp_path: Path, cache: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    path = tmp_path / "a.jsonl"
    path.write_bytes(rows(["abc", "a b", "abc ABC"]))  # not in the first row only
    for vocabulary, lossless in (({"a": 0, "b": 1, "c": 2, " ": 3, "\n": 4}, False), (None, True)):
        if vocabulary is None:
            tokenizer = train_subwords(["abc"], 256)
        else:
            library = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
            library.decoder = tokenizers.decoders.Fuse()
            tokenizer = SubwordTokenizer(library.to_str())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            open_corpus(path, tokenizer=tokenizer, cache=cache)
        assert [w.category for w in caught] == ([] if lossless else [DataWarning])


@pytest.mark.parametrize("kind", ["words", "subwords"])
def test_a_text_of_unknown_words_is_reported(kind: str, tmp_path: Path, cache: Path) -> None:
    """By hand: train has no unknown token, five of the six tokens of valid are, and half of those of test."""
    (tmp_path / "c").mkdir()
    for name, text in (("train", "a b a b a b\n"), ("valid", "x x x x x\n"), ("test", "x x a\n")):
        (tmp_path / "c" / f"{name}.txt").write_text(text if kind == "words" else text.replace(" ", ""))
    tokenizer: Any = kind
    if kind == "subwords":
        tokenizers = pytest.importorskip("tokenizers")
        model = tokenizers.models.BPE({"<unk>": 0, "a": 1, "b": 2, "\n": 3}, [], unk_token="<unk>")
        tokenizer = SubwordTokenizer(tokenizers.Tokenizer(model).to_str())
    for split in SPLITS:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            open_corpus(tmp_path / "c", split, tokenizer, cache=cache)
        found = [str(w.message) for w in caught if "vocabulary" in str(w.message)]
        assert ["83%" in one and "valid" in one for one in found] == ([True] if split == "valid" else [])


@pytest.mark.parametrize("form", ["gz", "tar", "encoding", "stdin"])
def test_errors_name_the_file_of_the_user(
    form: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not the file in the cache that it was unpacked or converted to."""
    data, options = rows(TEXTS) + b'{"text": 7}\n', {"encoding": "cp1252"} if form == "encoding" else {}
    path, shown = tmp_path / "a.jsonl", "a.jsonl"
    if form == "stdin":
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        path, shown, options = read_standard_input(cache), "standard input", {"field": "text"}
    elif form == "tar":
        path, shown = tmp_path / "b.tar", "b.tar/in/c.jsonl.gz/c.jsonl"
        with tarfile.open(path, "w") as archive:
            member = tarfile.TarInfo("in/c.jsonl.gz")
            packed = gzip.compress(data)
            member.size = len(packed)
            archive.addfile(member, io.BytesIO(packed))
    elif form == "gz":
        path, shown = tmp_path / "d.jsonl.gz", "d.jsonl.gz/d.jsonl"
        path.write_bytes(gzip.compress(data))
    else:
        path.write_bytes(data)
    where = "" if form == "stdin" else f"{tmp_path}/"
    with pytest.raises(DataError, match=f"line {len(TEXTS) + 1} of {where}{shown} has '7'"):
        open_corpus(path, cache=cache, **options)


def test_links_are_read_by_their_own_names(tmp_path: Path, cache: Path) -> None:
    """As in the cache of `huggingface_hub`. Links to folders are followed, but not in circles."""
    blobs, root = tmp_path / "blobs", tmp_path / "corpus"
    for folder in (blobs, root, tmp_path / "elsewhere"):
        folder.mkdir()
    (blobs / "4a3b").write_bytes(gzip.compress(rows(TEXTS)))
    (root / "valid.jsonl.gz").symlink_to(blobs / "4a3b")
    (blobs / "5c6d").write_bytes(rows(TEXTS[:3]))
    (root / "test.jsonl").symlink_to(blobs / "5c6d")
    (tmp_path / "elsewhere" / "a.txt").write_text("some text")
    (root / "train").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "circle").symlink_to(root)
    assert [documents(root, split, cache) for split in SPLITS] == [["some text"], TEXTS, TEXTS[:3]]


def test_equal_files_in_archives_have_their_own_names(tmp_path: Path, cache: Path) -> None:
    """They are one file in the cache."""
    for split in SPLITS:
        (tmp_path / "corpus" / split).mkdir(parents=True)
        (tmp_path / "corpus" / split / "part.txt.gz").write_bytes(gzip.compress(b"same", mtime=0))
    found = open_corpus(tmp_path / "corpus", "test", cache=cache).splits
    assert [found[split] for split in SPLITS] == [(f"{split}/part.txt.gz/part.txt",) for split in SPLITS]


def test_standard_input_is_a_file(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(rows(TEXTS))))
        path = read_standard_input(cache)
        assert documents(path, None, cache, field="text") == TEXTS
    assert len(list(path.parent.iterdir())) == 1
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(gzip.compress(rows(TEXTS)))))
    assert documents(read_standard_input(cache), None, cache, field="text") == TEXTS
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    with pytest.raises(DataError, match="standard input is empty"):
        read_standard_input(cache)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
    monkeypatch.setenv("WORLD_SIZE", "2")  # on two nodes LOCAL_WORLD_SIZE may be 1
    with pytest.raises(DataError, match="several processes"):
        read_standard_input(cache)


def test_without_an_extra_the_error_names_it(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in (("zstandard", "a.txt.zst"), ("pyarrow", "a.parquet")):
        (tmp_path / name).write_bytes(b"x")
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(DataError, match=r"pip install 'longspan\["):
            open_corpus(tmp_path / name, cache=cache)


@pytest.mark.parametrize("tokenizer", ["bytes", "characters", "words", train_subwords(TEXTS, 300)])
def test_word_and_byte_counts(tokenizer: str | Tokenizer, tmp_path: Path, cache: Path) -> None:
    text = " a\tb  c\r\nd \x0b\x0ce\x1cf é\u00a0g " * 50
    (tmp_path / "a").write_bytes(text.encode())
    found = open_corpus(tmp_path / "a", None, tokenizer, cache=cache)
    assert (found.bytes, found.words) == (len(text.encode()), len(text.encode().split()))
    assert isinstance(found.ids, np.memmap)
