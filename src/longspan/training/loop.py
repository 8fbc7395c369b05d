"""The one training loop. What watches it (progress, metrics, checkpoints, ...) is an observer."""

import contextlib
import dataclasses
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import nn

from longspan.contract import LanguageModel, State
from longspan.data.lanes import Batch, Lanes
from longspan.errors import ConfigError
from longspan.memory.recording import RecordedStep
from longspan.shapes import Float, Tensor
from longspan.tokens import Tokenizer
from longspan.training.averaging import Average
from longspan.training.dropout import Objective, checkpoint_layers, lock_dropout
from longspan.training.ledger import Broken, Entry, Ledger, NotFiniteError, Row
from longspan.training.observer import Observer, Validation
from longspan.training.recipe import Recipe
from longspan.training.schedules import lr_factor, progress, segment_at, value_at
from longspan.training.step import Order, Step, known_whole, since_start

TOGETHER = 1.0  # seconds within which two signals are one request


class Trainer:
    """A model on its way through a text: everything a resume must bring back is in here.

    Nothing in a step asks the device for an answer: whether the weights may move is decided there (`Guard`), and the
    figures of a step are read when they have arrived (`Ledger`).
    """

    def __init__(
        self,
        recipe: Recipe,
        model: LanguageModel,
        tokenizer: Tokenizer,
        lanes: Lanes,
        device: torch.device,
        observers: Sequence[Observer] = (),
    ) -> None:
        self.recipe, self.config, self.tokenizer, self.lanes = recipe, recipe.training, tokenizer, lanes
        self.device, self.observers = device, list(observers)
        self.work = Step(model, self.config, device)
        self.model = self.work.model.train()
        if self.config.locked_dropout:
            lock_dropout(model)
        if self.config.checkpoint_activations:
            checkpoint_layers(model)
        if self.config.record and not model.recordable:
            raise ConfigError(
                f"training.record=true, and a step of {recipe.family} cannot be recorded; leave it out, or take "
                "transformer-xl, rotary or vanilla"
            )
        self.optimizer, self.guard, self.autocast = self.work.optimizer, self.work.guard, self.work.autocast
        self.average = Average(model, self.config) if self.config.averaging != "none" else None
        self.objective: nn.Module = Objective(model, self.config)
        wanted = device.type == "cuda" if self.config.compile is None else self.config.compile
        # Segments of random length would each be compiled anew.
        wanted = wanted and model.worth_compiling and not self.config.segment_jitter
        self.fast_objective: Any = torch.compile(self.objective, dynamic=False) if wanted else self.objective
        self.recording: tuple[tuple[Any, ...], RecordedStep] | None = None
        self.step, self.tokens, self.seconds_before = 0, 0, 0.0
        self.states: list[State] = []
        self.prepared: Counter[tuple[Any, ...]] = Counter()
        # Tokens each row has read since a document began in it: what its memory holds, known without asking the device.
        self.unbroken = np.zeros(0, np.int64)
        self.fills = model.initial_state(1).whole
        self.marks_documents = self.fills and len(lanes.document_starts) > 1
        self.finished = self.stopped_early = False
        self.interrupted: signal.Signals | None = None
        self._signal: signal.Signals | None = None
        self._empty: dict[tuple[int, int, int], State] = {}
        self.slow = False
        self.start_clock()

    @staticmethod
    def clock() -> float:
        return time.perf_counter()

    def start_clock(self) -> None:
        """From now on seconds count; also after a resume, from those of the run before."""
        self.began = self.clock()
        self.ledger = Ledger(self.device, self.step, self.tokens, self.clock)
        self.finished = self.stopped_early or self.progress >= 1.0

    @property
    def seconds(self) -> float:
        return self.seconds_before + self.clock() - self.began

    @property
    def progress(self) -> float:
        return progress(self.config, self.step, self.tokens, self.seconds)

    @property
    def arrived(self) -> float:
        """`progress` up to the last step whose figures have arrived: the steps after it may not have been taken yet."""
        return progress(self.config, self.ledger.step, self.ledger.tokens, self.seconds)

    def run(self) -> None:
        """Until a limit is met, an observer ends it, or a signal asks for a stop."""
        self.start_clock()
        with self._signals():
            try:
                for observer in self.observers:
                    observer.begin(self)
                while not (self.finished or self.interrupted):
                    self.take_step()
                    self.finished = self.stopped_early or self.progress >= 1.0
                    # Latched once a step, so that all observers of a step see the same.
                    self.interrupted = self._signal
                    for observer in self.observers:
                        observer.after_step(self)
                self.settle()
            finally:
                for observer in self.observers:
                    observer.end(self)

    def take_step(self) -> None:
        """Read, differentiate, update."""
        self.ledger.begin()
        batch_size = value_at(self.config.batch, self.step)
        whole = value_at(self.config.segment or self.recipe.model.segment, self.step)
        segment = segment_at(self.config, whole, self.step)
        self._set_memory()
        if batch_size != self.lanes.batch:
            self.lanes.rebatch(batch_size)
            self.states = []
        done = self.progress
        # The gradient is a mean over tokens: that of a shorter segment counts for less.
        factor = lr_factor(self.config, self.step, done) * segment / whole
        batch = self.lanes.next(segment)
        figures = self._hand_over(batch, segment, done, factor)
        self.step += 1
        self.tokens += batch.tokens.size
        if self.average is not None:
            self.average.update(self.step)
        entry = Entry(self.step, self.tokens, self.config.lr * factor, self.seconds, self._place(batch))
        self._tell(self.ledger.add(entry, figures))
        if self.slow:
            self._tell(self.ledger.drain())

    def _hand_over(self, batch: Batch, segment: int, done: float, factor: float) -> Float[Tensor, "4"]:
        """Give a batch to the device, by the way that fits it; the memory of each row moves on."""
        parts = self.config.accumulate
        rows = batch.tokens.shape[0] // parts
        if not self.states or self.lanes.position == batch.tokens.shape[1]:
            # All rows begin anew: an empty memory of full size says so, and the shapes stay what they were.
            self.states = [self.empty_state(rows)] * parts
            self.unbroken = np.zeros(rows * parts, np.int64)
            batch.starts[:, 0] = False
        starts = batch.starts if self.marks_documents or batch.starts.any() else None
        # Not worth a compilation of their own: the shorter segment that ends a pass and, where no document begins
        # inside one, those that fill the memory, since only there an empty one has to be masked.
        filled = self.marks_documents or not self.fills or all(state.whole for state in self.states)
        usual = batch.tokens.shape[1] == segment and filled
        # Nor can a step be recorded that makes a memory longer.
        grown = self.config.record and self.states[0].shapes == self.empty_state(rows).shapes
        recorded = usual and grown
        objective = self.fast_objective if usual else self.objective
        # A step is compiled or recorded with every float it is handed; of a tensor it reads the value.
        plain = self.device.type == "cpu" and objective is self.objective and not recorded
        scalar = float if plain else self._scalar
        order = Order(
            self._send(batch.tokens),
            self._send(batch.targets),
            None if starts is None else self._send(starts),
            scalar(done),
            scalar(factor),
        )
        self._prepare(order, compiled=objective is not self.objective, recorded=recorded)
        if recorded:
            figures, states = self._recorded(order)(self.states, *order)
        else:
            figures, states = self.work(objective, self.states, *order)
        self.unbroken = since_start(self.unbroken, batch.starts)
        mine = self.unbroken.reshape(parts, rows)
        self.states = [known_whole(*pair) for pair in zip(states, mine, strict=True)] if self.fills else states
        return figures

    def _prepare(self, order: Order, *, compiled: bool, recorded: bool) -> None:
        """Tell of a step that is compiled or recorded now, and let its time count for no other."""
        key = (order.tokens.shape, order.starts is None, self.model.config, recorded)
        # The first step of its kind is compiled, and where steps are recorded the second is recorded.
        self.slow = self.prepared[key] < (compiled or recorded) + recorded
        if self.slow:
            self._tell(self.ledger.drain())
            self.ledger.begin()
            what = "compiling" if compiled and not self.prepared[key] else "recording"
            self.prepared[key] += 1
            rows, tokens = order.tokens.shape
            for observer in self.observers:
                observer.preparing(self, f"{what} a step of {rows} x {tokens} tokens")

    def _recorded(self, order: Order) -> RecordedStep:
        """The recording of steps like this one; there is one at a time, since it holds all that a step needs."""
        key = (order.tokens.shape, order.starts is None, self.model.config)
        if self.recording is None or self.recording[0] != key:
            self.recording = None
            self.recording = key, RecordedStep(partial(self.work, self.fast_objective))
        return self.recording[1]

    def _send(self, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor

    def _scalar(self, value: float) -> Float[Tensor, ""]:
        return torch.full((), value, device=self.device)

    def empty_state(self, rows: int) -> State:
        """Nothing read yet, in the shapes of a full memory: one compiled graph then serves every step.

        Such a state is what the contract calls an empty row (all zeros, length 0), so it hides itself.
        """
        needed, segment = self.model.tokens_to_fill, self.recipe.model.segment
        key = (rows, needed, segment)
        if key not in self._empty:
            tokens = torch.zeros(1, segment, dtype=torch.int64, device=self.device)
            state = self.model.initial_state(1)
            with torch.no_grad(), self.quiet_random(), self.autocast():
                for _ in range(-(-needed // segment)):
                    _, state = self.model.hidden_states(tokens, state)
            state = state.reset(torch.ones(1, dtype=torch.bool, device=self.device))
            self._empty[key] = state.detach().rows([0] * rows)
        return self._empty[key]

    def quiet_random(self) -> contextlib.AbstractContextManager[Any]:
        """Within this block random numbers are drawn from elsewhere: what watches a run must not change it."""
        return torch.random.fork_rng([self.device] if self.device.type == "cuda" else [])

    def _set_memory(self) -> None:
        if self.config.memory is None or not hasattr(self.recipe.model, "memory"):
            return
        memory = value_at(self.config.memory, self.step)
        if memory != self.model.config.memory:
            self.model.config = dataclasses.replace(self.recipe.model, memory=memory)

    @contextmanager
    def as_model(self, **settings: Any) -> Iterator[LanguageModel]:
        """Within this block the model is what a user would get: the average where there is one, the recipe's config
        with some keys given anew, dropout off."""
        held = self.model.config
        known = {f.name for f in dataclasses.fields(self.recipe.model)}
        asked = {key: value for key, value in settings.items() if value is not None and key in known}
        with self.average.in_place() if self.average else contextlib.nullcontext(), self.quiet_random():
            self.model.config = dataclasses.replace(self.recipe.model, **asked)
            self.model.eval()
            try:
                yield self.model
            finally:
                self.model.config = held
                self.model.train()

    def announce(self, validation: Validation) -> None:
        for observer in self.observers:
            observer.validated(self, validation)

    def settle(self) -> None:
        """Wait for every step's figures; a step that was not finite is found out here at the latest."""
        self._tell(self.ledger.drain())
        finite = torch.stack([parameter.isfinite().all() for parameter in self.model.parameters()])
        if not bool(finite.all()):
            # A finite gradient can still be taken too far; such weights are not scored, saved or called the best.
            raise NotFiniteError(
                f"the weights after step {self.step} are not finite, at a learning rate of {self.config.lr}; "
                "no checkpoint was touched"
            )
        for observer in self.observers:
            observer.settle()

    def _tell(self, rows: list[Row]) -> None:
        for row in rows:
            if isinstance(row, Broken):
                raise row.error()
            for observer in self.observers:
                observer.row(self, row)

    def _place(self, batch: Batch) -> str:
        end = self.lanes.position
        return f"tokens {end - batch.tokens.shape[1]:,} to {end:,} of every row in pass {self.lanes.passes + 1}"

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Ctrl-C and SIGTERM ask for a stop after this step; a second one does not wait, unless it comes with the
        first: `timeout` sends its signal to the process and to the group it is in."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        asked = 0.0

        def ask(number: int, _: FrameType | None) -> None:
            nonlocal asked
            now = time.monotonic()
            if self._signal is None:
                self._signal, asked = signal.Signals(number), now
            elif now - asked > TOGETHER:
                raise KeyboardInterrupt

        before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
