"""The training loop. Progress, metrics, checkpoints and validation are observers."""

import contextlib
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any

import numpy as np
import torch

from longspan.checkpoints.weights import local
from longspan.compiled_layers import CompiledLayers
from longspan.contract import LanguageModel, State
from longspan.cuda_graphs import CapturedStep
from longspan.data.batch_streams import Batch, BatchSource
from longspan.errors import ConfigError
from longspan.reading import Reading
from longspan.shapes import Float, Tensor
from longspan.tokenizers import Tokenizer
from longspan.training.averaging import Average
from longspan.training.depth import unfreeze
from longspan.training.dropout import Objective, checkpoint_layers, hash_dropout, lock_dropout
from longspan.training.environment import peak_memory
from longspan.training.ledger import Entry, Ledger, NotFiniteError, NotFiniteRow, Row
from longspan.training.observer import Observer, Validation
from longspan.training.parallel import Parallel
from longspan.training.processes import ALONE, Processes
from longspan.training.recipe import Recipe, as_steps, value_at
from longspan.training.schedules import lr_factor, progress, segment_at
from longspan.training.step import Step, StepInputs, count_since_start, with_full
from longspan.training.utilisation import peak_tokens_per_second

TOGETHER = 1.0  # seconds within which two signals count as one
LAUNCH_BOUND = 2**14
"""Parts of a batch of documents are captured up to this many tokens. Larger ones keep a GPU busy, and a graph its
memory."""


class Trainer:
    """The state of a run; a checkpoint saves all of it (`snapshot.py`).

    A step has no host sync: the device decides whether to update the weights (`Guard`), and the metrics of a step are
    read once they have arrived (`Ledger`).
    """

    def __init__(
        self,
        recipe: Recipe,
        model: LanguageModel,
        tokenizer: Tokenizer,
        streams: BatchSource,
        device: torch.device,
        observers: Sequence[Observer] = (),
        processes: Processes = ALONE,
    ) -> None:
        self.recipe, self.config, self.tokenizer, self.streams = recipe, recipe.training, tokenizer, streams
        self.device, self.observers, self.processes = device, list(observers), processes
        for _, rows in as_steps(self.config.batch):
            processes.check_batch(rows, self.config.accumulate)
        self.work = Step(model, self.config, device, processes)
        self.model = self.work.model.train()
        if self.config.locked_dropout:
            lock_dropout(model)
        if self.config.checkpoint_activations:
            checkpoint_layers(model)
        if self.config.cuda_graph and not model.hints.graph_safe:
            raise ConfigError(
                f"training.cuda_graph=true needs steps with static shapes, which {recipe.family} does not have; "
                "leave it out"
            )
        if self.config.cuda_graph and processes.distributed:
            raise ConfigError(
                "training.cuda_graph=true is not supported with torchrun; add --set training.cuda_graph=false, or "
                "start longspan without torchrun"
            )
        self.optimizer, self.guard, self.autocast = self.work.optimizer, self.work.guard, self.work.autocast
        if processes.distributed and device.type == "cuda":
            processes.seed_device(self.config.seed, 0)
        self.average = Average(model, self.config) if self.config.averaging != "none" else None
        objective = Objective(model, self.config)
        wanted = device.type == "cuda" if self.config.compile is None else self.config.compile
        wanted = wanted and (model.hints.compile or model.hints.compile_layers) and not self.config.unfreeze_every
        # With jitter every length would be compiled.
        wanted = wanted and not self.config.segment_jitter
        if wanted and device.type == "cuda":
            hash_dropout(model)
        compiled: Any = objective
        if wanted and model.hints.compile:
            compiled = torch.compile(objective, dynamic=False)
        elif wanted:
            compiled = CompiledLayers(model, any_length=True).around(objective)
        parallel = Parallel(objective, compiled, model, processes, device)
        self.objective, self.fast_objective = parallel.eager, parallel.fast
        self.own_objective = objective  # without other processes
        self.work.around_part = parallel.part
        self.captured: dict[tuple[Any, ...], CapturedStep] = {}
        self._pool: Any = None
        self.step, self.tokens, self.seconds_before = 0, 0, 0.0
        self.readings = recipe.reading_schedule()
        self.states: list[State] = []
        self.prepared: Counter[tuple[Any, ...]] = Counter()
        # Tokens of each row since its last document start, counted on the host: `full` is then known without a sync.
        self.since_start = np.zeros(0, np.int64)
        self.tracks_full = model.initial_state(1, self.reading).full
        self.marks_documents = self.tracks_full and len(streams.document_starts) > 1
        self.finished = self.stopped_early = False
        self.interrupted: signal.Signals | None = None
        self._signal: signal.Signals | None = None
        self._empty: dict[tuple[int, Reading], State] = {}
        self.slow = False
        self.memory_per_process: tuple[float, ...] = ()
        self._peaks: dict[Reading, float | None] = {}
        self.start_clock()

    def reuse(self, recipe: Recipe, observers: Sequence[Observer]) -> None:
        """Use the trainer, with what it has compiled, for another run of the same model and text. Only limits,
        schedules and observers may differ. A checkpoint is loaded next, which sets everything else."""
        self.recipe, self.config, self.observers = recipe, recipe.training, list(observers)
        self.captured, self.interrupted, self._signal = {}, None, None
        self.finished = self.stopped_early = False

    @staticmethod
    def clock() -> float:
        return time.perf_counter()

    def start_clock(self) -> None:
        """Start counting seconds; after a resume, on top of those of the checkpoint."""
        self.started, self._shared_seconds = self.clock(), self.seconds_before
        self.ledger = Ledger(self.device, self.step, self.tokens, self.clock)
        self.finished = self.stopped_early or self.progress >= 1.0

    @property
    def seconds(self) -> float:
        """Seconds of the run. Several processes use the clock of the first one, read after each step."""
        return self._shared_seconds if self.processes.distributed else self._own_seconds

    @property
    def _own_seconds(self) -> float:
        return self.seconds_before + self.clock() - self.started

    @property
    def progress(self) -> float:
        return progress(self.config, self.step, self.tokens, self.seconds)

    @property
    def reported_progress(self) -> float:
        """`progress` at the last step whose metrics have arrived. The device may not have run the steps after it."""
        return progress(self.config, self.ledger.step, self.ledger.tokens, self.seconds)

    def run(self) -> None:
        """Train until a limit, an observer or a signal stops the run."""
        self.start_clock()
        with self._handle_signals(), self._observed():
            while not (self.finished or self.interrupted):
                self.take_step()
                # Set once per step, so that all its observers see the same value.
                self.interrupted = self._agree()
                self.finished = self.stopped_early or self.progress >= 1.0
                for observer in self.observers:
                    observer.after_step(self)
            self.settle()

    @contextmanager
    def _observed(self) -> Iterator[None]:
        """Begin all observers, and end those that were begun, also if one of them fails. The first error is raised. An
        observer whose `begin` failed is ended too, because it may have open files."""
        begun, errors = list[Observer](), list[BaseException]()
        try:
            for observer in self.observers:
                begun.append(observer)
                observer.begin(self)
            yield
        except BaseException as error:
            errors.append(error)
        for observer in begun:
            try:
                observer.end(self)
            except BaseException as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _agree(self) -> signal.Signals | None:
        """The signal that stops the run after this step. All processes have the same one, and the same clock."""
        if not self.processes.distributed and self.device.type == "cpu":
            return self._signal
        found = self.processes.exchange([self._signal or 0, self._own_seconds, peak_memory(self.device)])
        self._shared_seconds, self.memory_per_process = float(found[0, 1]), tuple(found[:, 2].tolist())
        stop = int(found[:, 0].max())
        return signal.Signals(stop) if stop else None

    def take_step(self) -> None:
        """Run one step on the next batch."""
        self.ledger.begin()
        batch_size = value_at(self.config.batch, self.step)
        reading = self.reading
        segment = segment_at(self.config, reading.segment, self.step)
        if self.states and self.model.has_memory(reading) and not self.model.has_memory(self.states[0].reading):
            self.states = []  # they carry nothing, so start with caches of the new size
        self.states = [replace(state, reading=reading) for state in self.states]
        if batch_size != self.streams.batch:
            self.streams.rebatch(batch_size)
            self.states = []
        done = self.progress
        # The gradient is a mean over tokens, so a shorter segment gets a lower weight.
        factor = lr_factor(self.config, self.step, done) * segment / reading.segment
        batch = self.streams.next(segment, self.processes.rows(batch_size, self.config.accumulate))
        if self.config.unfreeze_every:
            if self.work.sharded:
                self.model.reshard()  # type: ignore[operator]  # else the flags of gathered weights would be set
            unfreeze(self.model, self.config.unfreeze_every, self.step, done)
        metrics = self._run_step(batch, segment, done, factor)
        self.processes.share_random_state()
        self.step += 1
        self.tokens += batch_size * batch.new
        if self.average is not None:
            self.average.update(self.step, self.progress)
        entry = Entry(
            self.step,
            self.tokens,
            self.config.lr * factor,
            self.seconds,
            self._place(batch),
            self._peak(reading),
            self.memory_per_process,
        )
        self._report(self.ledger.add(entry, metrics))
        if self.slow:
            self._report(self.ledger.drain())

    def _peak(self, reading: Reading) -> float | None:
        """Tokens per second at a utilisation of 1. Tokens that are read again count as work, but not as tokens."""
        if reading not in self._peaks:
            read = replace(reading, segment=reading.segment + self.config.overlap)
            peak = peak_tokens_per_second(self.model, read, self.device, self.processes.size)
            self._peaks[reading] = peak and peak * reading.segment / read.segment
        return self._peaks[reading]

    def _run_step(self, batch: Batch, segment: int, done: float, factor: float) -> Float[Tensor, "4"]:
        """Run a step in the form that fits it (eager, compiled or captured) and update the states."""
        parts = self.config.accumulate
        rows = batch.tokens.shape[0] // parts
        restart = not self.states or self.streams.position == batch.new
        if restart:
            # All rows start over. An empty state of full size does that and keeps the shapes.
            self.states = [self.empty_state(rows)] * parts
            self.since_start = np.zeros(rows * parts, np.int64)
        if restart or self.config.overlap:  # nothing is before the first token, so it needs no mask
            batch.starts[:, 0] = False
        # The same in all processes, because masked means over the batch use all of them.
        same = self.processes.distributed or self.streams.complete_documents
        marked = self.streams.marks_starts if same else batch.starts.any()
        starts = batch.starts if self.marks_documents or marked else None
        # Two kinds of steps are not worth a compilation: the shorter segment at the end of a pass and, in a text of one
        # document, the steps that fill the memory, since only these need a mask.
        filled = self.marks_documents or not self.tracks_full or all(state.full for state in self.states)
        usual = batch.tokens.shape[1] == segment + self.config.overlap and filled
        launch_bound = True
        if self.streams.complete_documents:
            usual, launch_bound = not self.config.unfreeze_every, batch.tokens.size <= parts * LAUNCH_BOUND
        # A step that makes the memory longer cannot be captured.
        grown = self.config.cuda_graph and _shapes(self.states[0]) == _shapes(self.empty_state(rows))
        captured = usual and launch_bound and grown
        objective = self.fast_objective if usual else self.objective
        # A float would be a constant of the compiled or captured step.
        plain = self.device.type == "cpu" and objective is self.objective and not captured
        scalar = float if plain else self._scalar
        inputs = StepInputs(
            self._send(batch.tokens),
            self._send(batch.targets),
            None if starts is None else self._send(starts),
            scalar(done),
            scalar(factor),
        )
        self._prepare(inputs, compiled=objective is not self.objective, captured=captured)
        if captured:
            metrics, states = self._capture(inputs)(self.states, *inputs)
        else:
            metrics, states = self.work(objective, self.states, *inputs)
        self.since_start = count_since_start(self.since_start, batch.starts[:, -batch.new :])
        counts = self.since_start.reshape(parts, rows)
        self.states = [with_full(*pair) for pair in zip(states, counts, strict=True)] if self.tracks_full else states
        return metrics

    def _prepare(self, inputs: StepInputs, *, compiled: bool, captured: bool) -> None:
        """Announce a step that is about to be compiled or captured, and time it separately."""
        key = (inputs.tokens.shape, inputs.starts is None, self.reading, captured)
        # The first step of its kind is compiled. With CUDA graphs the second one is captured.
        self.slow = self.prepared[key] < (compiled or captured) + captured
        if self.slow:
            self._report(self.ledger.drain())
            self.ledger.begin()
            what = "compiling" if compiled and not self.prepared[key] else "capturing"
            self.prepared[key] += 1
            rows, tokens = inputs.tokens.shape
            for observer in self.observers:
                observer.preparing(self, f"{what} a step of {rows} x {tokens} tokens")

    def _capture(self, inputs: StepInputs) -> CapturedStep:
        """The CUDA graph of steps of this kind. There is only one at a time, because it owns the memory of a step;
        documents of several lengths share it."""
        key = (inputs.tokens.shape, inputs.starts is None, self.reading)
        if key not in self.captured:
            pool = self._graph_pool if self.streams.complete_documents else None
            if pool is None:
                self.captured.clear()
            self.captured[key] = CapturedStep(partial(self.work, self.fast_objective), pool)
        return self.captured[key]

    def _graph_pool(self) -> Any:
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        return self._pool

    def _send(self, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor

    def _scalar(self, value: float) -> Float[Tensor, ""]:
        return torch.full((), value, device=self.device)

    @property
    def reading(self) -> Reading:
        """The reading of the next step."""
        return next(reading for begin, reading in reversed(self.readings) if begin <= self.step)

    def empty_state(self, rows: int) -> State:
        """An empty state with caches of their final size, so that one compiled graph fits every step."""
        key = (rows, self.reading)
        if key not in self._empty:
            tokens = torch.zeros(1, self.reading.segment, dtype=torch.int64, device=self.device)
            state = self.model.initial_state(1, self.reading, filled=True)
            with torch.no_grad(), self.preserve_rng(), self.autocast():
                _, state = self.model.hidden_states(tokens, state)  # gives the caches the dtypes of a step
            state = state.reset(torch.ones(1, dtype=torch.bool, device=self.device))
            self._empty[key] = state.detach().rows([0] * rows)
        return self._empty[key]

    def preserve_rng(self) -> contextlib.AbstractContextManager[Any]:
        """Restores the random state afterwards, so that observers do not change the run."""
        return torch.random.fork_rng([self.device] if self.device.type == "cuda" else [])

    @contextmanager
    def evaluation_model(self) -> Iterator[LanguageModel]:
        """The model as it is saved and scored: in evaluation mode, with averaged weights if the recipe averages."""
        with self.average.in_place() if self.average else contextlib.nullcontext(), self.preserve_rng():
            self.model.eval()
            try:
                yield self.model
            finally:
                self.model.train()

    def announce(self, validation: Validation) -> None:
        for observer in self.observers:
            observer.validated(self, validation)

    def settle(self) -> None:
        """Wait for the metrics of all steps. Raises an error if a step or the weights are not finite."""
        self._report(self.ledger.drain())
        finite = torch.stack([local(parameter).isfinite().all() for parameter in self.model.parameters()])
        if not self.processes.exchange([bool(finite.all())]).all():
            # A finite gradient can still overflow the weights. They must not be scored or saved.
            raise NotFiniteError(
                f"the weights after step {self.step} are not finite at training.lr={self.config.lr}; "
                "checkpoints are unchanged"
            )
        for observer in self.observers:
            observer.settle()

    def _report(self, rows: list[Row]) -> None:
        for row in rows:
            if isinstance(row, NotFiniteRow):
                raise row.error()
            for observer in self.observers:
                observer.row(self, row)

    def _place(self, batch: Batch) -> str:
        end = self.streams.position
        return f"tokens {end - batch.new:,} to {end:,} of every row, pass {self.streams.passes + 1}"

    @contextmanager
    def _handle_signals(self) -> Iterator[None]:
        """Ctrl-C and SIGTERM stop the run after the current step. A second signal stops it at once, unless it comes
        within a second of the first: `timeout` sends its signal to the process and to its group."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        received = 0.0

        def handle(number: int, _: FrameType | None) -> None:
            nonlocal received
            now = time.monotonic()
            if self._signal is None:
                self._signal, received = signal.Signals(number), now
            elif now - received > TOGETHER:
                raise KeyboardInterrupt

        before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _shapes(state: State) -> list[torch.Size]:
    return [tensor.shape for tensor in state.tensors().values()]
