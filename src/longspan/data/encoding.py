"""Pieces of text as ids, in their order: in this process, or on several processor cores.

The cores are reached through processes of our own: multiprocessing would either fork beside torch's threads, which is
not safe, or run the caller's script again in each process.
"""

import contextlib
import os
import pickle
import queue
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from longspan.data.splits import Piece
from longspan.errors import DataError
from longspan.tokens import Ids, Tokenizer, Unit, tokenizer_from_dict
from longspan.tokens.text import read_blocks

_TASK = 4 << 20
# Below this the processes take longer to start than the text to encode; bytes need no encoding worth sharing.
_WORTH_SHARING = 32 << 20

Task = list[tuple[int, bytes, bool]]
"""Stretches of text: the piece it belongs to, its bytes, and whether the piece goes on after them."""


def encode_pieces(
    pieces: Sequence[Piece], tokenizer: Tokenizer, workers: int | None = None
) -> Iterator[tuple[int, Ids]]:
    """The ids of each piece with its index, a chunk at a time; `workers` processes (as many as pay, unless told)."""
    if workers is None:
        shared = tokenizer.unit != "byte" and sum(piece.size for piece in pieces) >= _WORTH_SHARING
        workers = _cores() if shared else 1
    if workers > 1:
        return _in_parallel(pieces, tokenizer, workers)
    return _in_turn(pieces, tokenizer)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _in_turn(pieces: Sequence[Piece], tokenizer: Tokenizer) -> Iterator[tuple[int, Ids]]:
    for index, piece in enumerate(pieces):
        for ids in tokenizer.encode_stream(read_blocks(piece.path, piece.start, piece.stop), str(piece.path)):
            yield index, ids


def _in_parallel(pieces: Sequence[Piece], tokenizer: Tokenizer, workers: int) -> Iterator[tuple[int, Ids]]:
    with _Workers(tokenizer, workers) as pool:
        waiting: deque[tuple[Task, Future[Any]]] = deque()

        def finish() -> Iterator[tuple[int, Ids]]:
            task, future = waiting.popleft()
            answer = future.result()
            if isinstance(answer, str):
                # Only a reading from its beginning knows how far into the piece the trouble lies.
                deque(_in_turn([pieces[index] for index in sorted({index for index, _, _ in task})], tokenizer), 0)
                raise DataError(answer)
            yield from answer

        for task in _tasks(pieces, tokenizer.unit):
            waiting.append((task, pool.submit(task)))
            if len(waiting) > 2 * workers:
                yield from finish()
        while waiting:
            yield from finish()


def _tasks(pieces: Sequence[Piece], unit: Unit) -> Iterator[Task]:
    """The text in tasks of a few megabytes: long pieces cut where no token is cut, short ones put together."""
    task: Task = []
    size = 0
    for index, piece in enumerate(pieces):
        for data, goes_on in _stretches(piece, unit):
            task.append((index, data, goes_on))
            size += len(data)
            if size >= _TASK:
                yield task
                task, size = [], 0
    if task:
        yield task


def _stretches(piece: Piece, unit: Unit) -> Iterator[tuple[bytes, bool]]:
    held, left = b"", piece.size
    for block in read_blocks(piece.path, piece.start, piece.stop, _TASK):
        left -= len(block)
        data = held + block
        at = _last_border(data, unit) if left else len(data)
        if at:
            yield data[:at], left > 0
        held = data[at:]
    if held:
        yield held, False


def _last_border(data: bytes, unit: Unit) -> int:
    """The last place in `data` that lies between two tokens; 0 if there is none."""
    if unit == "byte":
        return len(data)
    if unit == "word":
        return 1 + max(data.rfind(b"\n"), data.rfind(b" "))
    # The last character of UTF-8 begins within four bytes of the end; it may not be whole, so it is left.
    return next((at for at in range(len(data) - 1, max(len(data) - 5, -1), -1) if data[at] & 0xC0 != 0x80), len(data))


class _Workers:
    """Processes that encode tasks with one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, count: int) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        # -P: without it the current folder, which may hold anything, comes first on the path of `python -c`.
        command = [sys.executable, "-P", "-c", "from longspan.data.encoding import serve; serve()"]
        self.idle: queue.SimpleQueue[subprocess.Popen[bytes]] = queue.SimpleQueue()
        self.processes = []
        for _ in range(count):
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
            self.processes.append(process)
            self.idle.put(process)
        self.threads = ThreadPoolExecutor(count, thread_name_prefix="encode")
        self.tokenizer = pickle.dumps(tokenizer.to_dict())
        self.told: set[int] = set()

    def __enter__(self) -> "_Workers":
        return self

    def __exit__(self, *_: object) -> None:
        self.threads.shutdown(wait=True, cancel_futures=True)
        for process in self.processes:
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    if pipe:
                        pipe.close()
            process.wait()

    def submit(self, task: Task) -> "Future[Any]":
        return self.threads.submit(self._exchange, task)

    def _exchange(self, task: Task) -> Any:
        process = self.idle.get()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            if process.pid not in self.told:
                process.stdin.write(self.tokenizer)
                self.told.add(process.pid)
            pickle.dump(task, process.stdin, protocol=5)
            process.stdin.flush()
            return pickle.load(process.stdout)
        except (OSError, EOFError, pickle.UnpicklingError):
            return "a process that encodes text ended early; is there enough memory?"
        finally:
            self.idle.put(process)


def serve() -> None:
    """What a worker does: a tokenizer comes, then tasks until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle; it closes the pipe
    came, goes = sys.stdin.buffer, sys.stdout.buffer
    with contextlib.suppress(EOFError, BrokenPipeError):
        tokenizer = tokenizer_from_dict(pickle.load(came))
        while True:
            task: Task = pickle.load(came)
            answer: list[tuple[int, Ids]] | str = []
            try:
                answer = [
                    (index, ids)
                    for index, data, goes_on in task
                    for ids in tokenizer.encode_stream([data], goes_on=goes_on)
                ]
            except DataError as error:
                answer = str(error)
            pickle.dump(answer, goes, protocol=5)
            goes.flush()
