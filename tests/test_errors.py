"""Errors of files that cannot be read say what to do."""

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from longspan.config import read_toml
from longspan.decoding.prompts import read_prompts
from longspan.errors import ConfigError, DataError, LongspanError, not_read
from longspan.scoring.surprisal_files import read_files
from longspan.transfer.tasks.opened import rows_of


def test_the_fix_for_a_file_that_cannot_be_read() -> None:
    for number, fix in (
        (errno.ENOENT, "check the name"),
        (errno.EISDIR, "name a file in it"),
        (errno.EACCES, "change its permissions"),
        (errno.EIO, "check the disk"),
    ):
        error = not_read("a.txt", OSError(number, "why"), ConfigError)
        assert isinstance(error, ConfigError)
        assert str(error).startswith(f"a.txt cannot be read: why; {fix}")
    assert isinstance(not_read("a.txt", OSError("why")), DataError)


@pytest.mark.parametrize(
    ("read", "name"),
    [
        (read_toml, "a.toml"),
        (read_prompts, "a.txt"),
        (lambda path: list(read_files([path])), "a.txt"),
        (lambda path: list(rows_of(path)), "a.csv"),
    ],
)
def test_a_folder_in_place_of_a_file(read: Callable[[Path], Any], name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(LongspanError, match=rf"{name} cannot be read: .*; name a file in it"):
        read(tmp_path / name)


@pytest.mark.parametrize(("data", "fix"), [(b"a = \xff", "byte 4; save it as UTF-8"), (b"a b", "write key = value")])
def test_a_recipe_that_is_not_toml(data: bytes, fix: str, tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_bytes(data)
    with pytest.raises(ConfigError, match=fix):
        read_toml(tmp_path / "a.toml")


def test_a_line_that_is_not_json(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\ntext\n')
    with pytest.raises(DataError, match=r"a\.jsonl, line 2, .*write one JSON object per line"):
        list(rows_of(tmp_path / "a.jsonl"))
