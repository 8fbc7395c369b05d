"""A training step reads nothing that was not written: here new tensors are filled with NaN."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from longspan.kernels import relative_attention
from longspan.kernels.relative_attention import fused
from longspan.nn.attention import HeadNorm
from longspan.nn.transformer import TransformerLayer
from longspan.training.dropout import Objective, lock_dropout
from longspan.training.optimizers import Muon
from longspan.training.recipe_tables import TrainingConfig
from longspan.training.step import Step
from tests.kernels.test_fused import draw
from tests.support import build

pytest.importorskip("triton")
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here, not interpreted")
SHAPE = {"vocabulary": 12, "layers": 1, "width": 16, "heads": 1, "inner": 16, "segment": 5, "memory": 5}
DROPOUTS = {"dropout": 0.2, "attention_dropout": 0.2, "projection_dropout": 0.2, "embedding_dropout": 0.2}
PARTS = {"input_dropout": 0.6, "output_dropout": 0.5, "ar": 0.1, "tar": 0.1, "cutoffs": (8,), "shared_biases": True}


@pytest.fixture(autouse=True)
def _filled_with_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(1).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@interpreted
def test_the_first_step_of_a_run_is_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    """All kernels of training: attention with an empty memory and dropout, head norm, adaptive softmax, Muon (and
    AdamW)."""
    monkeypatch.setattr(TransformerLayer, "detached_memory", True)
    monkeypatch.setattr(HeadNorm, "fused", True)
    torch.manual_seed(1)
    model: Any = build("longspan-xl", SHAPE | DROPOUTS | PARTS)
    model.head.static = True
    config = TrainingConfig(steps=1, batch=2, segment=5, memory=5, optimizer="muon", clip=0.25)
    step = Step(model, config, torch.device("cpu"))
    model.train()
    lock_dropout(model)
    for part in step.optimizer.parts:
        if isinstance(part, Muon):
            part.fused = True
    tokens = torch.randint(12, (2, 6))
    states = [replace(model.initial_state(2, filled=True), full=False)]
    with relative_attention.forced("fused"):
        metrics, states = step(Objective(model, config), states, tokens[:, :-1], tokens[:, 1:], None, 0.0, 1.0)
    assert metrics.isfinite().all()
    assert metrics[2:].tolist() == [0.0, 0.0]
    assert all(tensor.isfinite().all() for tensor in states[0].tensors().values())
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.gpu
def test_a_first_segment_with_dropout_always_has_the_same_gradients() -> None:
    """The shape of `recipes/ptb-transformer-xl.toml`, with an empty memory; twenty times."""
    tensors = draw(20, 6, 70, 70, 64, None, "cuda", torch.bfloat16)
    first_key = torch.full((20, 70), 70, device="cuda")
    grad = torch.randn_like(tensors[0])
    found = []
    for _ in range(20):
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        out = fused.relative_attention(*leaves, first_key=first_key, dropout=0.2, seed=3)
        found.append([out.detach(), *torch.autograd.grad(out, leaves, grad)])
    for results in found:
        assert all(result.isfinite().all() for result in results)
        for n, result in enumerate(results):  # number 4 is a sum by atomics
            assert n == 4 or torch.equal(result, found[0][n])
