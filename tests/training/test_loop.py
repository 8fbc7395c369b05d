"""The training loop and its observers."""

import contextlib
import json
import math
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from longspan.checkpoints import store
from longspan.checkpoints.model_folder import load_model
from longspan.errors import ConfigError, DeviceError, TrainingError
from longspan.scoring.score import score
from longspan.training import run, snapshot
from longspan.training.dropout import LockedDropout, Objective
from longspan.training.dry_run import dry_run
from longspan.training.loop import Trainer
from longspan.training.observer import Observer, Validation
from longspan.training.observers.early_stop import EarlyStop
from longspan.training.observers.metrics import Metrics, read_lines, truncate_after
from longspan.training.observers.tensorboard import TensorBoard
from longspan.training.observers.validation import Validate, sample
from longspan.training.preflight import preflight
from longspan.training.recipe import build_recipe
from longspan.training.resume import find_start
from longspan.training.step import StepInputs
from tests.programs import PYTHON
from tests.training.conftest import losses, make_recipe, make_text, run_in_process, train

CPU = torch.device("cpu")
REPOSITORY = Path(__file__).parents[2]


def test_it_learns_and_writes_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = make_recipe(training_steps=60, training_save_every=20, training_keep=2, model_dropout=0.0)
    train(recipe, tmp_path, make_text(), monkeypatch)
    curve = losses(tmp_path)
    assert curve[-1] < 0.75 * curve[0]
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-40", "checkpoint-60"]
    line = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[9])
    assert set(line) == {"step", "tokens", "loss", "bits", "lr", "grad_norm", "tokens_per_second", "seconds"}
    assert line["tokens"] == 10 * 4 * 8
    assert line["bits"] == pytest.approx(line["loss"] / math.log(2))
    about = json.loads((tmp_path / "run.json").read_text())
    assert about["data"]["tokens"] == 700
    assert {"commit", "torch", "processor", "device"} <= set(about["processes"][0])
    assert about["processes"][0]["processor"]


def test_muon_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = make_recipe(training_steps=60, training_save_every=100, training_optimizer="muon", model_dropout=0.0)
    train(recipe, tmp_path, make_text(), monkeypatch)
    assert losses(tmp_path)[-1] < 0.75 * losses(tmp_path)[0]


def test_an_empty_state_of_full_size_reads_like_the_initial_state() -> None:
    _, trainer = run.make_trainer(make_recipe(model_dropout=0.0), make_text(), CPU)
    batch = trainer.streams.next(8)
    tokens, targets = torch.from_numpy(batch.tokens), torch.from_numpy(batch.targets)
    full, empty = trainer.empty_state(4), trainer.model.initial_state(4)
    assert full.tensors()["0.hidden"].shape == (4, 12, 16)
    assert not any(t.any() for t in full.tensors().values())
    first, _ = trainer.model.losses(tokens, targets, full)
    second, _ = trainer.model.losses(tokens, targets, empty)
    torch.testing.assert_close(first, second)


def test_accumulated_gradients_equal_those_of_the_batch() -> None:
    gradients = []
    for parts in (1, 2, 4):
        recipe = make_recipe(training_accumulate=parts, model_dropout=0.0)
        _, trainer = run.make_trainer(recipe, make_text(), CPU)
        tokens = torch.from_numpy(np.random.default_rng(0).integers(0, 64, (4, 9)))
        order, states = (
            StepInputs(tokens[:, :-1], tokens[:, 1:], None, 0.0, 1.0),
            [trainer.empty_state(4 // parts)] * parts,
        )
        for _ in range(2):
            _, states = trainer.work.accumulate(trainer.objective, states, order)
        gradients.append(torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None]))
    torch.testing.assert_close(gradients[1], gradients[0], atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(gradients[2], gradients[0], atol=1e-6, rtol=1e-4)


def test_checkpointed_activations_change_nothing() -> None:
    curves = []
    for recompute in (False, True):
        recipe = make_recipe(training_checkpoint_activations=recompute, model_attention_dropout=0.1)
        _, trainer = run.make_trainer(recipe, make_text(), CPU)
        rows = []
        trainer._report = rows.extend  # type: ignore[method-assign]
        for _ in range(5):
            trainer.take_step()
        curves.append([row.loss for row in rows])
    assert curves[0] == pytest.approx(curves[1], rel=1e-5)


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_training_does_not_depend_on_the_autocast_of_its_caller(precision: torch.dtype) -> None:
    """Neither on its precision nor on the casts of weights that it keeps until its end."""
    weights = []
    for caller in (contextlib.nullcontext(), torch.autocast("cpu", torch.bfloat16)):
        _, trainer = run.make_trainer(make_recipe(), make_text(), CPU)
        trainer.work.precision = precision  # a recipe may not choose bfloat16 on a CPU
        with caller:
            for _ in range(3):
                trainer.take_step()
            with trainer.autocast():
                assert torch.is_autocast_enabled("cpu") == (precision == torch.bfloat16)
        weights.append(torch.cat([p.detach().flatten() for p in trainer.model.parameters()]))
    assert torch.equal(*weights)


def test_validation_has_the_precision_of_training() -> None:
    """Not float32, which takes a slower path on a GPU."""
    _, trainer = run.make_trainer(make_recipe(), make_text(), CPU)
    held_out, nats = make_text(300), []
    for precision in (torch.float32, torch.bfloat16):
        trainer.work.precision = precision
        nats.append(Validate(held_out, 1).score(trainer).nats)
    streams = trainer.streams.batch
    expected = [
        score(trainer.model.eval(), held_out, method="stream", streams=streams, precision=products).nats
        for products in (None, torch.bfloat16)
    ]
    assert nats == expected
    assert nats[0] != nats[1]


def test_a_model_without_a_next_token_is_validated_by_its_training_loss() -> None:
    """The same masks in every call, no dropout, and no trace in the random numbers of training."""
    model = {"family": "bert", "layers": 1, "width": 16, "heads": 2, "positions": 16, "mask": 3, "dropout": 0.2}
    training = {"steps": 4, "batch": 4, "segment": 16, "lr": 0.01}
    recipe = build_recipe({"model": model, "data": {}, "training": training, "evaluation": {}}, "masked")
    _, trainer = run.make_trainer(recipe, make_text(), CPU)
    held_out, observer = make_text(5 * 16 + 3), Validate(make_text(5 * 16 + 3), 1)
    before = torch.get_rng_state()
    found = observer.score(trainer)
    assert torch.equal(before, torch.get_rng_state())
    assert observer.score(trainer) == found
    net = trainer.model.eval()
    rows = torch.from_numpy(held_out.ids[:80].astype(np.int64)).view(5, 16)
    starts = torch.from_numpy(np.isin(np.arange(80), held_out.starts)).view(5, 16)
    torch.manual_seed(0)
    with torch.no_grad():
        found_by_hand = [
            float(net.training_loss(rows[part], rows[part], starts=starts[part])[0]) for part in (slice(4), slice(4, 5))
        ]
    assert found.nats == pytest.approx((4 * found_by_hand[0] + found_by_hand[1]) / 5, rel=1e-6)


def test_locked_dropout_drops_the_same_units_at_every_position() -> None:
    dropout = LockedDropout(0.5)
    dropped = dropout(torch.ones(3, 7, 11))
    assert (dropped == dropped[:, :1]).all()
    assert 0 < (dropped == 0).float().mean() < 1
    assert not torch.equal(dropped[0], dropped[1])
    assert torch.equal(dropout.eval()(torch.ones(2, 3, 4)), torch.ones(2, 3, 4))


def test_weight_dropout_is_active_only_in_training() -> None:
    recipe = make_recipe(model_dropout=0.0, training_weight_dropout=0.5)
    _, trainer = run.make_trainer(recipe, make_text(), CPU)
    batch = trainer.streams.next(8)
    inputs = (torch.from_numpy(batch.tokens), torch.from_numpy(batch.targets), trainer.empty_state(4), 0.0, None)
    assert isinstance(trainer.objective, Objective)
    first, _ = trainer.objective(*inputs)
    second, _ = trainer.objective(*inputs)
    assert first.item() != second.item()
    first.backward()
    assert all(p.grad is not None for p in trainer.objective.dropped.values())
    with trainer.evaluation_model() as model:
        plain = [model.losses(*inputs[:3])[0].mean().item() for _ in range(2)]
    assert plain[0] == plain[1]


def test_validation_saves_the_best_model_and_stops_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = make_recipe(training_steps=400, training_validate_every=4, training_patience=2, training_lr=0.2)
    observers = [Validate(make_text(300), 4, tokens=200), EarlyStop(2)]
    outcome = train(recipe, tmp_path, make_text(), monkeypatch, *observers)
    assert outcome.finished
    assert outcome.step < 400
    scores = [json.loads(line) for line in (tmp_path / "validation.jsonl").read_text().splitlines()]
    best = min(scores, key=lambda score: score["nats"])
    assert scores[-3]["nats"] == best["nats"]
    assert f"{best['step']:,} steps" in (tmp_path / "best" / "README.md").read_text()
    assert load_model(tmp_path).path.name == "best"
    assert train(recipe, tmp_path, make_text(), monkeypatch, *observers, resume="auto").took_steps == 0


def test_every_validation_scores_the_weights_of_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model may cache tensors computed from its weights. The cache must be invalidated when they change."""
    recipe, held_out = make_recipe(training_lr=0.05, evaluation_memory=20), make_text(300)
    train(recipe, tmp_path, make_text(), monkeypatch, Validate(held_out, 4))
    scores = [json.loads(line) for line in (tmp_path / "validation.jsonl").read_text().splitlines()]
    assert [stored["step"] for stored in scores] == [4, 8, 12]
    for stored in scores:
        _, fresh = run.make_trainer(recipe, make_text(), CPU)
        snapshot.load(fresh, store.read_folder(tmp_path / f"checkpoint-{stored['step']}", snapshot.PARTS))
        assert Validate(held_out, 1).score(fresh).nats == stored["nats"]


def test_observers_do_not_change_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, text = make_recipe(training_averaging="ema"), make_text()
    train(recipe, tmp_path / "plain", text, monkeypatch)
    train(recipe, tmp_path / "watched", text, monkeypatch, Validate(text, 2), TensorBoard(tmp_path / "watched"))
    assert losses(tmp_path / "plain") == losses(tmp_path / "watched")
    assert list((tmp_path / "watched" / "tensorboard").iterdir())


class ExitAfter(Observer):
    """Ends the process after a given step, like SIGKILL: nothing is closed or flushed."""

    def __init__(self, step: int) -> None:
        self.step = step

    def after_step(self, trainer: Trainer) -> None:
        if trainer.step == self.step:
            os._exit(7)


def curves(folder: Path) -> dict[str, list[int]]:
    """The steps of every tag that TensorBoard shows."""
    shown = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator").EventAccumulator(str(folder))
    shown.Reload()
    return {tag: [event.step for event in shown.Scalars(tag)] for tag in shown.Tags()["scalars"]}


def train_until_killed(folder: str, save_every: int) -> None:
    recipe, text, out = make_recipe(training_save_every=save_every), make_text(), Path(folder)
    train(recipe, out, text, pytest.MonkeyPatch(), TensorBoard(out), Validate(text, 3), ExitAfter(7))


@pytest.mark.parametrize("save_every", [4, 100])
def test_tensorboard_shows_each_step_once_after_a_kill(
    save_every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_in_process(train_until_killed, str(tmp_path), save_every) == 7
    recipe, text = make_recipe(training_save_every=save_every), make_text()
    observers = [TensorBoard(tmp_path), Validate(text, 3)]
    steps = curves(tmp_path / "tensorboard")
    assert steps["training/loss"] == [1, 2, 3, 4, 5, 6, 7], "events are written at once"
    train(recipe, tmp_path, text, monkeypatch, *observers, resume="auto")
    steps = curves(tmp_path / "tensorboard")
    assert set(steps) == {f"training/{name}" for name in ("loss", "bits", "lr", "grad_norm", "tokens_per_second")} | {
        "validation/loss",
        "validation/bits",
    }
    assert steps["training/loss"] == list(range(1, 13))
    assert steps["validation/loss"] == [3, 6, 9, 12]


def test_events_that_cannot_be_written_stop_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class FillDisk(Observer):
        def after_step(self, trainer: Trainer) -> None:
            if trainer.step == 5:
                board.file = Path("/dev/full").open("wb", buffering=0)  # noqa: SIM115 (the observer closes it)
                board.records._writer = board.file

    board = TensorBoard(tmp_path / "run")
    with pytest.raises(TrainingError, match=r"tfevents.*No space left on device.*resume"):
        train(make_recipe(training_save_every=100), tmp_path / "run", make_text(), monkeypatch, board, FillDisk())


def test_a_checkpoint_is_a_model_with_the_averaged_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, text = make_recipe(training_averaging="ema"), make_text()
    train(recipe, tmp_path, text, monkeypatch)
    loaded = load_model(tmp_path / "checkpoint-12")
    _, trainer = run.make_trainer(recipe, text, CPU)
    start = find_start(tmp_path, "auto")
    assert start is not None
    snapshot.load(trainer, start)
    assert trainer.average is not None
    for name, parameter in loaded.model.named_parameters():
        assert torch.equal(parameter, trainer.average.means[name])
        assert not torch.equal(parameter, trainer.average.parameters[name])


def test_every_observer_that_began_is_ended_and_the_first_error_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    class Fails(Observer):
        def __init__(self, name: str, *fails: str) -> None:
            self.name, self.fails = name, fails

        def call(self, what: str) -> None:
            calls.append(f"{what} {self.name}")
            if what in self.fails:
                raise ValueError(calls[-1])

        def begin(self, trainer: Trainer) -> None:
            self.call("begin")

        def after_step(self, trainer: Trainer) -> None:
            self.call("step")

        def end(self, trainer: Trainer) -> None:
            self.call("end")

    def first_error(out: str, *observers: Observer) -> str:
        calls.clear()
        with pytest.raises(ValueError) as caught:
            train(make_recipe(training_steps=1), tmp_path / out, make_text(), monkeypatch, *observers)
        return str(caught.value)

    assert first_error("end", Fails("a", "end"), Fails("b", "end"), Fails("c")) == "end a"
    assert calls[-3:] == ["end a", "end b", "end c"]
    assert first_error("step", Fails("a"), Fails("b", "step", "end"), Fails("c")) == "step b"
    assert calls[-3:] == ["end a", "end b", "end c"]
    assert first_error("begin", Fails("a"), Fails("b", "begin"), Fails("c")) == "begin b"
    assert calls == ["begin a", "begin b", "end a", "end b"]


def test_lines_after_the_resumed_step_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": s, "loss": s / 2}) for s in (1, 2, 3, 3, 4)]
    path.write_text("\n".join(lines) + '\n{"step": 5, "lo')
    truncate_after(path, 3)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]


def test_numbers_that_are_not_finite_are_null(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path)
    (tmp_path / "validation.jsonl").write_text('{"step": 1, "nats": Infinity}\n{"step": 5')
    _, trainer = run.make_trainer(make_recipe(), make_text(), CPU)
    trainer.step = 2
    metrics.begin(trainer)
    metrics.validated(trainer, Validation(2, 16, math.inf))
    metrics.end(trainer)
    lines = [
        json.loads(line, parse_constant=pytest.fail)
        for line in (tmp_path / "validation.jsonl").read_text().splitlines()
    ]
    assert lines == [{"step": 1, "nats": None}, {"step": 2, "tokens": 16, "nats": None, "bits": None}]
    assert read_lines(tmp_path / "validation.jsonl") == lines


def test_limits_in_tokens_and_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    by_tokens = make_recipe(training_steps=None, training_tokens=100)
    assert train(by_tokens, tmp_path / "tokens", make_text(), monkeypatch).step == 4
    by_seconds = make_recipe(training_steps=None, training_seconds=0.5, training_save_every=10**6)
    assert train(by_seconds, tmp_path / "seconds", make_text(), monkeypatch).finished
    rows = [json.loads(line) for line in (tmp_path / "seconds" / "metrics.jsonl").read_text().splitlines()]
    assert 0.4 < rows[-1]["seconds"] < 3


def test_a_dry_run_measures_and_writes_nothing() -> None:
    cost = dry_run(make_recipe(training_steps=1000), make_text(), CPU)
    assert cost.parameters == sum(
        p.numel() for p in run.make_trainer(make_recipe(), make_text(), CPU)[1].model.parameters()
    )
    assert cost.tokens_per_step == (32, 32)
    assert cost.steps_per_pass == 22
    assert cost.seconds > 0
    assert cost.memory_bytes > 2**20


def test_a_dry_run_counts_the_steps_of_schedules() -> None:
    recipe = make_recipe(
        training_steps=30, training_batch=[[0, 2], [10, 4]], training_segment=[[0, 4], [20, 16]], training_memory=12
    )
    cost = dry_run(recipe, make_text(), CPU)
    assert cost.tokens_per_step == (8, 64)
    assert cost.steps_per_pass == 88
    # 10 steps of 2 x 4 tokens, 10 of 4 x 4, 10 of 4 x 16.
    assert cost.seconds * cost.tokens_per_second == pytest.approx(10 * 8 + 10 * 16 + 10 * 64)
    limited = dry_run(make_recipe(training_steps=None, training_tokens=6400), make_text(), CPU)
    assert limited.seconds * limited.tokens_per_second == pytest.approx(6400)


@pytest.mark.parametrize(
    ("changes", "fits"),
    [
        ({}, False),
        ({"training_batch": [[0, 2], [900, 1000]]}, False),
        ({"training_batch": 100}, True),
        ({"training_accumulate": 10}, True),
        ({"training_checkpoint_activations": True}, True),
    ],
)
def test_a_step_that_does_not_fit_into_memory_is_refused_before_the_run(
    changes: dict[str, object], fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, small = os.sysconf, {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 6_500}
    monkeypatch.setattr(os, "sysconf", lambda name: small[name] if name in small else real(name))
    recipe = make_recipe(**{"training_batch": 1000, **changes})
    _, trainer = run.make_trainer(recipe, make_text(10_000), CPU)
    before = torch.get_rng_state()
    if fits:
        preflight(trainer)
    else:
        with pytest.raises(ConfigError, match=r"activations .* GiB.*training\.batch"):
            preflight(trainer)
    assert torch.equal(torch.get_rng_state(), before)


def test_pointer_weights_that_are_never_trained_are_refused() -> None:
    _, trainer = run.make_trainer(make_recipe(model_family="longspan-xl", model_pointer_width=4), make_text(300), CPU)
    with pytest.raises(ConfigError, match=r"model\.pointer_width=4 .* training\.pointer=0"):
        preflight(trainer)


def test_a_segment_longer_than_the_text_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    _, trainer = run.make_trainer(make_recipe(training_segment=1000, training_memory=0), make_text(41), CPU)
    objective = trainer.own_objective
    monkeypatch.setattr(trainer, "own_objective", lambda *inputs: seen.append(inputs[0].shape) or objective(*inputs))
    preflight(trainer)
    assert seen == [(1, 10), (2, 10)]


COMPILED = """
import sys
import torch
from torch._dynamo.testing import CompileCounter
from longspan.training import run
from tests.training.conftest import make_recipe, make_text

for name, changes in eval(sys.argv[1]).items():
    torch.compiler.reset()
    _, trainer = run.make_trainer(make_recipe(**changes), make_text(300), torch.device("cpu"))
    counter = CompileCounter()
    trainer.fast_objective = torch.compile(trainer.objective, backend=counter, dynamic=False, fullgraph=True)
    seen = []
    for _ in range(24):
        trainer.take_step()
        seen.append(counter.frame_count)
    assert trainer.streams.passes >= 2
    # One graph: in a text with several documents all steps get document starts, in a text with one document all steps
    # but those that fill the memory have no mask.
    assert seen[2:] == [1] * len(seen[2:]), (name, seen)
"""


RATES = ("attention_dropout", "embedding_dropout", "input_dropout", "output_dropout", "projection_dropout")
ALL_DROPOUT = {f"model_{rate}": 0.3 for rate in RATES} | {
    "training_locked_dropout": True,
    "training_weight_dropout": 0.1,
}


COMPILED_FORMS: dict[str, dict[str, object]] = {
    "plain": {},
    "one document": {"data_documents": False},
    "dropout": ALL_DROPOUT | {"model_family": "longspan-xl", "model_ar": 0.2, "model_tar": 0.1},
    "pointer": {
        "data_documents": False,
        "model_family": "longspan-xl",
        "model_pointer_width": 4,
        "training_pointer": 30,
    },
}


@pytest.mark.slow
def test_a_step_is_compiled_once() -> None:
    """There are no graph breaks and no recompilation once the memory is full, not even for short last segments.

    It runs in another process, because torch.compile cannot trace the shape checks of these tests.
    """
    done = subprocess.run(
        [PYTHON, "-c", COMPILED, repr(COMPILED_FORMS)], capture_output=True, text=True, cwd=REPOSITORY
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("documents", [True, False])
@pytest.mark.parametrize("memory", [0, 5, 8, 20])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_full_on_the_host_agrees_with_the_lengths_on_the_device(documents: bool, memory: int, accumulate: int) -> None:
    """The token count on the host against the lengths of the states, over several passes."""
    family = {"model_family": "longspan-xl", "model_pointer_width": 4, "training_pointer": 30} if memory == 5 else {}
    recipe = make_recipe(data_documents=documents, training_memory=memory, training_accumulate=accumulate, **family)
    trainer = run.make_trainer(recipe, make_text(300), CPU)[1]
    seen = set()
    for _ in range(40):
        trainer.take_step()
        lengths = torch.cat([state.length for state in trainer.states])
        assert np.minimum(trainer.since_start, memory).tolist() == lengths.tolist()
        for state in trainer.states:
            assert state.full == bool((state.length == memory).all())
            seen.add(state.full)
    assert trainer.streams.passes >= 2
    assert True in seen
    assert False in seen or memory < 20


def test_bfloat16_on_a_cpu_is_refused() -> None:
    with pytest.raises(DeviceError, match=r"training\.precision='bfloat16'.*CPU"):
        run.make_trainer(make_recipe(training_precision="bfloat16"), make_text(), CPU)


def test_a_validation_sample_covers_the_text_evenly() -> None:
    text = make_text(700)
    found = sample(text, 160)
    ids, starts = found.ids, found.starts
    assert len(ids) == 160
    assert (ids[:10] == text.ids[:10]).all()
    assert (ids[-10:] == text.ids[-10:]).all()
    assert set(range(0, 160, 10)) <= set(starts.tolist())
    found = sample(text, 10**6)
    ids, starts = found.ids, found.starts
    assert len(ids) == 700
    assert starts.tolist() == text.starts.tolist()


def test_full_is_the_same_after_a_resume(tmp_path: Path) -> None:
    """Otherwise one run would use the compiled step and the other not. Layers of this family cache different numbers of
    positions."""
    shape = {
        "family": "longformer",
        "layers": 2,
        "width": 16,
        "heads": 2,
        "window": [4, 20],
    }
    recipe = build_recipe(
        {
            "model": shape,
            "data": {"documents": False},
            "training": {"steps": 12, "batch": 4, "segment": 8, "memory": 20, "lr": 1e-4},
        },
        "small",
    )
    first, again = (run.make_trainer(recipe, make_text(), CPU)[1] for _ in range(2))
    for step in range(1, 7):
        first.take_step()
        first.settle()
        snapshot.save(first, tmp_path / f"checkpoint-{step}")
        found = find_start(tmp_path, "auto")
        assert found is not None
        snapshot.load(again, found)
        assert [state.full for state in again.states] == [state.full for state in first.states]
    sizes = {cache.positions for cache in first.states[0].caches}
    assert len(sizes) == 2
    assert first.states[0].full
