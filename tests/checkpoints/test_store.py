"""Folders appear whole or not at all, and are read only if every byte is as it was written."""

import fcntl
import json
import os
import secrets
from pathlib import Path

import pytest

from longspan.checkpoints import store
from longspan.checkpoints.manifest import MANIFEST
from longspan.checkpoints.store import (
    CheckpointWarning,
    locate,
    new_file,
    newest_good,
    numbered,
    read_folder,
    sweep,
    write_file,
    write_folder,
)
from longspan.errors import CheckpointError

FILES = {"a.json": b"{}", "b.bin": b"\x00" * 1000}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_round_trip(tmp_path: Path) -> None:
    entries = write_folder(tmp_path / "deep" / "m", {**FILES, "c": lambda path: path.write_bytes(b"written")})
    found = read_folder(tmp_path / "deep" / "m", keep=["a.json", "c"])
    assert found.files == entries
    assert dict(found.contents) == {"a.json": b"{}", "c": b"written"}
    assert names(tmp_path / "deep") == ["m"]


def test_an_occupied_place_is_refused_and_an_empty_one_is_not(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    write_folder(tmp_path / "empty", FILES)
    with pytest.raises(CheckpointError, match="already exists"):
        write_folder(tmp_path / "empty", {"a": b"new"})
    assert dict(read_folder(tmp_path / "empty", keep=["a.json"]).contents) == {"a.json": b"{}"}


def test_replace(tmp_path: Path) -> None:
    for version in (b"1", b"2", b"3"):
        write_folder(tmp_path / "best", {"a": version}, replace=True)
        assert read_folder(tmp_path / "best", keep=["a"]).contents["a"] == version
    assert names(tmp_path) == ["best"]


def test_replace_spares_what_is_not_ours(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1").write_text("once")
    with pytest.raises(CheckpointError, match="not saved by longspan"):
        write_folder(tmp_path / "thesis", FILES, replace=True)
    assert names(tmp_path / "thesis") == ["chapter1"]


def test_a_reader_finds_the_folder_that_was_set_aside_and_a_writer_puts_it_back(tmp_path: Path) -> None:
    write_folder(tmp_path / "best", FILES)
    (tmp_path / "best").rename(tmp_path / ".best.old.longspan")
    assert read_folder(tmp_path / "best", keep=["a.json"]).contents["a.json"] == b"{}"
    assert locate(tmp_path / "best") == tmp_path / ".best.old.longspan"
    sweep(tmp_path)
    assert names(tmp_path) == ["best"]


def test_leftovers_are_swept_and_nothing_else(tmp_path: Path) -> None:
    write_folder(tmp_path / "m", FILES)
    dead, alive = tmp_path / ".m.new-01234567.longspan", tmp_path / ".m.new-89abcdef.longspan"
    for folder in (dead, alive):
        folder.mkdir()
        (folder / "part").write_bytes(b"half")
    others = [".m.new-0123.longspan", ".hidden", "m.new-01234567.longspan", ".m.new-01234567"]
    for name in others:
        (tmp_path / name).write_bytes(b"mine")
    descriptor = os.open(alive, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        write_folder(tmp_path / "m", FILES, replace=True)
        assert names(tmp_path) == sorted([*others, alive.name, "m"])
    finally:
        os.close(descriptor)
    sweep(tmp_path, "m")
    assert names(tmp_path) == sorted([*others, "m"])


def test_a_writer_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fail(path: Path) -> None:
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_folder(tmp_path / "a" / "b" / "m", {"x": b"1", "y": fail})
    assert names(tmp_path) == []


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".hidden", "..", "a\x00", "manifest.json", "é", "x" * 200])
def test_names_are_plain(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match="cannot be called"):
        write_folder(tmp_path / "m", {name: b""})
    write_folder(tmp_path / "m", {"x": b""})
    manifest = json.loads((tmp_path / "m" / MANIFEST).read_text())
    manifest["files"][name] = manifest["files"].pop("x")
    (tmp_path / "m" / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="bad entry"):
        read_folder(tmp_path / "m")


def damaged_folders(path: Path) -> dict[str, str]:
    """Ways to break the folder, each with a word of the sentence it earns."""
    return {
        f"rm {path}/a.json": "is missing",
        f"rm {path}/{MANIFEST}": "no manifest.json",
        f"truncate -s 999 {path}/b.bin": "999 bytes",
        f"printf x | dd of={path}/b.bin bs=1 seek=500 conv=notrunc 2>/dev/null": "SHA-256",
        f"echo more > {path}/other.safetensors": "not in the manifest",
        f"rm {path}/a.json; ln -s {path}/b.bin {path}/a.json": "not a plain file",
        f"rm {path}/a.json; mkfifo {path}/a.json": "not a plain file",
        f"echo '[]' > {path}/{MANIFEST}": "no JSON object",
        f"echo '{{' > {path}/{MANIFEST}": "not readable JSON",
        f'sed -i \'s/"format": 1/"format": 2/\' {path}/{MANIFEST}': "format 2",
        f"rm -r {path}": "no folder",
        f"rm -r {path}; echo > {path}": "is a file",
    }


@pytest.mark.parametrize("number", range(len(damaged_folders(Path()))))
def test_damage_is_named(tmp_path: Path, number: int) -> None:
    write_folder(tmp_path / "m", FILES)
    command, word = list(damaged_folders(tmp_path / "m").items())[number]
    assert os.system(command) == 0
    with pytest.raises(CheckpointError, match=word) as caught:
        read_folder(tmp_path / "m")
    assert "\n" not in str(caught.value)


def test_a_note_beside_the_files_is_no_harm(tmp_path: Path) -> None:
    write_folder(tmp_path / "m", FILES)
    (tmp_path / "m" / "notes.txt").write_text("mine")
    read_folder(tmp_path / "m")


def test_newest_good_passes_over_what_is_broken(tmp_path: Path) -> None:
    for step in (9, 10, 100, 20):
        write_folder(tmp_path / f"checkpoint-{step}", {"step": str(step).encode()})
    (tmp_path / "checkpoint-x").mkdir()
    (tmp_path / "checkpoint-007").mkdir()
    assert [path.name for path in numbered(tmp_path)] == [f"checkpoint-{n}" for n in (100, 20, 10, 9)]
    (tmp_path / "checkpoint-100" / "step").write_bytes(b"101")
    (tmp_path / "checkpoint-20" / MANIFEST).unlink()
    with pytest.warns(CheckpointWarning, match="is passed over") as warned:
        newest = newest_good(tmp_path, keep=["step"])
    assert len(warned) == 2
    assert newest.found is not None
    assert newest.found.contents["step"] == b"10"
    assert [broken.path.name for broken in newest.passed_over] == ["checkpoint-100", "checkpoint-20"]


def test_nothing_good(tmp_path: Path) -> None:
    assert newest_good(tmp_path).found is None
    assert newest_good(tmp_path / "nowhere").found is None


def test_one_file(tmp_path: Path) -> None:
    write_file(tmp_path / "deep" / "state", b"1")
    write_file(tmp_path / "deep" / "state", b"2")
    assert (tmp_path / "deep" / "state").read_bytes() == b"2"
    assert names(tmp_path / "deep") == ["state"]
    with pytest.raises(CheckpointError, match="is a folder"):
        write_file(tmp_path / "deep", b"3")


def test_places_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file" / "m", Path("a\x00b"), tmp_path / ("x" * 300)):
        with pytest.raises(CheckpointError):
            write_folder(path, FILES)
        with pytest.raises(CheckpointError):
            read_folder(path)
    assert names(tmp_path) == ["file"]


def test_a_new_file_takes_the_place_of_a_link_and_never_writes_through_one(tmp_path: Path, monkeypatch) -> None:
    """A link planted at the temporary name after the folder was swept ends in an error."""
    victim, path = tmp_path / "victim", tmp_path / "x"
    victim.write_bytes(b"kept")
    path.symlink_to(victim)
    with new_file(path) as file:
        file.write(b"new")
    assert (path.read_bytes(), path.is_symlink()) == (b"new", False)
    monkeypatch.setattr(secrets, "token_hex", lambda _: "00000000")
    monkeypatch.setattr(store, "sweep", lambda *_: None)
    (tmp_path / ".x.new-00000000.longspan").symlink_to(victim)
    with pytest.raises(FileExistsError), new_file(path) as file:
        file.write(b"newer")
    assert (victim.read_bytes(), path.read_bytes()) == (b"kept", b"new")
