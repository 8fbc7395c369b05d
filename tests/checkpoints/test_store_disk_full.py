"""A disk that becomes full at any byte: the previous checkpoint loads, one error line, no leftovers."""

import errno
import os
import re
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
from longspan.tokenizers import Tokenizer

Small = Callable[..., tuple[LanguageModel, Tokenizer]]


def save_with_limit(limit: int, save: Callable[[], object]) -> str:
    """The error of `save` in a child process whose files are limited to `limit` bytes; '' if it succeeded."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        message = "no exception"
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            save()
            message = ""
        except CheckpointError as error:
            message = str(error)
        except BaseException as error:
            message = f"another error: {error!r}"
        finally:
            os.write(write, message.encode())
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        message = pipe.read()
    os.waitpid(child, 0)
    return message


def test_a_limit_at_every_byte(tmp_path: Path, small: Small, trials: Callable[[int, int], int]) -> None:
    model, tokens = small("plain", seed=1)
    before = save_model(tmp_path / "best", small("plain", seed=0)[0], tokens)
    largest = max(entry.size for entry in read_folder(tmp_path / "best").files.values())
    count = trials(12, 200)
    for trial in range(count):
        limit = trial * largest // count
        for target, replace in (("best", True), ("checkpoint-1", False)):
            message = save_with_limit(
                limit, lambda t=target, r=replace: save_model(tmp_path / t, model, tokens, replace=r)
            )
            assert re.search(f"{target} could not be saved: .*File too large", message), (limit, message)
            assert "\n" not in message
            assert [path.name for path in tmp_path.iterdir()] == ["best"]
    assert load_model(tmp_path / "best").hash == before
    assert save_with_limit(largest + 10_000, lambda: save_model(tmp_path / "best", model, tokens, replace=True)) == ""
    assert load_model(tmp_path / "best").hash != before


@pytest.mark.parametrize("operation", ["mkdir", "fsync", "rename"])
@pytest.mark.parametrize("nth", range(6))
def test_no_space_at_every_operation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str, nth: int) -> None:
    write_folder(tmp_path / "m", {"a": b"old"})
    real, calls = getattr(os, operation), iter(range(1000))

    def full(*arguments: object, **options: object) -> None:
        if next(calls) == nth:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(*arguments, **options)

    monkeypatch.setattr(os, operation, full)
    message = ""
    try:
        write_folder(tmp_path / "m", {"a": b"new", "b": b"new"}, replace=True)
    except CheckpointError as error:
        message = str(error)
    monkeypatch.undo()
    version = read_folder(tmp_path / "m", keep=["a"]).contents["a"]
    assert version == (b"old" if message else b"new")
    assert not message or "No space left on device" in message
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
    print("ok")
"""


def test_a_real_small_disk(tmp_path: Path) -> None:
    """A file system of 256 KiB in a mount namespace, where the system allows one."""
    mount = f"mount -t tmpfs -o size=256k none {tmp_path}"
    unshare = shutil.which("unshare")
    if not unshare or subprocess.run([unshare, "-rm", "sh", "-c", mount], capture_output=True, check=False).returncode:
        pytest.skip("this system does not allow user namespaces")
    script = textwrap.dedent(SCRIPT).replace("ROOT", str(tmp_path))
    command = [unshare, "-rm", "sh", "-c", f'{mount} && "$0" -c "$1"', sys.executable, script]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert ran.stdout == "ok\n", ran.stderr
