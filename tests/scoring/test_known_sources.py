"""Models trained on sources with a known answer: lags within the memory are learned, lags beyond a window are not."""

from typing import Any

import numpy as np
import pytest
import torch

from longspan.contract import LanguageModel
from longspan.data.synthetic import Copy, ExactLag, MarkedLag, SyntheticSource
from longspan.scoring.contexts import Passage, Subject, choose_targets, measure
from longspan.scoring.recl import ecl, recl
from longspan.scoring.score import Method, score
from tests.support import build

pytestmark = pytest.mark.slow

D = 12
SHAPE = {"width": 32, "heads": 2, "inner": 64, "segment": 8, "dropout": 0.0, "norm": "pre"}


def trained(
    family: str, source: SyntheticSource, steps: int, lr: float = 1e-2, rows: int = 32, **values: Any
) -> LanguageModel:
    torch.manual_seed(0)
    model = build(family, SHAPE | {"vocabulary": source.vocabulary} | values).train()
    segment = model.reading.segment
    streams = [source.sample(steps * segment + 1, seed=row) for row in range(rows)]
    ids = torch.from_numpy(np.stack(streams))
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


def excess(model: LanguageModel, source: SyntheticSource, method: Method = "stream") -> float:
    """How far the loss on an unseen stream is above the entropy rate, as a share of it."""
    tokens, streams = (40_001, 8) if method == "stream" else (8001, 1)
    found = score(model, source.sample(tokens, seed=99), method=method, streams=streams)
    return found.nats / source.entropy_rate - 1


def test_a_lag_within_the_memory_is_learned_and_one_beyond_the_window_is_not() -> None:
    source = ExactLag(D)
    xl = trained("transformer-xl", source, 700, layers=1, memory=16)
    assert xl.reach() >= D > xl.reading.segment
    assert excess(xl, source) < 0.02
    window = trained("vanilla", source, 200, layers=1)
    assert window.reach() < D
    assert excess(window, source) > 0.5

    ids = source.sample(4000, seed=7)
    passage = Passage(ids, choose_targets(len(ids), 20, 400))
    table = measure([Subject("xl", xl)], passage, range(4, 21, 4))
    assert ecl(table)["xl"].tokens == D


@pytest.mark.torture
def test_copying_is_learned_across_segments() -> None:
    source = Copy(6, symbols=8)
    xl = trained("transformer-xl", source, 900, 5e-3, layers=2, memory=16)
    assert excess(xl, source) < 0.02
    window = trained("vanilla", source, 200, 5e-3, layers=2, segment=4)
    assert window.reach() < source.d
    assert excess(window, source, "sliding") > 0.5


def test_all_marked_lags_are_learned_and_recl_finds_the_longest() -> None:
    source = MarkedLag(5, symbols=16)
    xl = trained("transformer-xl", source, 600, 4e-3, 64, layers=1, width=64, segment=16, memory=8)
    assert excess(xl, source) < 0.02
    window = trained("vanilla", source, 200, 4e-3, 64, layers=1, width=64, segment=4)
    assert window.reach() < source.d
    assert excess(window, source, "sliding") > 0.05

    ids = source.sample(7 * 600, seed=7)
    targets = source.targets(len(ids))
    passage = Passage(ids, targets[targets >= 12])
    table = measure([Subject("xl", xl)], passage, range(1, 13))
    for share in (0.1, 0.5, 1.0):
        assert abs(recl(table, share)["xl"].tokens - source.d) <= 1
