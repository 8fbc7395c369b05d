"""`longspan` and `python` for shell commands in tests, without the seconds that importing torch takes each time.

A server is forked when the tests start, from the process that has imported torch and has not computed yet: a later fork
may wait forever for threads that it does not have. The programs are clients: they pass their arguments, folder,
environment and standard streams to the server, which forks one process for each command. It gets the client's SIGINT
and SIGTERM, ends with the client, and its exit code or signal is that of the client.
"""

import atexit
import contextlib
import importlib
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import traceback
from pathlib import Path
from typing import NoReturn

CLIENT = """\
#!{python} -ISs
import array, json, os, signal, socket, sys
words = {words} + sys.argv[1:]
message = json.dumps([words, {first!r}, os.getcwd(), dict(os.environ)]).encode()
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    streams = array.array("i", [0, 1, 2])
    server.sendmsg([len(message).to_bytes(8, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)])
    server.sendall(message)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: server.send(bytes([number])))
    code = int.from_bytes(server.recv(2) or bytes([70, 0]), "little", signed=True)
if code < 0:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


_folder = Path(tempfile.gettempdir()) / f"longspan-tests-{os.getpid()}"
PYTHON = _folder / "python"
"""Runs `-c CODE` as `python` does."""


def start() -> None:
    """Start the server. It ends with this process."""
    _folder.mkdir()
    atexit.register(_stop, os.getpid())
    install(_folder)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(_folder / "server"))
        listener.listen()
        reading, writing = os.pipe()
        if os.fork() == 0:
            os.close(writing)
            threading.Thread(target=_end_with, args=[reading], daemon=True).start()
            _serve(listener)
        os.close(reading)  # `writing` is closed by the end of this process


def install(folder: Path, first: str = "") -> None:
    """Write the programs `longspan` and `python` into a folder. `first` is Python code to run before each command."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, words in {"longspan": ["-m", "longspan"], "python": []}.items():
        program = folder / name
        address = str(_folder / "server")
        program.write_text(CLIENT.format(python=sys.executable, words=words, first=first, address=address))
        program.chmod(0o755)


def _end_with(parent: int) -> None:
    os.read(parent, 1)
    os._exit(0)


def _stop(process: int) -> None:
    if os.getpid() == process:
        shutil.rmtree(_folder, ignore_errors=True)


def _serve(listener: socket.socket) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the processes of the commands
    client, _ = listener.accept()
    for module in ("torch._dynamo", "longspan.cli.train", "longspan.training.run", "longspan.decoding.session"):
        importlib.import_module(module)  # once, and not in each command
    while True:
        if os.fork() == 0:
            listener.close()
            try:
                _answer(client)
            finally:
                os._exit(70)
        client.close()
        client, _ = listener.accept()


def _answer(client: socket.socket) -> NoReturn:
    """Start the process that the client asks for, pass on its signals, and send its exit code."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    size, streams, *_ = socket.recv_fds(client, 8, 3)
    with client.makefile("rb", buffering=0) as file:
        content = b""
        while len(content) < int.from_bytes(size, "big"):
            content += file.read(1 << 16)
    process = os.fork()
    if process == 0:
        client.close()
        code = 1
        try:
            code = _run(streams, *json.loads(content))
        except BaseException:
            traceback.print_exc()
        finally:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError):
                    stream.flush()
            os._exit(code)
    for descriptor in streams:
        os.close(descriptor)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ended = threading.Event()

    def pass_signals() -> None:
        while not ended.is_set():
            number = client.recv(1)
            if not ended.is_set():
                os.kill(process, number[0] if number else signal.SIGKILL)

    threading.Thread(target=pass_signals, daemon=True).start()
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    ended.set()
    client.send(code.to_bytes(2, "little", signed=True))
    os._exit(0)


def _run(streams: list[int], words: list[str], first: str, where: str, environment: dict[str, str]) -> int:
    """Become the process that the client asks for."""
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
    os.chdir(where)
    os.environ.clear()
    os.environ.update(environment)
    exec(first, {})
    try:
        if words[0] == "-c":
            sys.argv = ["-c", *words[2:]]
            exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
            return 0
        assert words[:2] == ["-m", "longspan"], f"only `longspan` and `python -c` are served, not {words}"
        from longspan.cli.main import run

        sys.argv = ["longspan", *words[2:]]
        return run()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
