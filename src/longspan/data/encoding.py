"""Encode pieces of text in order, in this process or in several worker processes.

The workers are subprocesses and not `multiprocessing`, which would either fork while torch has threads, which is not
safe, or run the caller's script again in each process.
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
from longspan.tokenizers import Ids, Tokenizer, Unit, tokenizer_from_dict
from longspan.tokenizers.text import read_blocks

_TASK_BYTES = 4 << 20
# Below this size, starting the workers takes longer than encoding. Bytes are always encoded in this process.
_PARALLEL_MIN_BYTES = 32 << 20

Task = list[tuple[int, bytes, bool]]
"""Chunks of text: the index of the piece, the bytes, and whether more of the piece follows."""


def encode_pieces(
    pieces: Sequence[Piece], tokenizer: Tokenizer, workers: int | None = None
) -> Iterator[tuple[int, Ids]]:
    """The ids of each piece with its index, in chunks. Default `workers`: one per core for large texts, else 1."""
    if workers is None:
        parallel = tokenizer.unit != "byte" and sum(piece.size for piece in pieces) >= _PARALLEL_MIN_BYTES
        workers = _cores() if parallel else 1
    if workers > 1:
        return _encode_parallel(pieces, tokenizer, workers)
    return _encode_serial(pieces, tokenizer)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _encode_serial(pieces: Sequence[Piece], tokenizer: Tokenizer) -> Iterator[tuple[int, Ids]]:
    for index, piece in enumerate(pieces):
        for ids in tokenizer.encode_stream(read_blocks(piece.path, piece.start, piece.stop), str(piece.path)):
            yield index, ids


def _encode_parallel(pieces: Sequence[Piece], tokenizer: Tokenizer, workers: int) -> Iterator[tuple[int, Ids]]:
    with _Workers(tokenizer, workers) as pool:
        waiting: deque[tuple[Task, Future[Any]]] = deque()

        def finish() -> Iterator[tuple[int, Ids]]:
            task, future = waiting.popleft()
            result = future.result()
            if isinstance(result, str):
                # The worker saw only a chunk. Encode the pieces from their start, so the error names the position.
                failed = [pieces[index] for index in sorted({index for index, _, _ in task})]
                deque(_encode_serial(failed, tokenizer), 0)
                raise DataError(result)
            yield from result

        for task in _tasks(pieces, tokenizer.unit):
            waiting.append((task, pool.submit(task)))
            if len(waiting) > 2 * workers:
                yield from finish()
        while waiting:
            yield from finish()


def _tasks(pieces: Sequence[Piece], unit: Unit) -> Iterator[Task]:
    """The text in tasks of a few megabytes: long pieces are cut between tokens, short ones are grouped."""
    task: Task = []
    size = 0
    for index, piece in enumerate(pieces):
        for data, partial in _chunks(piece, unit):
            task.append((index, data, partial))
            size += len(data)
            if size >= _TASK_BYTES:
                yield task
                task, size = [], 0
    if task:
        yield task


def _chunks(piece: Piece, unit: Unit) -> Iterator[tuple[bytes, bool]]:
    held, left = b"", piece.size
    for block in read_blocks(piece.path, piece.start, piece.stop, _TASK_BYTES):
        left -= len(block)
        data = held + block
        at = _last_boundary(data, unit) if left else len(data)
        if at:
            yield data[:at], left > 0
        held = data[at:]
    if held:
        yield held, False


def _last_boundary(data: bytes, unit: Unit) -> int:
    """The last position in `data` between two tokens; 0 if there is none."""
    if unit == "byte":
        return len(data)
    if unit == "word":
        return 1 + max(data.rfind(b"\n"), data.rfind(b" "))
    # The last UTF-8 character begins within four bytes of the end. It may be incomplete, so it is left out.
    return next((at for at in range(len(data) - 1, max(len(data) - 5, -1), -1) if data[at] & 0xC0 != 0x80), len(data))


class _Workers:
    """Worker processes that encode tasks with one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, count: int) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        # -P: without it, `python -c` imports modules from the current folder first.
        command = [sys.executable, "-P", "-c", "from longspan.data.encoding import run_worker; run_worker()"]
        self.idle: queue.SimpleQueue[subprocess.Popen[bytes]] = queue.SimpleQueue()
        self.processes = []
        for _ in range(count):
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
            self.processes.append(process)
            self.idle.put(process)
        self.threads = ThreadPoolExecutor(count, thread_name_prefix="encode")
        self.tokenizer = pickle.dumps(tokenizer.to_dict())
        self.initialised: set[int] = set()

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
            if process.pid not in self.initialised:
                process.stdin.write(self.tokenizer)
                self.initialised.add(process.pid)
            pickle.dump(task, process.stdin, protocol=5)
            process.stdin.flush()
            return pickle.load(process.stdout)
        except (OSError, EOFError, pickle.UnpicklingError):
            return "a worker process that encodes text ended early; check that there is enough memory"
        finally:
            self.idle.put(process)


def run_worker() -> None:
    """The main loop of a worker: receive a tokenizer, then encode tasks until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and closes the pipe
    requests, results = sys.stdin.buffer, sys.stdout.buffer
    with contextlib.suppress(EOFError, BrokenPipeError):
        tokenizer = tokenizer_from_dict(pickle.load(requests))
        while True:
            task: Task = pickle.load(requests)
            result: list[tuple[int, Ids]] | str = []
            try:
                result = [
                    (index, ids)
                    for index, data, partial in task
                    for ids in tokenizer.encode_stream([data], partial=partial)
                ]
            except DataError as error:
                result = str(error)
            pickle.dump(result, results, protocol=5)
            results.flush()
