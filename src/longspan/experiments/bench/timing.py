"""Shared by all benchmarks: presets, timing, and a line of the result table."""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from longspan.errors import UnknownNameError


@dataclass(frozen=True)
class Preset:
    """A model shape and the sizes to measure."""

    model: dict[str, Any]
    attention: tuple[tuple[int, int], ...]  # memory, batch
    train: tuple[int, int, int]  # batch, segment, memory
    lengths: tuple[int, ...]  # attention lengths in evaluation
    segment: int  # segment in evaluation
    generate: tuple[tuple[int, int], ...]  # batch, memory
    texts: tuple[int, ...]  # text lengths for `bench families`


def _shape(vocabulary: int, layers: int, width: int, heads: int) -> dict[str, Any]:
    sizes = {"vocabulary": vocabulary, "layers": layers, "width": width, "heads": heads, "inner": 4 * width}
    return {**sizes, "dropout": 0.0}


PRESETS = {
    "enwik8": Preset(
        _shape(205, 12, 512, 8),
        attention=((512, 64), (2048, 64), (8192, 16)),
        train=(64, 512, 512),
        lengths=(800, 1800, 2800, 3800),
        segment=32768,
        generate=((1, 1600), (64, 512)),
        texts=(1024, 2048, 4096, 8192, 16384, 32768, 65536),
    ),
    "small": Preset(
        _shape(256, 4, 128, 4),
        attention=((128, 4), (512, 4)),
        train=(8, 64, 64),
        lengths=(128, 256),
        segment=128,
        generate=((1, 256), (8, 64)),
        texts=(256, 512, 1024, 2048),
    ),
}


def preset(name: str | None, device: torch.device) -> tuple[str, Preset]:
    name = name or ("enwik8" if device.type == "cuda" else "small")
    if name not in PRESETS:
        raise UnknownNameError("preset", name, PRESETS)
    return name, PRESETS[name]


@dataclass(frozen=True)
class Line:
    """Our speed against a baseline's.

    `ratio` is our speed over theirs, `by_count` the ratio that operation counts alone would give (it exposes a weak
    baseline), `share` is ratio / by_count.
    """

    what: str
    rival: str
    unit: str
    ours: float
    theirs: float
    tflops: float
    their_tflops: float
    by_count: float
    memory_ratio: float | None = None

    @property
    def ratio(self) -> float:
        return self.ours / self.theirs

    def facts(self) -> dict[str, Any]:
        return {**asdict(self), "ratio": self.ratio, "share": self.ratio / self.by_count}


def seconds(call: Callable[[], Any], device: torch.device, least: float = 0.3, rounds: int = 5) -> float:
    """Median seconds per call over some rounds of at least `least` seconds each, after a warm-up."""
    for _ in range(2):
        call()
    repeat = max(1, round(least / max(timed(call, 1, device), 1e-6)))
    return statistics.median(timed(call, repeat, device) for _ in range(rounds))


def timed(call: Callable[[], Any], repeat: int, device: torch.device) -> float:
    """Mean seconds per call over `repeat` calls."""
    wait(device)
    began = time.perf_counter()
    for _ in range(repeat):
        call()
    wait(device)
    return (time.perf_counter() - began) / repeat


def busy_seconds(call: Callable[[], Any], device: torch.device) -> float | None:
    """Busy time of the GPU during a call, without waits for the host; None on a CPU."""
    if device.type != "cuda":
        return None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        call()
        wait(device)
    return sum(event.self_device_time_total for event in profile.key_averages()) / 1e6


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def dense_flops(parameters: int) -> float:
    """Forward operations per token: a multiplication and an addition per weight."""
    return 2.0 * parameters


def attention_flops(config: Any, keys: float, products: int) -> float:
    """Forward operations per token for this many keys: two products for a plain score, three for four terms."""
    return 2.0 * products * keys * config.heads * config.head_size * config.layers


def training_attention_flops(config: Any, keys: float, products: int) -> float:
    """Forward and backward operations: 7 products for a plain score, 11 for the four-term score."""
    return {2: 7 / 2, 3: 11 / 3}[products] * attention_flops(config, keys, products)
