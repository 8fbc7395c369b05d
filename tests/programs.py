"""`longspan` and `python` for shell commands in tests, without the seconds that importing torch takes each time.

A server is forked from the test process, where torch is imported. The programs are clients: they pass their arguments,
folder, environment and standard streams to the server, which forks one process for each command.
"""

import contextlib
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

CLIENT = """\
#!{python} -ISs
import array, json, os, socket, sys
words = {words} + sys.argv[1:]
message = json.dumps([words, os.getcwd(), dict(os.environ)]).encode()
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    streams = array.array("i", [0, 1, 2])
    server.sendmsg([len(message).to_bytes(8, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)])
    server.sendall(message)
    code = server.recv(1)
sys.exit(code[0] if code else 70)
"""


@contextlib.contextmanager
def installed(folder: Path, before: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Write the programs `longspan` and `python` into a folder, and serve them. `before` runs once in the server."""
    folder.mkdir(parents=True, exist_ok=True)
    address = str(folder / "server")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        server = os.fork()
        if server == 0:
            before()
            _serve(listener)
    for name, words in {"longspan": ["-m", "longspan"], "python": []}.items():
        program = folder / name
        program.write_text(CLIENT.format(python=sys.executable, words=words, address=address))
        program.chmod(0o755)
    try:
        yield
    finally:
        os.kill(server, signal.SIGKILL)
        os.waitpid(server, 0)


def _serve(listener: socket.socket) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the processes of the commands
    while True:
        client, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            code = 1
            try:
                code = _run(client)
            except BaseException:
                traceback.print_exc()
            finally:
                for stream in (sys.stdout, sys.stderr):
                    with contextlib.suppress(OSError, ValueError):
                        stream.flush()
                client.send(bytes([code]))
                os._exit(code)
        client.close()


def _run(client: socket.socket) -> int:
    """Become the process that the client asks for."""
    size, streams, *_ = socket.recv_fds(client, 8, 3)
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
        os.close(descriptor)
    with client.makefile("rb", buffering=0) as file:
        content = b""
        while len(content) < int.from_bytes(size, "big"):
            content += file.read(1 << 16)
    words, where, environment = json.loads(content)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
    os.chdir(where)
    os.environ.clear()
    os.environ.update(environment)
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
