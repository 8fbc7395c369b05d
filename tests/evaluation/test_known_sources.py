"""Trained models on sources whose answer is known: what a memory reaches is learnt, what a window cuts off is not."""

from typing import Any

import numpy as np
import pytest
import torch

from longspan.contract import LanguageModel
from longspan.data.synthetic import Copy, ExactLag, MarkedLag, SyntheticSource
from longspan.evaluation.contexts import Passage, Subject, choose_targets, measure
from longspan.evaluation.likelihood import Tally, sliding_losses, stream_losses
from longspan.evaluation.recl import ecl, recl
from longspan.models.families import build

pytestmark = pytest.mark.slow

D = 12
SHAPE = {"width": 32, "heads": 2, "inner": 64, "segment": 8, "dropout": 0.0, "norm": "pre", "final_norm": True}


def trained(
    family: str, source: SyntheticSource, steps: int, lr: float = 1e-2, rows: int = 32, **values: Any
) -> LanguageModel:
    torch.manual_seed(0)
    model = build(family, SHAPE | {"vocabulary": source.vocabulary} | values).train()
    segment = model.config.segment
    lanes = [source.sample(steps * segment + 1, seed=row) for row in range(rows)]
    ids = torch.from_numpy(np.stack(lanes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps, pct_start=0.1)
    state = model.initial_state(rows)
    for step in range(steps):
        piece = ids[:, step * segment : (step + 1) * segment + 1]
        loss, state = model.training_loss(piece[:, :-1], piece[:, 1:], state)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model.eval()


def excess(model: LanguageModel, source: SyntheticSource) -> float:
    """How far above the entropy rate a model is on a stream it has not seen, as a share of it."""
    tally = Tally()
    for stretch in stream_losses(model, source.sample(40_001, seed=99), segment=model.config.segment, lanes=8):
        tally.add(stretch)
    return tally.mean / source.entropy_rate - 1


def test_a_memory_that_covers_the_lag_learns_it_and_a_window_below_it_does_not() -> None:
    source = ExactLag(D)
    xl = trained("transformer-xl", source, 700, layers=1, memory=16)
    assert xl.reach >= D > xl.config.segment
    assert excess(xl, source) < 0.02
    window = trained("vanilla", source, 200, layers=1)
    assert window.reach < D
    assert excess(window, source) > 0.5

    ids = source.sample(4000, seed=7)
    passage = Passage(ids, choose_targets(len(ids), 20, 400))
    table = measure([Subject("xl", xl)], passage, range(4, 21, 4))
    assert ecl(table)["xl"].tokens == D


def excess_of_windows(model: LanguageModel, source: SyntheticSource) -> float:
    """The same for a model without memory at its best: a whole window before every token."""
    tally = Tally()
    for stretch in sliding_losses(model, source.sample(8001, seed=99), segment=model.config.segment):
        tally.add(stretch)
    return tally.mean / source.entropy_rate - 1


def test_copying_is_learnt_across_segments() -> None:
    source = Copy(6, symbols=8)
    xl = trained("transformer-xl", source, 900, 5e-3, layers=2, memory=16)
    assert excess(xl, source) < 0.02
    window = trained("vanilla", source, 200, 5e-3, layers=2, segment=4)
    assert window.reach < source.d
    assert excess_of_windows(window, source) > 0.5


def test_every_lag_that_a_mark_names_is_learnt_and_recl_finds_the_longest() -> None:
    source = MarkedLag(5, symbols=16)
    xl = trained("transformer-xl", source, 600, 4e-3, 64, layers=1, width=64, segment=16, memory=8)
    assert excess(xl, source) < 0.02
    window = trained("vanilla", source, 200, 4e-3, 64, layers=1, width=64, segment=4)
    assert window.reach < source.d
    assert excess_of_windows(window, source) > 0.05

    ids = source.sample(7 * 600, seed=7)
    targets = source.targets(len(ids))
    passage = Passage(ids, targets[targets >= 12])
    table = measure([Subject("xl", xl)], passage, range(1, 13))
    for share in (0.1, 0.5, 1.0):
        assert abs(recl(table, share)["xl"].tokens - source.d) <= 1
