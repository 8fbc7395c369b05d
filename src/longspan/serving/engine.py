"""The decode loop: one thread per model, continuous batching.

Every step reads one piece of one prompt and generates one token for every stream that has a row. Streams join and leave
between steps. Nothing of a stream depends on the others, so its output is byte-equal to that of the engine alone.
"""

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch

from longspan.decoding.sampled_steps import Launched, SampledSteps, sampled_steps
from longspan.decoding.slots import Slots, Stream, open_slots, rows_are_independent
from longspan.serving.statistics import Statistics
from longspan.serving.work import Choice, Event, Finished, Piece, Prompt, Reason, TokenLogprob, Work
from longspan.text_model import TextModel


class QueueFull(Exception):
    """As many streams are waiting as may wait."""


class Closed(Exception):
    """The engine was stopped, or its thread failed."""


class _Step(NamedTuple):
    """A step of one batch, which may still be computed."""

    batch: int
    choices: list[Choice | None]
    launched: Launched


class Engine:
    """`submit` work, then run `step` until it returns False, or `start` a thread that does."""

    def __init__(self, text: TextModel, *, width: int | None = None, rows: int = 32, queue: int = 64) -> None:
        """`width` is the number of rows of a batch. Default: 16, on a GPU 32."""
        self.text, self.rows, self.queue = text, rows, queue
        first = open_slots(text.model, width or (32 if text.device.type == "cuda" else 16))
        if not rows_are_independent(first):
            first = open_slots(text.model, 1)
        self.width = first.width
        self.known = min(text.tokenizer.size, text.config.vocabulary)
        self.batches: list[Slots] = []
        self.steps: list[SampledSteps] = []
        self._add_batch(first)
        self.ahead = self.steps[0].ahead and first.can_undo
        """Launch a step before the tokens of the last one were read. Streams that have ended are stepped back."""
        # All batches with CUDA graphs are opened now: a capture would hold up the streams.
        while self.ahead and len(self.batches) * self.width < rows:
            self._add_batch(open_slots(text.model, self.width))
        self.flying: dict[int, _Step] = {}
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
        for index in [index for index in self.flying if not self._flies_on(index)]:
            self._collect(self.flying.pop(index))
        self._admit()
        busy = self._read_prompts()
        self._place()
        self._consolidate()
        # All batches are launched before the first token is copied to the host: a GPU computes one step while the
        # tokens of another become text.
        before, launched = self.flying, {}
        for index, batch in enumerate(self.batches):
            if batch.active:
                launched[index] = self._launch(index, batch)
        self.flying = launched
        busy = busy or bool(before or launched)
        for step in before.values():
            self._collect(step)
        while self.flying and not self.ahead:
            self._collect(self.flying.pop(next(iter(self.flying))))
        return busy

    def _flies_on(self, index: int) -> bool:
        """Whether the next step of a batch can be launched before the tokens of the last one are known: not for
        penalties, which count them, nor for log-probabilities, which need the logits. And some stream must go on."""
        choices = [c for (batch, _), c in self.running.items() if batch == index]
        return any(c.generated + 1 < c.max_tokens for c in choices) and not any(
            c.logprobs is not None or c.row.has_offsets for c in choices
        )

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
                self._add_batch(open_slots(self.text.model, self.width))
                open_ = [(0, 1 - len(self.batches))]
            self._join(-max(open_)[1], choice, stream)
            self.ready.popleft()

    def _add_batch(self, slots: Slots) -> None:
        self.batches.append(slots)
        self.steps.append(sampled_steps(slots, self.known))

    def _join(self, index: int, choice: Choice, stream: Stream) -> None:
        slot = self.batches[index].join(stream)
        self.steps[index].put(slot, choice.pending)
        self.running[index, slot] = choice

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
            stream, choice = self._stream(place), self.running.pop(place)
            self.batches[least].leave(place[1])
            self._join(others.pop(), choice, stream)

    def _stream(self, place: tuple[int, int]) -> Stream:
        """A stream as it was after the last token that is known."""
        index, slot = place
        step = self.flying.get(index)
        back = step is not None and step.choices[slot] is self.running[place]
        return self.batches[index].stream(slot, int(back))

    def _launch(self, index: int, batch: Slots) -> "_Step":
        choices = [self.running.get((index, slot)) for slot in range(batch.width)]
        before = self.flying.get(index)
        ahead = [int(c is not None and before.choices[slot] is c) for slot, c in enumerate(choices)] if before else None
        rows = [None if c is None else c.row for c in choices]
        return _Step(index, choices, self.steps[index].launch(rows, ahead))

    def _collect(self, step: "_Step") -> None:
        """The tokens of a step. A stream that has left its row since then gets none."""
        tokens, now = step.launched.tokens(), time.perf_counter()
        for slot, (choice, token) in enumerate(zip(step.choices, tokens, strict=True)):
            place = (step.batch, slot)
            if choice is not None and self.running.get(place) is choice:
                self._advance(place, choice, token, step.launched.logits, now)

    def _advance(self, place: tuple[int, int], choice: Choice, token: int, logits: torch.Tensor, now: float) -> None:
        """One new token of a choice: its text, its log-probability and whether it is the last."""
        if token < 0:
            message = "the logits are not finite: the weights or the state are damaged"
            self._leave(place, Finished("error", message=message))
            return
        choice.pending = token
        choice.generated += 1
        choice.row.add(token)
        statistics = self.statistics
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
        choice = self.running[place]
        if choice.keep and not choice.cancelled and finished.reason != "error":
            held = choice.text.held
            finished = Finished(finished.reason, finished.text, self._stream(place), choice.pending, held)
        del self.running[place]
        self.batches[index].leave(slot)
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
            try:  # noqa: SIM105 (this runs for every token, and `suppress` takes longer)
                choice.emit(event)
            except RuntimeError:  # the event loop of the client is closed
                pass

    def _choices(self) -> list[Choice]:
        works = [*self._inbox, *self.waiting, *self.reading]
        rest = [choice for work in works for choice in work.choices]
        return [*rest, *(choice for choice, _ in self.ready), *self.running.values()]

    def _fail(self) -> None:
        for choice in self._choices():
            self._finish(choice, Finished("error", message=self.failure))
