"""The cost model of docs/scale.md: bytes on the wire and step times of data parallel training.

    python -m longspan.experiments.cost_model        prints the table of the page

Every GPU trains `tokens` tokens per step, however many GPUs there are. Assumptions are the constants of this file.
"""

import math
from dataclasses import dataclass

GPUS_PER_NODE = 8
NVLINK = 450e9
"""Bytes per second and direction of an H100 or H200 to the other GPUs of its node (NVIDIA data sheet: 900 GB/s both
directions)."""
NETWORK = 50e9
"""Bytes per second and direction of the network adapter of a GPU: 400 Gb/s InfiniBand, one per GPU (DGX H100)."""
ACHIEVED = 0.8
"""The share of a bandwidth that large collectives reach."""
LATENCY = 15e-6
"""Seconds per collective call and doubling of the number of GPUs."""
BUCKET = 25 * 2**20
"""Bytes of gradients per all-reduce of DDP, its default."""
SUSTAINED = 739_568 * (6 * 41_055_436 + 12 * 12 * 512 * 768.5)
"""FLOP/s of one H200: the measured 739,568 tokens/s of the 41M shape (benchmarks/results/2026-11-15-h200-train.json) by
the count of `training/utilisation.py`. Larger shapes are assumed to reach the same, which underestimates them."""
DDP_COST = 1.019
"""The step of one process with DDP against plain training: 48.0 and 47.1 ms, the 41M shape, compiled, batch 64."""
FSDP_HOST = 86.06e-3 / 13
"""Seconds that the host needs to launch a layer with FSDP2: an eager step of 12 layers (the 41M shape) and the rest,
86.06 ms at a batch of 22, where plain training takes 46.61 ms and the GPU waits for the host."""


@dataclass(frozen=True)
class Shape:
    """A model and its work per GPU and step."""

    name: str
    parameters: int
    layers: int
    width: int
    segment: int
    memory: int
    rows: int

    @property
    def tokens(self) -> int:
        return self.rows * self.segment

    @property
    def flops(self) -> float:
        """FLOPs per GPU and step."""
        keys = self.memory + (self.segment + 1) / 2
        return self.tokens * (6 * self.parameters + 12 * self.layers * self.width * keys)

    @property
    def compute(self) -> float:
        """Seconds of a step without communication."""
        return self.flops / SUSTAINED

    def alone(self, form: str) -> float:
        """Seconds of a step of one process that runs the code of `ddp` or `fsdp`."""
        return DDP_COST * self.compute if form == "ddp" else max(self.compute, FSDP_HOST * (self.layers + 1))


SHAPES = (
    Shape("41M", 41_055_436, 12, 512, 512, 512, 64),
    Shape("277M", 277_231_820, 24, 1024, 768, 768, 16),
    Shape("1.3B", 1_309_593_856, 24, 2048, 768, 768, 8),
)
SIZES = (8, 64, 1024)


@dataclass(frozen=True)
class Traffic:
    """What one GPU sends in a step: bytes to its node and to others, and the number of collective calls."""

    inside: float
    outside: float
    calls: int

    def seconds(self, gpus: int) -> float:
        """Time of the traffic alone. A collective goes through the node first, then each GPU exchanges its share."""
        wire = self.inside / (ACHIEVED * NVLINK) + self.outside / (ACHIEVED * NETWORK)
        return wire + self.calls * LATENCY * math.log2(gpus)


def spread(size: float, gpus: int) -> tuple[float, float]:
    """Bytes that one GPU sends inside and outside its node for an all-gather or reduce-scatter of `size` bytes."""
    local, nodes = min(gpus, GPUS_PER_NODE), max(1, gpus // GPUS_PER_NODE)
    return size * (local - 1) / local, size / local * (nodes - 1) / nodes


def ddp(shape: Shape, gpus: int) -> Traffic:
    """An all-reduce of float32 gradients: a reduce-scatter and an all-gather."""
    size = 4.0 * shape.parameters
    inside, outside = spread(size, gpus)
    return Traffic(2 * inside, 2 * outside, math.ceil(size / BUCKET))


def fsdp(shape: Shape, gpus: int) -> Traffic:
    """Weights in bfloat16 gathered forward and backward, and a reduce-scatter of float32 gradients, layer by layer."""
    size = (2.0 + 2.0 + 4.0) * shape.parameters
    inside, outside = spread(size, gpus)
    return Traffic(inside, outside, 3 * (shape.layers + 1))


def memory(shape: Shape, gpus: int, *, sharded: bool) -> float:
    """Bytes per GPU of weights, gradients and the two moments of AdamW, all float32. Activations come on top."""
    return 16.0 * shape.parameters / (gpus if sharded else 1)


def table() -> str:
    """The table of docs/scale.md. Efficiency is against plain training on one GPU, without overlap of communication and
    computation, and with full."""
    lines = [
        "| shape | GPUs | form | compute | step of one | sent in the node | sent to others | communication "
        "| efficiency | memory |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for shape in SHAPES:
        for gpus in SIZES:
            for name, traffic in (("ddp", ddp(shape, gpus)), ("fsdp", fsdp(shape, gpus))):
                spent, step = traffic.seconds(gpus), shape.alone(name)
                least = shape.compute / (step + spent)
                most = shape.compute / max(step, spent)
                held = memory(shape, gpus, sharded=name == "fsdp")
                lines.append(
                    f"| {shape.name} | {gpus:,} | {name} | {1000 * shape.compute:.0f} ms "
                    f"| {1000 * step:.0f} ms | {traffic.inside / 1e9:.2f} GB | {traffic.outside / 1e9:.2f} GB "
                    f"| {1000 * spent:.1f} ms | {least:.0%} to {most:.0%} | {held / 2**30:.2f} GiB |"
                )
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
