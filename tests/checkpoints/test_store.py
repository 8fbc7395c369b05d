"""Folders are written atomically, and are read only if every byte is unchanged."""

import fcntl
import json
import os
import secrets
from concurrent.futures import ThreadPoolExecutor
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


def test_an_existing_folder_is_not_overwritten_unless_it_is_empty(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    write_folder(tmp_path / "empty", FILES)
    with pytest.raises(CheckpointError, match=r"empty already exists"):
        write_folder(tmp_path / "empty", {"a": b"new"})
    assert dict(read_folder(tmp_path / "empty", keep=["a.json"]).contents) == {"a.json": b"{}"}


def test_replace(tmp_path: Path) -> None:
    for version in (b"1", b"2", b"3"):
        write_folder(tmp_path / "best", {"a": version}, replace=True)
        assert read_folder(tmp_path / "best", keep=["a"]).contents["a"] == version
    assert names(tmp_path) == ["best"]


def test_replace_refuses_folders_of_others(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1").write_text("once")
    with pytest.raises(CheckpointError, match=r"thesis .*not saved by longspan"):
        write_folder(tmp_path / "thesis", FILES, replace=True)
    assert names(tmp_path / "thesis") == ["chapter1"]


def test_a_folder_under_its_old_name_is_read_and_restored(tmp_path: Path) -> None:
    """A crash between the two renames of a replacement leaves it there."""
    write_folder(tmp_path / "best", FILES)
    (tmp_path / "best").rename(tmp_path / ".best.old.longspan")
    assert read_folder(tmp_path / "best", keep=["a.json"]).contents["a.json"] == b"{}"
    assert locate(tmp_path / "best") == tmp_path / ".best.old.longspan"
    sweep(tmp_path)
    assert names(tmp_path) == ["best"]


def test_only_leftovers_of_dead_writers_are_swept(tmp_path: Path) -> None:
    write_folder(tmp_path / "m", FILES)
    dead, locked = tmp_path / ".m.new-01234567.longspan", tmp_path / ".m.new-89abcdef.longspan"
    for folder in (dead, locked):
        folder.mkdir()
        (folder / "part").write_bytes(b"half")
    others = [".m.new-0123.longspan", ".hidden", "m.new-01234567.longspan", ".m.new-01234567"]
    for name in others:
        (tmp_path / name).write_bytes(b"mine")
    descriptor = os.open(locked, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        write_folder(tmp_path / "m", FILES, replace=True)
        assert names(tmp_path) == sorted([*others, locked.name, "m"])
    finally:
        os.close(descriptor)
    sweep(tmp_path, "m")
    assert names(tmp_path) == sorted([*others, "m"])


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_sweep_between_creation_and_lock_does_not_disturb_a_writer(tmp_path: Path, monkeypatch, kind: str) -> None:
    real, swept = fcntl.flock, []

    def flock(descriptor: int, operation: int) -> None:
        if not swept:
            swept.append(names(tmp_path))
            sweep(tmp_path)
        real(descriptor, operation)

    monkeypatch.setattr(store.fcntl, "flock", flock)
    if kind == "file":
        write_file(tmp_path / "m", b"1")
    else:
        write_folder(tmp_path / "m", FILES)
        read_folder(tmp_path / "m")
    assert len(swept[0]) == 1
    assert names(tmp_path) == ["m"]


def test_several_writers_of_one_file(tmp_path: Path, monkeypatch) -> None:
    """They sweep while others write. Locks of threads exclude each other like those of processes."""
    monkeypatch.setattr(os, "fsync", lambda _: None)

    def write(writer: int) -> None:
        for _ in range(200):
            write_file(tmp_path / "m", bytes([writer]) * 1000)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(write, range(4)))
    content = (tmp_path / "m").read_bytes()
    assert content == content[:1] * 1000
    assert names(tmp_path) == ["m"]


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    def fail(path: Path) -> None:
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_folder(tmp_path / "a" / "b" / "m", {"x": b"1", "y": fail})
    assert names(tmp_path) == []


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".hidden", "..", "a\x00", "manifest.json", "é", "x" * 200])
def test_unsafe_file_names_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        write_folder(tmp_path / "m", {name: b""})
    assert repr(name) in str(caught.value)
    write_folder(tmp_path / "m", {"x": b""})
    manifest = json.loads((tmp_path / "m" / MANIFEST).read_text())
    manifest["files"][name] = manifest["files"].pop("x")
    (tmp_path / "m" / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError) as caught:
        read_folder(tmp_path / "m")
    assert f"{name!r:.80}" in str(caught.value)


def damaged_folders(path: Path) -> dict[str, str]:
    """Commands that damage the folder, each with what the error must name."""
    return {
        f"rm {path}/a.json": r"a\.json is missing",
        f"rm {path}/{MANIFEST}": r"m has no manifest\.json",
        f"truncate -s 999 {path}/b.bin": r"b\.bin has 999 bytes.*1000",
        f"printf x | dd of={path}/b.bin bs=1 seek=500 conv=notrunc 2>/dev/null": r"b\.bin .*SHA-256",
        f"echo more > {path}/other.safetensors": r"other\.safetensors .*manifest",
        f"rm {path}/a.json; ln -s {path}/b.bin {path}/a.json": r"a\.json .*regular file",
        f"rm {path}/a.json; mkfifo {path}/a.json": r"a\.json .*regular file",
        f"echo '[]' > {path}/{MANIFEST}": r"manifest\.json .*JSON object",
        f"echo '{{' > {path}/{MANIFEST}": r"manifest\.json .*valid JSON",
        f'sed -i \'s/"format": 1/"format": 2/\' {path}/{MANIFEST}': r"format 2.*1",
        f"rm -r {path}": r"no folder .*m\b",
        f"rm -r {path}; echo > {path}": r"m is a file",
    }


@pytest.mark.parametrize("number", range(len(damaged_folders(Path()))))
def test_an_error_names_the_damage(tmp_path: Path, number: int) -> None:
    write_folder(tmp_path / "m", FILES)
    command, pattern = list(damaged_folders(tmp_path / "m").items())[number]
    assert os.system(command) == 0
    with pytest.raises(CheckpointError, match=pattern) as caught:
        read_folder(tmp_path / "m")
    assert "\n" not in str(caught.value)


def test_unlisted_text_files_are_allowed(tmp_path: Path) -> None:
    write_folder(tmp_path / "m", FILES)
    (tmp_path / "m" / "notes.txt").write_text("mine")
    read_folder(tmp_path / "m")


def test_newest_good_passes_over_damaged_checkpoints(tmp_path: Path) -> None:
    for step in (9, 10, 100, 20):
        write_folder(tmp_path / f"checkpoint-{step}", {"step": str(step).encode()})
    (tmp_path / "checkpoint-x").mkdir()
    (tmp_path / "checkpoint-007").mkdir()
    assert [path.name for path in numbered(tmp_path)] == [f"checkpoint-{n}" for n in (100, 20, 10, 9)]
    (tmp_path / "checkpoint-100" / "step").write_bytes(b"101")
    (tmp_path / "checkpoint-20" / MANIFEST).unlink()
    with pytest.warns(CheckpointWarning, match=r"checkpoint-(100|20)\b") as warned:
        newest = newest_good(tmp_path, keep=["step"])
    assert len(warned) == 2
    assert newest.found is not None
    assert newest.found.contents["step"] == b"10"
    assert [damaged.path.name for damaged in newest.passed_over] == ["checkpoint-100", "checkpoint-20"]


def test_newest_good_of_an_empty_or_missing_folder(tmp_path: Path) -> None:
    assert newest_good(tmp_path).found is None
    assert newest_good(tmp_path / "nowhere").found is None


def test_write_file_creates_and_replaces(tmp_path: Path) -> None:
    write_file(tmp_path / "deep" / "state", b"1")
    write_file(tmp_path / "deep" / "state", b"2")
    assert (tmp_path / "deep" / "state").read_bytes() == b"2"
    assert names(tmp_path / "deep") == ["state"]
    with pytest.raises(CheckpointError, match=r"deep is a folder"):
        write_file(tmp_path / "deep", b"3")


def test_impossible_paths_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file" / "m", Path("a\x00b"), tmp_path / ("x" * 300)):
        with pytest.raises(CheckpointError):
            write_folder(path, FILES)
        with pytest.raises(CheckpointError):
            read_folder(path)
    assert names(tmp_path) == ["file"]


def test_a_new_file_replaces_a_symbolic_link_and_never_follows_one(tmp_path: Path, monkeypatch) -> None:
    """A link that is created at the temporary name after the sweep is an error."""
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
