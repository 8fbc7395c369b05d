import gzip
import json
import warnings
from pathlib import Path

import pytest

from longspan.data import open_corpus
from longspan.data.json_lines import DataWarning

LINES = b"".join(json.dumps({"text": f"a text {k}"}).encode() + b"\n" for k in range(20))


def warned(path: Path, split: str | None = None) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        open_corpus(path, split, cache=path.parent / "cache")
    assert all(issubclass(warning.category, DataWarning) for warning in caught)
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", LINES),
        ("A.NDJSON", b"whatever it holds"),
        ("a.txt", LINES),
        ("a.txt", b"\xef\xbb\xbf" + LINES),
        ("a.txt", LINES.replace(b"\n", b"\r\n")),
        ("a.txt", b'\n{"text": 1}\n\n{}\n{"a": []}\nnot JSON'),
        ("a.txt", b'{"text": "one object"}'),
        ("a.txt", b'{"text": "' + b"long " * 300_000 + b'"}\n{}\n'),
        ("a.jsonl.gz", gzip.compress(LINES, mtime=0)),
    ],
)
def test_json_lines_are_told(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    (sentence,) = warned(tmp_path / name)
    assert name.removesuffix(".gz") in sentence


@pytest.mark.parametrize(
    "content",
    [
        b"a text\n" + LINES,
        b"{ this is TeX }\n" * 9,
        b'{\n  "pretty": 1\n}\n',
        b"[1, 2]\n[3]\n",
        b'"a"\n1\nnull\n',
        b'{"a": 1}\nthen a text\n',
        b"{" * 100_000,
        b'{"a":' * 100_000 + b"\n",
        b'{"a": ' + b"9" * 5000 + b"}\n",
    ],
)
def test_other_texts_are_not(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    assert warned(tmp_path / "a.txt") == []


def test_a_folder_is_told_of_in_one_sentence_whatever_is_read(tmp_path: Path) -> None:
    """The same one, so that a warning that is shown once is shown once."""
    (tmp_path / "texts").mkdir()
    for name in ("a.txt", "train.jsonl", "valid.jsonl", "test.txt"):
        (tmp_path / "texts" / name).write_bytes(LINES)
    told = {tuple(warned(tmp_path / "texts", split)) for split in ("train", "valid", "test", None)}
    assert len(told) == 1
    assert len(told.pop()) == 1
