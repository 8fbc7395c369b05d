"""A training step of Transformer-XL against the same model with rotary positions in place of the four-term score.

Data, loss, gradients and fused AdamW included; memory carried as hidden states and projected anew on both sides.
"""

from collections.abc import Iterator
from typing import Any

import torch

from longspan.bench.timing import Line, Preset, attention_flops, dense_flops, seconds
from longspan.contract import LanguageModel, State
from longspan.models.families import build
from longspan.shapes import Tensor

PLAIN = {"norm": "post", "norm_type": "layer", "final_norm": False, "activation": "relu", "biases": True}


def measure(preset: Preset, device: torch.device, dtype: torch.dtype, memories: tuple[int, ...] = ()) -> Iterator[Line]:
    """One line against the rival; with `memories`, a line for each against the first of them."""
    batch, segment, memory = preset.train
    if memories:
        batch = max(1, batch // 4)
        first: Line | None = None
        for longer in memories:
            line = _line(preset, batch, segment, longer, device, dtype, "transformer-xl", {})
            first = first or line
            growth = line.by_count / first.by_count
            yield Line(
                f"batch {batch}, segment {segment}, memory {longer}",
                f"memory {memories[0]}",
                "tokens/s",
                line.ours,
                first.ours,
                line.tflops,
                first.tflops,
                1 / growth,
                (line.memory_ratio or 0) / first.memory_ratio if first.memory_ratio else None,
            )
        return
    ours = _line(preset, batch, segment, memory, device, dtype, "transformer-xl", {})
    theirs = _line(preset, batch, segment, memory, device, dtype, "rotary", PLAIN)
    yield Line(
        f"batch {batch}, segment {segment}, memory {memory}",
        "rotary positions",
        "tokens/s",
        ours.ours,
        theirs.ours,
        ours.tflops,
        theirs.tflops,
        theirs.by_count / ours.by_count,
        ours.memory_ratio / theirs.memory_ratio if ours.memory_ratio and theirs.memory_ratio else None,
    )


def _line(
    preset: Preset,
    batch: int,
    segment: int,
    memory: int,
    device: torch.device,
    dtype: torch.dtype,
    family: str,
    more: dict,
) -> Line:
    """One family alone: `by_count` is operations per token, `memory_ratio` the peak in bytes."""
    torch._dynamo.reset()
    values = {**preset.model, "segment": segment, "memory": memory, **more}
    torch.manual_seed(0)
    model = build(family, values).to(device).train()
    step = Step(model, batch, device, dtype)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        for _ in range(3):
            step()
        torch.cuda.reset_peak_memory_stats()
    took = seconds(step, device)
    peak = float(torch.cuda.max_memory_allocated()) if device.type == "cuda" else None
    products = 3 if family == "transformer-xl" else 2
    both = {3: 11 / 3, 2: 7 / 2}[products]
    operations = 3 * dense_flops(model.parameter_count) + both * attention_flops(
        model.config, memory + (segment + 1) / 2, products
    )
    # Keys and values of the memory are projected anew at every step.
    operations += 3 * 4.0 * memory / segment * model.config.width**2 * model.config.layers
    rate = batch * segment / took
    return Line(family, "", "tokens/s", rate, rate, rate * operations / 1e12, 0.0, operations, peak)


class Step:
    """A training step on random tokens, compiled where the device gains by it."""

    def __init__(self, model: LanguageModel, batch: int, device: torch.device, dtype: torch.dtype) -> None:
        self.model, self.device, self.dtype = model, device, dtype
        c = model.config
        self.ids = torch.randint(c.vocabulary, (batch, c.segment + 1), device=device)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=2.5e-4, fused=True)
        hidden = tuple(torch.randn(batch, c.memory, c.width, device=device) for _ in range(c.layers))
        self.state = State(torch.full((batch,), c.memory, dtype=torch.int64, device=device), {"hidden": hidden})
        compiles = device.type == "cuda"
        self.loss: Any = torch.compile(self._loss, fullgraph=True, dynamic=False) if compiles else self._loss

    def _loss(self, tokens: Tensor, targets: Tensor, state: State) -> tuple[Tensor, State]:
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype == torch.bfloat16):
            return self.model.training_loss(tokens, targets, state, 0.0)

    def __call__(self) -> None:
        loss, self.state = self.loss(self.ids[:, :-1], self.ids[:, 1:], self.state)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
