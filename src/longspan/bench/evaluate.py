"""Scoring with a memory against a sliding window (Dai et al. 2019, table 9).

Ours reads segments with same_length, so every target has exactly the attention length before it; the rival is a
vanilla Transformer of the same size, which reads a whole window for every target, at the batch that suits it best.
"""

from collections.abc import Iterator

import torch

from longspan.bench.timing import Line, Preset, attention_flops, dense_flops, seconds
from longspan.contract import LanguageModel
from longspan.models.families import build

BATCHES = (1, 4, 16, 64)


def measure(preset: Preset, device: torch.device, dtype: torch.dtype) -> Iterator[Line]:
    segment = preset.segment
    for length in preset.lengths:
        torch.manual_seed(0)
        changes = {"memory": length, "same_length": True, "segment": segment}
        ours = build("transformer-xl", {**preset.model, **changes}).to(device, dtype).eval()
        theirs = build("vanilla", {**preset.model, "segment": length}).to(device, dtype).eval()
        with torch.inference_mode(), ours.fixed_weights(), theirs.fixed_weights():
            fast = segment / _read(ours, segment, length, device)
            slow, batch = max((b / _slide(theirs, b, length, device), b) for b in BATCHES)
        by_ours = dense_flops(ours.parameter_count) + attention_flops(ours.config, length, 3)
        by_theirs = length * (dense_flops(theirs.parameter_count) + attention_flops(theirs.config, (length + 1) / 2, 2))
        yield Line(
            f"attention length {length}, segments of {segment}",
            f"sliding window, batch {batch}",
            "tokens/s",
            fast,
            slow,
            fast * by_ours / 1e12,
            slow * by_theirs / 1e12,
            by_theirs / by_ours,
        )


def _read(model: LanguageModel, segment: int, length: int, device: torch.device) -> float:
    """Seconds for a segment once the memory is full."""
    ids = torch.randint(model.config.vocabulary, (1, segment + 1), device=device)
    state = model.initial_state(1)
    for _ in range(-(-length // segment)):
        _, state = model.losses(ids[:, :-1], ids[:, 1:], state)
    return seconds(lambda: model.losses(ids[:, :-1], ids[:, 1:], state), device)


def _slide(model: LanguageModel, batch: int, length: int, device: torch.device) -> float:
    """Seconds for a batch of windows, the last position of each scored."""
    ids = torch.randint(model.config.vocabulary, (batch, length + 1), device=device)
    state = model.initial_state(batch)

    return seconds(lambda: model.next_losses(ids[:, :-1], ids[:, -1], state), device, rounds=3)
