"""A disk that fills up at any byte: the previous checkpoint loads, one sentence, nothing left over."""

import errno
import os
import resource
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from longspan.checkpoints.model_folder import load_model, save_model
from longspan.checkpoints.store import read_folder, write_folder
from longspan.contract import LanguageModel
from longspan.errors import CheckpointError
from longspan.tokens import Tokenizer

Small = Callable[..., tuple[LanguageModel, Tokenizer]]


def save_with_limit(limit: int, save: Callable[[], object]) -> str:
    """What `save` says in a child that may write files of `limit` bytes: '' if it saved, else its sentence."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        said = "no exception"
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            save()
            said = ""
        except CheckpointError as error:
            said = str(error)
        except BaseException as error:
            said = f"another error: {error!r}"
        finally:
            os.write(write, said.encode())
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return said


def test_every_byte(tmp_path: Path, small: Small, trials: Callable[[int, int], int]) -> None:
    model, tokens = small("plain", seed=1)
    before = save_model(tmp_path / "best", small("plain", seed=0)[0], tokens)
    largest = max(entry.size for entry in read_folder(tmp_path / "best").files.values())
    count = trials(12, 200)
    for trial in range(count):
        limit = trial * largest // count
        for target, replace in (("best", True), ("checkpoint-1", False)):
            said = save_with_limit(
                limit, lambda t=target, r=replace: save_model(tmp_path / t, model, tokens, replace=r)
            )
            assert "could not be saved" in said, (limit, said)
            assert "\n" not in said
            assert [path.name for path in tmp_path.iterdir()] == ["best"]
    assert load_model(tmp_path / "best").hash == before
    assert save_with_limit(largest + 10_000, lambda: save_model(tmp_path / "best", model, tokens, replace=True)) == ""
    assert load_model(tmp_path / "best").hash != before


@pytest.mark.parametrize("operation", ["mkdir", "fsync", "rename"])
@pytest.mark.parametrize("nth", range(6))
def test_every_operation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str, nth: int) -> None:
    write_folder(tmp_path / "m", {"a": b"old"})
    real, calls = getattr(os, operation), iter(range(1000))

    def full(*arguments: object, **options: object) -> None:
        if next(calls) == nth:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(*arguments, **options)

    monkeypatch.setattr(os, operation, full)
    said = ""
    try:
        write_folder(tmp_path / "m", {"a": b"new", "b": b"new"}, replace=True)
    except CheckpointError as error:
        said = str(error)
    monkeypatch.undo()
    version = read_folder(tmp_path / "m", keep=["a"]).contents["a"]
    assert version == (b"old" if said else b"new")
    assert not said or "No space left on device" in said
    write_folder(tmp_path / "m", {"a": b"newer"}, replace=True)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


SCRIPT = """
    import os
    from pathlib import Path
    from longspan.checkpoints.store import read_folder, write_folder
    from longspan.errors import CheckpointError
    root, page, refused = Path("ROOT"), 4096, 0
    large = lambda path: path.write_bytes(b"x" * 20 * page)
    write_folder(root / "m", {"a": b"old"})
    for free in range(0, 34):
        with open(root / "ballast", "wb", buffering=0) as ballast:
            try:
                while ballast.write(bytes(page)):
                    pass
            except OSError:
                pass
            ballast.truncate(max(0, ballast.tell() - free * page))
        try:
            write_folder(root / "m", {"a": bytes([free]) * 9000, "b": large}, replace=True)
            assert read_folder(root / "m", keep=["a"]).contents["a"] == bytes([free]) * 9000
        except CheckpointError as error:
            refused += 1
            assert read_folder(root / "m", keep=["a"]).contents["a"] == b"old", free
        (root / "ballast").unlink()
        assert os.listdir(root) == ["m"], os.listdir(root)
    assert 20 < refused < 34, refused
    print("held")
"""


def test_a_real_small_disk(tmp_path: Path) -> None:
    """A file system of 256 KiB in a name space of our own, where the system lets us have one."""
    mount = f"mount -t tmpfs -o size=256k none {tmp_path}"
    unshare = shutil.which("unshare")
    if not unshare or subprocess.run([unshare, "-rm", "sh", "-c", mount], capture_output=True, check=False).returncode:
        pytest.skip("this system has no name spaces for us")
    script = textwrap.dedent(SCRIPT).replace("ROOT", str(tmp_path))
    command = [unshare, "-rm", "sh", "-c", f'{mount} && "$0" -c "$1"', sys.executable, script]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert ran.stdout == "held\n", ran.stderr
