"""The decode loop: one thread per model, continuous batching.

Every step reads one piece of one prompt and generates one token for every stream that has a row. Streams join and leave
between steps. Nothing of a stream depends on the others, so its output is byte-equal to that of the engine alone.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch

from longspan.decoding.choosing import choose, plan, to_device
from longspan.decoding.slots import Slots, Stream, open_slots, rows_are_independent
from longspan.serving.statistics import Statistics
from longspan.serving.work import Choice, Event, Finished, Piece, Prompt, Reason, TokenLogprob, Work
from longspan.text_model import TextModel


class QueueFull(Exception):
    """As many streams are waiting as may wait."""


class Closed(Exception):
    """The engine was stopped, or its thread failed."""


class _Step(NamedTuple):
    """A step of one batch: the logits and the next tokens, which may still be computed."""

    batch: int
    choices: list[Choice | None]
    logits: torch.Tensor
    chosen: torch.Tensor


class Engine:
    """`submit` work, then run `step` until it returns False, or `start` a thread that does."""

    def __init__(self, text: TextModel, *, width: int = 16, rows: int = 32, queue: int = 64) -> None:
        self.text, self.rows, self.queue = text, rows, queue
        first = open_slots(text.model, width)
        if not rows_are_independent(first):
            first = open_slots(text.model, 1)
        self.batches: list[Slots] = [first]
        self.width = first.width
        self.known = min(text.tokenizer.size, text.config.vocabulary)
        self.waiting: deque[Work] = deque()
        self.reading: deque[Work] = deque()
        self.ready: deque[tuple[Choice, Stream]] = deque()
        self.running: dict[tuple[int, int], Choice] = {}
        self.statistics = Statistics()
        self.failure = ""
        self._bytes: dict[int, bytes] = {}
        self._inbox: deque[Work] = deque()
        self._wake = threading.Condition()
        self._unfinished = 0
        self._stopping: Reason | None = None
        self._closed = False
        self._thread: threading.Thread | None = None

    # From any thread.

    @property
    def load(self) -> int:
        """Streams that wait for a row."""
        return max(self._unfinished - len(self.running), 0)

    @property
    def alive(self) -> bool:
        return not self._closed and not self.failure and self._thread is not None and self._thread.is_alive()

    def submit(self, *works: Work) -> None:
        """Queue several works or none. Raises QueueFull or Closed."""
        with self._wake:
            if self._closed or self.failure:
                raise Closed(self.failure or "the engine was stopped")
            count = sum(len(work.choices) for work in works)
            if self._unfinished + count > self.queue + self.rows:
                raise QueueFull
            self._unfinished += count
            self._inbox.extend(works)
            self._wake.notify()

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="longspan-decode", daemon=True)
        self._thread.start()

    def idle(self) -> bool:
        return self._unfinished == 0

    def close(self, timeout: float = 0.0) -> None:
        """Refuse new work, wait up to `timeout` seconds for the present one, then finish it where it is."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        if self._thread is None:
            return
        end = time.monotonic() + timeout
        while not self.idle() and self._thread.is_alive() and time.monotonic() < end:
            time.sleep(0.01)
        self._stopping = "length"
        self._thread.join(max(5.0, timeout))

    # In the thread of the engine.

    def _run(self) -> None:
        try:
            while True:
                with self._wake:
                    while self.idle() and not self._closed:
                        self._wake.wait()
                    if self.idle():
                        return
                self.step()
        except BaseException as error:  # the loop must not end without telling the clients
            self.failure = f"the decode loop failed: {type(error).__name__}: {error}"
            self._fail()
            raise

    def step(self) -> bool:
        """One step. False if there was nothing to do."""
        while self._inbox:
            self.waiting.append(self._inbox.popleft())
        self._drop_cancelled()
        self._admit()
        busy = self._read_prompts()
        self._place()
        self._consolidate()
        # All batches are launched before the first token is copied to the host: a GPU computes one batch while the
        # tokens of another become text.
        launched = [self._launch(index, batch) for index, batch in enumerate(self.batches) if batch.active]
        for step in launched:
            self._collect(step)
        return busy or bool(launched)

    def _drop_cancelled(self) -> None:
        if self._stopping is not None:
            for choice in self._choices():
                choice.stop_now = choice.stop_now or self._stopping
        for queue in (self.waiting, self.reading):
            for work in [work for work in queue if work.cancelled or any(c.stop_now for c in work.choices)]:
                queue.remove(work)
                why = "the server is stopping" if self._closed else "it was stopped before its prompt was read"
                for choice in work.choices:
                    self._finish(choice, Finished("cancelled", message=why))
        for entry in [entry for entry in self.ready if entry[0].cancelled or entry[0].stop_now]:
            self.ready.remove(entry)
            self._end(*entry)
        for place, choice in list(self.running.items()):
            if choice.cancelled:
                self._leave(place, Finished("cancelled"))
            elif choice.stop_now:
                self._leave(place, Finished(choice.stop_now, choice.text.close(final=not choice.keep)))

    def _admit(self) -> None:
        """Start to read the prompts of works that will find a row."""
        free = self.rows - len(self.running) - len(self.ready) - sum(len(work.choices) for work in self.reading)
        while self.waiting and (free > 0 or not (self.running or self.reading or self.ready)):
            work = self.waiting.popleft()
            free -= len(work.choices)
            self.reading.append(work)

    def _read_prompts(self) -> bool:
        """Read prompts until the tokens of one piece were read, so that running streams do not wait long. Prompts take
        turns, so a long one does not block the others."""
        busy, left = False, self.batches[0].piece
        while self.reading and left > 0:
            # It stays in the queue meanwhile: if this fails, its client must be told.
            left -= max(self._read_piece(self.reading[0]), 1)
            busy = True
        return busy

    def _read_piece(self, work: Work) -> int:
        """The next piece of a prompt; returns the number of its tokens."""
        slots = self.batches[0]
        stream = work.stream or slots.start()
        last = len(work.tokens) - 1
        tokens = list(work.tokens[work.read : min(work.read + slots.piece, last)])
        if tokens and work.prompt_logprobs is None:
            stream = slots.prefill(stream, tokens)
        elif tokens:
            stream, logits = slots.prompt_logits(stream, tokens)
            assert logits is not None
            assert work.prompt_logprobs is not None
            if not work.found:
                work.found.append(TokenLogprob(work.tokens[0], None))
            following = work.tokens[work.read + 1 : work.read + 1 + len(tokens)]
            work.found.extend(self._logprobs(logits, following, work.prompt_logprobs))
        work.read += len(tokens)
        work.stream = stream
        self.statistics.prompt_tokens += len(tokens)
        self.reading.popleft()
        if work.read < last:
            self.reading.append(work)
        else:
            self._begin(work, stream)
        return len(tokens)

    def _begin(self, work: Work, stream: Stream) -> None:
        """The prompt was read: its choices wait for rows."""
        logprobs = None
        if work.prompt_logprobs is not None:
            logprobs = tuple(work.found) or (TokenLogprob(work.tokens[0], None),)
        for choice in work.choices:
            choice.pending = work.tokens[-1]
            self._emit(choice, Prompt(logprobs))
            if choice.max_tokens:
                self.ready.append((choice, stream))
            else:
                self._end(choice, stream)

    def _end(self, choice: Choice, stream: Stream) -> None:
        """Finish a choice that has no row: the prompt was read and nothing is generated."""
        reason = "cancelled" if choice.cancelled else choice.stop_now or "length"
        kept = choice.keep and not choice.cancelled
        found = (stream.compact(), choice.pending, choice.text.held) if kept else (None, None, b"")
        self._finish(choice, Finished(reason, "", *found))

    def _place(self) -> None:
        """Give rows to choices that wait for one: in the fullest batch that has a free row."""
        while self.ready and len(self.running) < self.rows:
            choice, stream = self.ready[0]
            open_ = [(batch.active, -i) for i, batch in enumerate(self.batches) if batch.free]
            if not open_:
                self.batches.append(open_slots(self.text.model, self.width))
                open_ = [(0, 1 - len(self.batches))]
            index = -max(open_)[1]
            self.running[index, self.batches[index].join(stream)] = choice
            self.ready.popleft()

    def _consolidate(self) -> None:
        """Empty the batch with the fewest rows if the others have room: a step costs the same for any number of rows,
        and a row gives the same bits in any slot."""
        active = sorted((batch.active, index) for index, batch in enumerate(self.batches) if batch.active)
        if len(active) < 2:
            return
        count, least = active[0]
        others = [index for _, index in active[1:] for _ in self.batches[index].free]
        if len(others) < count:
            return
        for place in [place for place in self.running if place[0] == least]:
            target = others.pop()
            slot = self.batches[target].join(self.batches[least].stream(place[1]))
            self.batches[least].leave(place[1])
            self.running[target, slot] = self.running.pop(place)

    def _launch(self, index: int, batch: Slots) -> "_Step":
        choices = [self.running.get((index, slot)) for slot in range(batch.width)]
        tokens = to_device([0 if c is None else c.pending for c in choices], batch.device)
        planned = plan([None if c is None else c.row for c in choices], batch.device)
        logits = batch.step(tokens)[:, : self.known]
        return _Step(index, choices, logits, choose(logits, planned))

    def _collect(self, step: "_Step") -> None:
        for slot, (choice, token) in enumerate(zip(step.choices, step.chosen.tolist(), strict=True)):
            if choice is not None:
                self._advance((step.batch, slot), choice, token, step.logits)

    def _advance(self, place: tuple[int, int], choice: Choice, token: int, logits: torch.Tensor) -> None:
        """One new token of a choice: its text, its log-probability and whether it is the last."""
        if token < 0:
            message = "the logits are not finite: the weights or the state are damaged"
            self._leave(place, Finished("error", message=message))
            return
        choice.pending = token
        choice.generated += 1
        choice.row.add(token)
        now, statistics = time.perf_counter(), self.statistics
        statistics.generated_tokens += 1
        (statistics.next_token if choice.generated > 1 else statistics.first_token)(now - choice.since)
        choice.since = now
        logprob = None
        if choice.logprobs is not None:
            logprob = self._logprobs(logits[place[1] : place[1] + 1], [token], choice.logprobs)[0]
        ended = token == self.text.tokenizer.document_end_id
        text = "" if ended else choice.text.push(self._bytes_of(token))
        self._emit(choice, Piece(text, token, logprob))
        if ended or choice.text.stopped:
            self._leave(place, Finished("stop", choice.text.close(final=not choice.keep)))
        elif choice.generated >= choice.max_tokens:
            self._leave(place, Finished("length", choice.text.close(final=not choice.keep)))

    def _bytes_of(self, token: int) -> bytes:
        data = self._bytes.get(token)
        if data is None:
            data = self._bytes[token] = self.text.tokenizer.decode_bytes([token])
        return data

    def _logprobs(self, logits: torch.Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprob]:
        """Those of the model's distribution, row by row, so that they do not depend on the number of rows."""
        found = []
        for row, token in zip(logits[:, : self.known], tokens, strict=True):
            logs = row.float().log_softmax(-1)
            values, ids = logs.topk(min(top, len(logs))) if top else (logs[:0], logs[:0])
            best = tuple(zip((int(i) for i in ids.tolist()), values.tolist(), strict=True))
            found.append(TokenLogprob(token, float(logs[token]), best))
        return found

    def _leave(self, place: tuple[int, int], finished: Finished) -> None:
        index, slot = place
        choice, batch = self.running.pop(place), self.batches[index]
        if choice.keep and not choice.cancelled and finished.reason != "error":
            held = choice.text.held
            finished = Finished(finished.reason, finished.text, batch.stream(slot), choice.pending, held)
        batch.leave(slot)
        self._finish(choice, finished)

    def _finish(self, choice: Choice, finished: Finished) -> None:
        if choice.done:
            return
        with self._wake:  # first, so that a client that has its answer finds the queue without it
            self._unfinished -= 1
        self._emit(choice, finished)
        choice.done = True

    def _emit(self, choice: Choice, event: Event) -> None:
        if not choice.done:
            with contextlib.suppress(RuntimeError):  # the event loop of the client is closed
                choice.emit(event)

    def _choices(self) -> list[Choice]:
        works = [*self._inbox, *self.waiting, *self.reading]
        rest = [choice for work in works for choice in work.choices]
        return [*rest, *(choice for choice, _ in self.ready), *self.running.values()]

    def _fail(self) -> None:
        for choice in self._choices():
            self._finish(choice, Finished("error", message=self.failure))
