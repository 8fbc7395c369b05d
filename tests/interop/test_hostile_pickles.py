"""Pickles that try to execute code, with every opcode and protocol and in every container: nothing is executed.

An audit hook reports what Python does: processes started, code compiled or run, modules imported, files written.
"""

import builtins
import os
import pickle
import pickletools
import random
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from longspan.errors import CheckpointError
from longspan.interop.pickles import LEGACY_MAGIC, read_state_dict, read_values
from tests.conftest import type_checker

WATCHED = (
    "os.",
    "subprocess.",
    "exec",
    "compile",
    "import",
    "pickle.",
    "socket.",
    "shutil.",
    "ctypes.",
    "marshal.",
    "code.",
)
HARMLESS = ("os.listdir", "os.scandir")
events: list[str] = []
watching = False


def record(event: str, arguments: tuple[Any, ...]) -> None:
    if not watching:
        return
    written = event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+")
    if written or (event.startswith(WATCHED) and event not in HARMLESS):
        events.append(f"{event} {arguments!r:.200}")


sys.addaudithook(record)


@contextmanager
def watched() -> Iterator[None]:
    global watching
    events.clear()
    with type_checker.unchecked() if type_checker else nullcontext():
        watching = True
        try:
            yield
        finally:
            watching = False
    assert events == []


class Call:
    """Pickled as a function call, the usual attack."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


def calls(canary: Path) -> list[Any]:
    touch = f"open({str(canary)!r}, 'w').close()"
    shell = f"touch {canary}"
    return [
        Call(os.system, (shell,)),
        Call(builtins.eval, (touch,)),
        Call(builtins.exec, (touch,)),
        Call(builtins.open, (str(canary), "w")),
        Call(builtins.__import__, ("antigravity",)),
        Call(subprocess.Popen, (["touch", str(canary)],)),
        Call(subprocess.check_output, (["touch", str(canary)],)),
        Call(Path.touch, (canary,)),
        Call(torch.load, (str(canary),)),
        Call(dict, (), {"x": 1}),
        [Call(os.system, (shell,))],
        {"k": (Call(os.system, (shell,)),)},
    ]


def containers(path: Path, pickled: bytes) -> Iterator[Path]:
    """The pickle as the object of a zip archive, in every position of a legacy file, and alone."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/data/0", bytes(16))
        archive.writestr("archive/version", "3\n")
    yield path
    version, system = pickle.dumps(1001, 2), pickle.dumps({"little_endian": True}, 2)
    keys = pickle.dumps([], 2)
    rest = struct.pack("<q", 4) + bytes(16)
    for parts in (
        (version, system, pickled, keys),
        (pickled, system),
        (version, pickled),
        (version, system, pickled, pickled),
    ):
        path.write_bytes(pickle.dumps(LEGACY_MAGIC, 2) + b"".join(parts) + rest)
        yield path
    path.write_bytes(pickled)
    yield path


def by_hand(canary: Path) -> Iterator[bytes]:
    """Opcodes that current picklers do not write, and every way to name and call a function."""
    shell = f"touch {canary}".encode()
    argument = b"X" + struct.pack("<I", len(shell)) + shell
    text = b"V" + shell + b"\n"
    yield b"(S'" + shell + b"'\nios\nsystem\n."  # INST
    yield b"(cos\nsystem\n" + text + b"o."  # OBJ
    yield b"cos\nsystem\n(" + text + b"tR."
    yield b"cposix\nsystem\n(" + text + b"tR."
    yield b"\x80\x02cos\nsystem\n" + argument + b"\x85\x81."  # NEWOBJ
    yield b"\x80\x04cos\nsystem\n" + argument + b"\x85}\x92."  # NEWOBJ_EX
    yield b"\x80\x04\x8c\x02os\x8c\x06system\x93" + argument + b"\x85R."  # STACK_GLOBAL
    yield b"\x80\x04\x8c\x0btorch._utils\x8c\x12_rebuild_tensor_v2\x93" + argument + b"\x85R."
    yield b"\x80\x02\x82\x01."  # EXT1
    yield b"\x80\x02\x83\x01\x00."  # EXT2
    yield b"\x80\x02\x84\x01\x00\x00\x00."  # EXT4
    yield b"P" + shell + b"\n."  # PERSID
    yield b"\x80\x02" + argument + b"Q."  # BINPERSID that is not a storage
    yield b"\x80\x02ccollections\nOrderedDict\n)R}" + argument + b"cos\nsystem\nsb."  # BUILD
    yield b"\x80\x02ccollections\nOrderedDict\n)\x81}X\x0c\x00\x00\x00__setstate__cos\nsystem\nsb" + argument + b"b."
    yield b"\x80\x02ctorch\nFloatStorage\n" + argument + b"\x85R."  # a known name that cannot be called
    yield b"\x80\x02ctorch._utils\n_rebuild_tensor_v2.__globals__\n)R."
    yield b"\x80\x04\x8c\x0ctorch._utils\x8c\x0bos.system.x\x93."
    yield b"\x80\x05\x97."  # NEXT_BUFFER
    yield b"\x80\x02ctorch._utils\n_import_dotted_name\nX\x09\x00\x00\x00os.system\x85R."


def random_opcodes(canary: Path, choose: random.Random) -> bytes:
    """Opcodes in random order, calls included, each with an argument of its type."""
    shell = f"touch {canary}"
    names = [
        (b"os", b"system"),
        (b"builtins", b"eval"),
        (b"torch._utils", b"_rebuild_tensor_v2"),
        (b"torch", b"FloatStorage"),
    ]
    names += [(b"collections", b"OrderedDict"), (b"torch._utils", b"_rebuild_parameter")]
    made = bytearray(b"\x80" + bytes([choose.randrange(6)]) if choose.random() < 0.8 else b"")
    for _ in range(choose.randrange(3, 60)):
        opcode = choose.choice(pickletools.opcodes)
        made += opcode.code.encode("latin-1")
        kind = opcode.arg.name if opcode.arg else ""
        module, name = choose.choice(names)
        text = shell.encode()
        made += {
            "": b"",
            "stringnl_noescape_pair": module + b"\n" + name + b"\n",
            "decimalnl_short": b"1\n",
            "decimalnl_long": b"1L\n",
            "floatnl": b"1.5\n",
            "stringnl": b"'" + text + b"'\n",
            "stringnl_noescape": text + b"\n",
            "unicodestringnl": text + b"\n",
        }.get(kind) or argument_of(kind, text, choose)
    return bytes(made) + b"."


def argument_of(kind: str, text: bytes, choose: random.Random) -> bytes:
    widths = {"uint1": 1, "uint2": 2, "int4": 4, "uint4": 4, "uint8": 8, "float8": 8}
    if kind in widths:
        return choose.choice([bytes(widths[kind]), b"\x01" + bytes(widths[kind] - 1), choose.randbytes(widths[kind])])
    width = 1 if kind.endswith("1") else 8 if kind.endswith("8") else 4
    return len(text).to_bytes(width, "little") + text if width > 1 or len(text) < 256 else b"\x01x"


def attempt(path: Path) -> bool:
    try:
        with watched():
            read_state_dict(path)
    except CheckpointError as error:
        return "\n" not in str(error)
    return False


@pytest.fixture
def canary(tmp_path: Path) -> Iterator[Path]:
    """A file that only executed code creates. All modules that reading needs are imported before the audit starts."""
    torch.save({"a": torch.zeros(2)}, tmp_path / "good")
    read_state_dict(tmp_path / "good")
    torch.save({"a": torch.zeros(2)}, tmp_path / "good", _use_new_zipfile_serialization=False)
    read_state_dict(tmp_path / "good")
    "x".encode("raw-unicode-escape")
    yield tmp_path / "canary"
    assert not (tmp_path / "canary").exists()


def test_the_audit_hook_reports_executed_code(canary: Path) -> None:
    """`pickle` itself executes such a call."""
    with pytest.raises(AssertionError), watched():
        pickle.loads(pickle.dumps(Call(builtins.eval, ("1 + 1",))))


def test_calls_in_every_protocol(tmp_path: Path, canary: Path) -> None:
    tried = 0
    for call in calls(canary):
        for protocol in (0, 2, 4):
            for value in (call, {"state_dict": call}, {"w": torch.float32, "x": [call]}):
                for path in containers(tmp_path / "x", pickle.dumps(value, protocol)):
                    assert attempt(path)
                    tried += 1
    assert tried >= 500


def test_calls_next_to_plain_values_are_not_read(tmp_path: Path, canary: Path) -> None:
    for call in calls(canary):
        for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
            (tmp_path / "x").write_bytes(pickle.dumps({"call": call, "in": [call], "plain": 1}, protocol))
            with watched():
                assert read_values(tmp_path / "x", "")["plain"] == 1
    for pickled in by_hand(canary):
        (tmp_path / "x").write_bytes(pickled)
        with watched(), suppress(CheckpointError):
            read_values(tmp_path / "x", "")


def test_opcodes_by_hand(tmp_path: Path, canary: Path) -> None:
    for pickled in by_hand(canary):
        for path in containers(tmp_path / "x", pickled):
            assert attempt(path), pickled


def test_every_opcode_alone(tmp_path: Path, canary: Path) -> None:
    for opcode in pickletools.opcodes:
        for protocol in (0, 2, 5):
            argument = b"\x00" * 12 + b"\n\n"
            pickled = b"\x80" + bytes([protocol]) + b"N)(" + opcode.code.encode("latin-1") + argument + b"."
            for path in containers(tmp_path / "x", pickled):
                assert attempt(path), opcode.name


def test_opcodes_in_random_order(tmp_path: Path, canary: Path, trials: Callable[[int, int], int]) -> None:
    choose = random.Random(0)
    for _ in range(trials(150, 5000)):
        for path in containers(tmp_path / "x", random_opcodes(canary, choose)):
            attempt(path)
