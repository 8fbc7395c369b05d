"""Encode text, or count its words, task by task in this process or in several worker processes.

The workers are subprocesses and not `multiprocessing`, which would either fork while torch has threads, which is not
safe, or run the caller's script again in each process. A worker reads its part of the files itself.
"""

import contextlib
import os
import pickle
import queue
import signal
import subprocess
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from longspan.data.documents import Chunk, count_words, read_documents
from longspan.data.splits import Piece
from longspan.errors import DataError
from longspan.tokenizers import Ids, Tokenizer, tokenizer_from_dict
from longspan.tokenizers.characters import Alphabet, count_characters
from longspan.tokenizers.text import read_blocks
from longspan.tokenizers.words import count_words as count_each_word

# Below this size, starting the workers takes longer than the work.
_PARALLEL_MIN_BYTES = 32 << 20
# All workers together may use about this much memory; a worker needs so much, and so much for every word it looks up.
_MEMORY, _WORKER_MEMORY, _WORD_MEMORY = 800 << 20, 48 << 20, 250
# The same with the library for subwords: measured with 16,000 and 32,000 tokens.
_SUBWORD_MEMORY, _TOKEN_MEMORY = 100 << 20, 1000
# Bytes of JSON lines are parsed at about 100 MB/s by a worker. More of them wait for the process that writes.
_BYTE_WORKERS = 8
_PIPE_BYTES = 1 << 20

T = TypeVar("T")
Task = list[Chunk]
Job = Callable[[Task], T]


class EncodedTask(NamedTuple):
    """The ids of a task, the number of tokens of each document or part of one, and which of these begin a document."""

    ids: Ids
    lengths: NDArray[np.int64]
    begins: NDArray[np.bool_]
    bytes: int
    words: int


def run_tasks(
    make_job: Callable[[], Job[T]], tasks: Iterator[Task], workers: int, threads: int | None = None
) -> Iterator[tuple[Task, T]]:
    """The result of every task, in order. `make_job` must be picklable; every worker process calls it once.

    `threads` are those of the library for subwords in each worker."""
    if workers <= 1:
        job = make_job()
        yield from ((task, job(task)) for task in tasks)
        return
    with _Workers(make_job, workers, threads) as pool:
        for task, result in _in_order(tasks, pool.submit, workers + min(workers, 8)):
            if isinstance(result, str):
                raise DataError(result)
            yield task, result


def run_in_threads(job: Job[T], tasks: Iterator[Task]) -> Iterator[tuple[Task, T]]:
    """The same for a job that needs no lock of Python most of the time: other threads work on the next tasks."""
    threads = 2 if _cores() < 8 else 3
    with ThreadPoolExecutor(threads, thread_name_prefix="encode") as pool:
        yield from _in_order(tasks, lambda task: pool.submit(job, task), threads)


def _in_order(tasks: Iterator[Task], submit: Callable[[Task], "Future[Any]"], ahead: int) -> Iterator[tuple[Task, Any]]:
    waiting: deque[tuple[Task, Future[Any]]] = deque()
    for task in tasks:
        waiting.append((task, submit(task)))
        if len(waiting) > ahead:
            first, future = waiting.popleft()
            yield first, future.result()
    for task, future in waiting:
        yield task, future.result()


def useful_workers(pieces: Sequence[Piece], vocabulary: int = 0) -> int:
    """Processes for a text: one if it is small, else one per core, as far as their memory allows."""
    if sum(piece.size for piece in pieces) < _PARALLEL_MIN_BYTES:
        return 1
    return max(1, min(_cores(), _MEMORY // (_WORKER_MEMORY + _WORD_MEMORY * vocabulary)))


def byte_workers(pieces: Sequence[Piece]) -> int:
    """Processes for a text of bytes: one for plain text, which is only copied; JSON lines are parsed by several."""
    return min(useful_workers(pieces), _BYTE_WORKERS) if any(piece.field is not None for piece in pieces) else 1


def subword_workers(pieces: Sequence[Piece], vocabulary: int) -> tuple[int, int]:
    """Processes for a text of subwords, and threads of the library in each of them.

    One process with threads had 0.74 of the library's speed on 10 cores, one thread alone has 0.94: threads share the
    lock of Python and a cache of the library. So every core has a process, as far as memory allows; beyond that, each
    of them has several threads.
    """
    cores = _cores()
    if sum(piece.size for piece in pieces) < _PARALLEL_MIN_BYTES:
        return 1, cores
    workers = max(1, min(cores, _MEMORY // (_SUBWORD_MEMORY + _TOKEN_MEMORY * vocabulary)))
    return workers, -(-cores // workers)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def encoder(tokenizer: Tokenizer) -> Callable[[], Job[EncodedTask]]:
    """A job that encodes."""
    return partial(_make_encoder, tokenizer.to_dict())


def word_counter(lower: bool) -> Callable[[], Job[Counter[str]]]:
    """A job that counts words."""
    return partial(_make_counter, partial(_count_words, lower))


def character_counter(alphabet: Alphabet) -> Callable[[], Job[Counter[str]]]:
    """A job that counts characters."""
    return partial(_make_counter, partial(_count_characters, alphabet))


def encode_task(tokenizer: Tokenizer, task: Task) -> EncodedTask:
    parts: list[Ids] = []
    begins: list[bool] = []
    size = words = 0
    end = tokenizer.document_end_id
    for chunk in task:
        previous_is_space = chunk.begins or _byte_before(chunk).isspace()
        texts = list(read_documents(chunk))
        with _positions(chunk, tokenizer.encode_stream):
            found = tokenizer.encode_many(texts, chunk.name, partial=not chunk.ends)
        if end is not None and chunk.ends:
            found = [np.append(ids, ids.dtype.type(end)) if len(ids) else ids for ids in found]
        parts += found
        begins += [chunk.begins] * len(texts)
        size += sum(map(len, texts))
        words += count_words(b"\n".join(texts), previous_is_space)  # only rows of JSON are several
    ids = parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, tokenizer.dtype), *parts])
    lengths = np.array([len(part) for part in parts], np.int64)
    return EncodedTask(ids, lengths, np.array(begins, np.bool_), size, words)


def _make_encoder(stored: dict[str, Any]) -> Job[EncodedTask]:
    return partial(encode_task, tokenizer_from_dict(stored))


def _count_words(lower: bool, blocks: Iterable[bytes], name: str) -> Mapping[str, int]:
    return count_each_word(blocks, lower, name)


def _count_characters(alphabet: Alphabet, blocks: Iterable[bytes], name: str) -> Mapping[str, int]:
    return count_characters(blocks, alphabet, name)


Count = Callable[[Iterable[bytes], str], Mapping[str, int]]


def _make_counter(count: Count) -> Job[Counter[str]]:
    return partial(_count_task, count)


def _count_task(count: Count, task: Task) -> Counter[str]:
    counts: Counter[str] = Counter()
    for chunk in task:
        with _positions(chunk, count):
            for data in read_documents(chunk):
                counts.update(count([data], chunk.name))
    return counts


def _byte_before(chunk: Chunk) -> bytes:
    return next(read_blocks(Path(chunk.path), chunk.start - 1, chunk.start), b"")


@contextlib.contextmanager
def _positions(chunk: Chunk, read: Callable[[Iterable[bytes], str], Iterable[Any]]) -> Iterator[None]:
    """If reading a part of a file fails, `read` the file from its start: the error then names the position."""
    try:
        yield
    except DataError:
        if chunk.start and chunk.field is None:
            deque(read(read_blocks(Path(chunk.path), 0, chunk.stop), chunk.name), 0)
        raise


class _Workers:
    """Worker processes that run one job."""

    def __init__(self, make_job: Callable[[], Job[Any]], count: int, threads: int | None = None) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        if threads is not None:
            environment |= {"RAYON_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": str(threads > 1).lower()}
        # -P: without it, `python -c` imports modules from the current folder first.
        command = [sys.executable, "-P", "-c", "from longspan.data.encoding import run_worker; run_worker()"]
        self.idle: queue.SimpleQueue[subprocess.Popen[bytes]] = queue.SimpleQueue()
        self.processes = []
        for _ in range(count):
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "pipesize": _PIPE_BYTES}
            process = subprocess.Popen(command, env=environment, **pipes)
            self.processes.append(process)
            self.idle.put(process)
        self.threads = ThreadPoolExecutor(count, thread_name_prefix="encode")
        self.job = pickle.dumps(make_job)
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
                process.stdin.write(self.job)
                self.initialised.add(process.pid)
            pickle.dump(task, process.stdin, protocol=5)
            process.stdin.flush()
            return pickle.load(process.stdout)
        except (OSError, EOFError, pickle.UnpicklingError):
            return "a worker process that reads text ended early; check that there is enough memory"
        finally:
            self.idle.put(process)


def run_worker() -> None:
    """The main loop of a worker: receive a job, then run it on tasks until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and closes the pipe
    requests, results = sys.stdin.buffer, sys.stdout.buffer
    with contextlib.suppress(EOFError, BrokenPipeError):
        job = pickle.load(requests)()
        while True:
            task: Task = pickle.load(requests)
            try:
                result: Any = job(task)
            except DataError as error:
                result = str(error)
            pickle.dump(result, results, protocol=5)
            results.flush()
