"""Scoring with a memory against a sliding window (Dai et al. 2019, table 9).

Ours reads segments with same_length, so every target attends to exactly the attention length. The baseline is a vanilla
Transformer of the same size that computes a complete window for every target, at its best batch size.
"""

from collections.abc import Iterator

import torch

from longspan.contract import LanguageModel
from longspan.experiments.bench.timing import Line, Preset, attention_flops, dense_flops, seconds
from longspan.models.families import build
from longspan.reading import Reading

BATCHES = (1, 4, 16, 64)


def measure(preset: Preset, device: torch.device, dtype: torch.dtype) -> Iterator[Line]:
    segment = preset.segment
    for length in preset.lengths:
        torch.manual_seed(0)
        reading = Reading(segment=segment, memory=length, same_length=True)
        ours = build("transformer-xl", preset.model, reading).to(device, dtype).eval()
        theirs = build("vanilla", preset.model, Reading(segment=length)).to(device, dtype).eval()
        with torch.inference_mode():
            our_rate = segment / _segment_seconds(ours, segment, length, device)
            their_rate, batch = max((b / _window_seconds(theirs, b, length, device), b) for b in BATCHES)
        our_flops = dense_flops(ours.parameter_count) + attention_flops(ours.config, length, 3)
        their_flops = length * (
            dense_flops(theirs.parameter_count) + attention_flops(theirs.config, (length + 1) / 2, 2)
        )
        yield Line(
            f"attention length {length}, segments of {segment}",
            f"sliding window, batch {batch}",
            "tokens/s",
            our_rate,
            their_rate,
            our_rate * our_flops / 1e12,
            their_rate * their_flops / 1e12,
            their_flops / our_flops,
        )


def _segment_seconds(model: LanguageModel, segment: int, length: int, device: torch.device) -> float:
    """Seconds per segment with a full memory."""
    ids = torch.randint(model.config.vocabulary, (1, segment + 1), device=device)
    state = model.initial_state(1)
    for _ in range(-(-length // segment)):
        _, state = model.losses(ids[:, :-1], ids[:, 1:], state)
    return seconds(lambda: model.losses(ids[:, :-1], ids[:, 1:], state), device)


def _window_seconds(model: LanguageModel, batch: int, length: int, device: torch.device) -> float:
    """Seconds per batch of windows, with the last position of each scored."""
    ids = torch.randint(model.config.vocabulary, (batch, length + 1), device=device)
    state = model.initial_state(batch)
    return seconds(lambda: model.losses(ids[:, :-1], ids[:, -1:], state, last=1), device, rounds=3)
