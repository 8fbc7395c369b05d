"""Power loss after any operation of a save: the newest undamaged checkpoint is at most one interval old.

The operations of a writer are recorded and replayed on a simulated disk. After power loss a folder has the entries of
its last sync or of some later moment. A file has its synced contents; one that was never synced is truncated or zeroed.
"""

import os
import random
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from longspan.checkpoints.store import LEFTOVER, newest_good, read_folder, write_folder

STEPS = (10, 20, 30)


@dataclass
class Node:
    """A file or folder of the disk: what programs see, and what can remain after power loss."""

    folder: bool
    data: bytes = b""
    synced: bytes | None = None
    names: dict[str, "Node"] = field(default_factory=dict)
    since_sync: list[dict[str, "Node"]] = field(default_factory=lambda: [{}])

    def change(self, gone: str, **made: "Node") -> None:
        """One atomic change of a folder: an entry is removed, added or both (a rename)."""
        self.names = {key: value for key, value in self.names.items() if key != gone} | made
        self.since_sync.append(self.names)


class Disk:
    """The recorded operations, applied one by one."""

    def __init__(self) -> None:
        self.root = Node(folder=True)

    def find(self, path: str) -> Node:
        node = self.root
        for part in Path(path).parts:
            node = node.names[part]
        return node

    def apply(self, kind: str, path: str, argument: str | bytes = "") -> None:
        parent, name = self.find(str(Path(path).parent)), Path(path).name
        if kind == "mkdir":
            parent.change("", **{name: Node(folder=True)})
        elif kind == "write":
            parent.change("", **{name: Node(folder=False, data=bytes(argument))})
        elif kind == "rename":
            assert Path(str(argument)).parent == Path(path).parent
            parent.change(name, **{Path(str(argument)).name: parent.names[name]})
        elif kind in ("unlink", "rmdir"):
            parent.change(name)
        elif kind == "sync":
            node = self.find(path)
            node.synced, node.since_sync = node.data, [node.names]

    def write_remains(self, target: Path, choose: random.Random, strict: bool) -> None:
        """Write to `target` what can remain after power loss now; with `strict` only what was synced."""

        def write(node: Node, path: Path) -> None:
            if node.folder:
                path.mkdir()
                for name, child in (node.since_sync[0] if strict else choose.choice(node.since_sync)).items():
                    write(child, path / name)
            elif node.synced is not None:
                path.write_bytes(node.synced)
            else:
                cut = choose.randrange(len(node.data) + 1)
                path.write_bytes(b"" if strict else choose.choice([node.data[:cut], bytes(len(node.data)), node.data]))

        write(self.root, target)


def path_of(descriptor: int) -> str:
    return str(Path(f"/proc/self/fd/{descriptor}").readlink())


class Recorder:
    """Records every create, write, sync, rename and remove under `root`."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.root, self.operations, self.seen = root, list[tuple[str, ...]](), set[str]()
        for name in ("mkdir", "rename", "unlink", "rmdir"):
            patch.setattr(os, name, self.watch(name, getattr(os, name)))
        real = os.fsync

        def fsync(descriptor: int) -> None:
            self.note_new_files()
            self.operations.append(("sync", self.relative(path_of(descriptor))))
            real(descriptor)

        patch.setattr(os, "fsync", fsync)

    def relative(self, path: str) -> str:
        return os.path.relpath(path, self.root)

    def watch(self, name: str, real: Callable[..., None]) -> Callable[..., None]:
        def call(path: str | Path, *rest: object, dir_fd: int | None = None, **options: object) -> None:
            full = str(Path(path_of(dir_fd) if dir_fd is not None else "", path))
            existed = os.path.lexists(full)
            self.note_new_files()
            real(path, *rest, **({"dir_fd": dir_fd} if dir_fd is not None else {}), **options)
            if existed != os.path.lexists(full):
                target = [self.relative(str(rest[0]))] if name == "rename" else []
                self.operations.append((name, self.relative(full), *target))
                if target:
                    moved = {p for p in self.seen if Path(p).is_relative_to(self.relative(full))}
                    self.seen |= {str(Path(target[0]) / Path(p).relative_to(self.relative(full))) for p in moved}

        return call

    def note_new_files(self) -> None:
        for folder, _, files in os.walk(self.root):
            for name in files:
                path = Path(folder) / name
                if self.relative(str(path)) not in self.seen and stat.S_ISREG(path.lstat().st_mode):
                    self.seen.add(self.relative(str(path)))
                    self.operations.append(("write", self.relative(str(path)), path.read_bytes()))  # type: ignore[arg-type]


def content(step: int) -> dict[str, bytes]:
    return {"weights.safetensors": bytes([step]) * 300, "step.json": str(step).encode()}


def record(root: Path) -> tuple[list[tuple[str, ...]], dict[int, int]]:
    """The operations of three saves (a new checkpoint, and `best` replaced), and how many precede the end of each."""
    root.mkdir()
    done: dict[int, int] = {}
    with pytest.MonkeyPatch.context() as patch:
        recorder = Recorder(root, patch)
        for step in STEPS:
            write_folder(root / f"checkpoint-{step}", content(step))
            done[step] = len(recorder.operations)
            write_folder(root / "best", content(step), replace=True)
    return recorder.operations, done


@pytest.mark.filterwarnings("ignore:checkpoint-")
def test_power_loss(tmp_path: Path, trials: Callable[[int, int], int]) -> None:
    operations, done = record(tmp_path / "recorded")
    kinds = {operation[0] for operation in operations}
    assert kinds == {"mkdir", "write", "sync", "rename", "unlink", "rmdir"}
    choose = random.Random(0)
    count = trials(2 * len(operations), max(1000, 10 * len(operations)))
    for trial in range(count):
        prefix = trial % (len(operations) + 1)
        disk = Disk()
        for operation in operations[:prefix]:
            disk.apply(*operation)
        run = tmp_path / f"trial{trial}"
        disk.write_remains(run, choose, strict=trial <= len(operations))
        saved = max((step for step, end in done.items() if end <= prefix), default=0)
        check(run, saved)


def check(run: Path, saved: int) -> None:
    """Nothing saved is lost, and new saves work."""
    newest = newest_good(run, keep=["step.json", "weights.safetensors"]).found
    found = int(newest.contents["step.json"]) if newest else 0
    assert found >= saved, "a saved checkpoint is lost"
    if newest:
        assert newest.contents["weights.safetensors"] == content(found)["weights.safetensors"]
    if saved > STEPS[0]:  # `best` of the previous save was complete, so that one or a later one is readable
        best = read_folder(run / "best", keep=["step.json"])
        assert int(best.contents["step.json"]) >= saved - 10
    for name in (f"checkpoint-{STEPS[-1] + 10}", "best"):
        write_folder(run / name, content(99), replace=True)
        assert not [path for path in run.iterdir() if (m := LEFTOVER.fullmatch(path.name)) and m["name"] == name]
