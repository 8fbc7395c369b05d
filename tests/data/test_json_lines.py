import gzip
import json
import warnings
from pathlib import Path

import pytest

from longspan.data import open_corpus
from longspan.errors import DataWarning

LINES = b"".join(json.dumps({"text": f"a text {k}"}).encode() + b"\n" for k in range(20))


def warnings_of(path: Path, split: str | None = None) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        open_corpus(path, split, cache=path.parent / "cache")
    assert all(issubclass(warning.category, DataWarning) for warning in caught)
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.txt", LINES),
        ("a.txt", b"\xef\xbb\xbf" + LINES),
        ("a.txt", LINES.replace(b"\n", b"\r\n")),
        ("a.txt", b'\n{"text": 1}\n\n{}\n{"a": []}\nnot JSON'),
        ("a.txt", b'{"text": "one object"}'),
        ("a.txt", b'{"text": "' + b"long " * 300_000 + b'"}\n{}\n'),
        ("a.txt.gz", gzip.compress(LINES, mtime=0)),
    ],
)
def test_json_lines_give_a_warning(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    (sentence,) = warnings_of(tmp_path / name)
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
def test_other_texts_give_no_warning(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    assert warnings_of(tmp_path / "a.txt") == []


def test_every_split_of_a_folder_gives_the_same_warning(tmp_path: Path) -> None:
    """Python shows equal warnings once."""
    (tmp_path / "texts").mkdir()
    for name in ("a.txt", "train.txt", "valid.txt", "test.txt"):
        (tmp_path / "texts" / name).write_bytes(LINES)
    found = {tuple(warnings_of(tmp_path / "texts", split)) for split in ("train", "valid", "test", None)}
    assert len(found) == 1
    assert len(found.pop()) == 1
