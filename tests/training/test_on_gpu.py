"""What only a GPU shows: no step waits for it, nothing is compiled twice, what is not finite is held back there."""

import math
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from longspan.data import Encoded
from longspan.kernels.relative_attention import forced
from longspan.tokens import ByteTokenizer
from longspan.training import run, snapshot
from longspan.training.ledger import WINDOW, NotFiniteError
from longspan.training.loop import Trainer
from longspan.training.recipe import Recipe, build_recipe
from tests.training.conftest import Losses

pytestmark = pytest.mark.gpu


def text(tokens: int = 4_000_000) -> Encoded:
    ids = np.random.default_rng(0).integers(0, 200, tokens).astype(np.uint8)
    return Encoded("noise", "train", ids, np.array([0]), ByteTokenizer(), "f" * 64, tokens)


def small(**training: object) -> Recipe:
    shape = {"layers": 2, "width": 128, "heads": 2, "segment": 64, "memory": 64, "dropout": 0.1}
    return build_recipe(
        {"model": shape, "training": {"steps": 1000, "batch": 8, "compile": False, **training}}, "small"
    )


def make(recipe: Recipe) -> Trainer:
    return run.make_trainer(recipe, text(), torch.device("cuda"))[1]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("averaging", ["none", "ema"])
@pytest.mark.parametrize("record", [False, True])
def test_no_step_waits_for_the_device(optimizer: str, averaging: str, record: bool) -> None:
    trainer = make(small(optimizer=optimizer, averaging=averaging, record=record))
    for _ in range(4):
        trainer.take_step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3 * WINDOW):
            trainer.take_step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    trainer.settle()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("optimizer", ["adamw", "muon", "sgd"])
def test_recorded_steps_are_the_steps(optimizer: str, compiled: bool) -> None:
    """With dropout: the same random numbers are drawn, other ones at every replay. bfloat16 products and the order in
    which gradients of distances are added leave some noise."""
    curves, draws = [], []
    for record in (False, True):
        trainer = make(small(optimizer=optimizer, record=record, compile=compiled, lr=1e-3, accumulate=2))
        losses = Losses()
        trainer.observers.append(losses)
        for _ in range(40):
            trainer.take_step()
        trainer.settle()
        assert (trainer.recording is not None and trainer.recording[1].graph is not None) == record
        curves.append(losses.curve)
        draws.append(torch.rand(3, device="cuda"))
    assert len(curves[1]) == 40
    np.testing.assert_allclose(curves[1], curves[0], rtol=2e-3)
    assert torch.equal(*draws)


def test_compiled_once() -> None:
    trainer = make(small(compile=True))
    for _ in range(2):
        trainer.take_step()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(20):
            trainer.take_step()
    trainer.settle()


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("record", [False, True])
def test_what_is_not_finite_is_held_back_on_the_device(optimizer: str, record: bool) -> None:
    trainer = make(small(optimizer=optimizer, record=record))
    inner, poison = trainer.fast_objective, torch.ones((), device="cuda")

    def poisoned(*inputs: object) -> object:
        loss, state = inner(*inputs)
        return loss * poison, state

    trainer.fast_objective = poisoned
    for _ in range(5):
        trainer.take_step()
    before = [p.detach().clone() for p in trainer.model.parameters()]
    poison.fill_(math.nan)
    with pytest.raises(NotFiniteError, match="step 6 has a loss"):  # noqa: PT012
        for _ in range(4 * WINDOW):
            trainer.take_step()
    for now, then in zip(trainer.model.parameters(), before, strict=True):
        assert torch.equal(now.detach(), then)


def test_a_resume_brings_back_the_device(tmp_path: Path) -> None:
    first = make(small())
    for _ in range(4):
        first.take_step()
    snapshot.save(first, tmp_path / "checkpoint-4")
    drawn = torch.rand(3, device="cuda")
    second = make(small())
    start = run.find_start(tmp_path, "auto")
    assert start is not None
    snapshot.load(second, start)
    assert torch.equal(torch.rand(3, device="cuda"), drawn)
    memory, again = first.states[0].tensors(), second.states[0].tensors()
    assert all(torch.equal(memory[name], again[name]) and again[name].is_cuda for name in memory)
    assert all(torch.equal(p, q) for p, q in zip(first.model.parameters(), second.model.parameters(), strict=True))


def measure(name: str, **training: object) -> None:
    """Speed and memory of a preset, for whoever runs this file as a script."""
    from longspan.training.recipe import load_recipe

    pairs = [f"training.{key}={value}" for key, value in training.items()]
    trainer = make(load_recipe(name, ["model.dropout=0.0", *pairs]))
    began = time.perf_counter()
    for _ in range(3):
        trainer.take_step()
    torch.cuda.synchronize()
    print(name, training, f"first steps {time.perf_counter() - began:.1f} s", flush=True)
    torch.cuda.reset_peak_memory_stats()
    began, tokens = time.perf_counter(), trainer.tokens
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(40):
            trainer.take_step()
    torch.cuda.synchronize()
    spent = time.perf_counter() - began
    for parameter in trainer.model.parameters():
        parameter.grad = torch.randn_like(parameter)
    go = torch.zeros((), device="cuda")
    trainer.optimizer.step(1.0, go)
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(20):
        trainer.optimizer.step(1.0, go)
    torch.cuda.synchronize()
    optimizer = (time.perf_counter() - begun) / 20
    peak = torch.cuda.max_memory_allocated() / 2**30
    print(
        f"  {(trainer.tokens - tokens) / spent:,.0f} tokens/s, {spent / 40 * 1e3:.1f} ms a step, "
        f"optimiser {optimizer * 1e3:.2f} ms, {peak:.1f} GiB",
        flush=True,
    )


if __name__ == "__main__":
    measure("enwik8-base", batch=64)
    measure("enwik8-base", batch=64, optimizer="muon")


def test_200_steps_through_the_fused_kernel_are_those_of_the_definition() -> None:
    """The fused kernel moves a loss curve no more than bfloat16 does: its distance from the definition in bfloat16 is
    that of the definition in bfloat16 from the definition in float32, within a factor."""

    def curve(form: str, precision: str) -> np.ndarray:
        shape = {"layers": 4, "width": 128, "heads": 2, "segment": 128, "memory": 128, "dropout": 0.0}
        training = {"steps": 200, "batch": 8, "compile": False, "lr": 1e-3, "precision": precision, "spike": 0.0}
        trainer = run.make_trainer(build_recipe({"model": shape, "training": training}), learnable(), cuda)[1]
        losses: list[float] = []
        inner = trainer.fast_objective

        def watched(*inputs: object) -> object:
            loss, state = inner(*inputs)
            losses.append(float(loss.detach()))
            return loss, state

        trainer.fast_objective = watched
        with forced(form):
            for _ in range(200):
                trainer.take_step()
        return np.array(losses)

    cuda = torch.device("cuda")
    exact, wide, fused = curve("reference", "float32"), curve("reference", "bfloat16"), curve("fused", "bfloat16")
    assert exact[-20:].mean() < 0.7 * exact[:5].mean()
    noise = np.abs(wide - exact)[20:].mean()
    assert np.abs(fused - exact)[20:].mean() < 2 * noise + 1e-3


def learnable(tokens: int = 400_000) -> Encoded:
    """A text in which each token follows from the two before it, nine times in ten."""
    draw = np.random.default_rng(0)
    after, ids = draw.integers(0, 32, (32, 32)), draw.integers(0, 32, tokens)
    surprise = draw.random(tokens) < 0.1
    for place in range(2, tokens):
        if not surprise[place]:
            ids[place] = after[ids[place - 2], ids[place - 1]]
    return Encoded("pairs", "train", ids.astype(np.uint8), np.array([0]), ByteTokenizer(), "e" * 64, tokens)
