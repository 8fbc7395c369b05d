"""A training step of Transformer-XL against the same model with rotary positions instead of the four-term score.

Includes data, loss, gradients and fused AdamW. Both carry hidden states as memory and project them at every step.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from longspan.contract import LanguageModel, State
from longspan.cuda_graphs import CapturedStep, Work, is_capturing
from longspan.experiments.bench.timing import Line, Preset, dense_flops, seconds, training_attention_flops
from longspan.models.families import build
from longspan.reading import Reading
from longspan.shapes import Tensor

POST_NORM: dict[str, Any] = {
    "norm": "post",
    "norm_type": "layer",
    "final_norm": False,
    "activation": "relu",
    "biases": True,
}


@dataclass(frozen=True)
class StepCost:
    """One model: tokens per second, operations per token, and peak bytes on CUDA."""

    rate: float
    operations: float
    peak: int | None

    @property
    def tflops(self) -> float:
        return self.rate * self.operations / 1e12

    def against(self, rival: "StepCost", what: str, rival_name: str) -> Line:
        return Line(
            what,
            rival_name,
            "tokens/s",
            self.rate,
            rival.rate,
            self.tflops,
            rival.tflops,
            rival.operations / self.operations,
            self.peak / rival.peak if self.peak and rival.peak else None,
        )


def measure(
    preset: Preset,
    device: torch.device,
    dtype: torch.dtype,
    memories: tuple[int, ...] = (),
    segments: tuple[int, ...] = (),
) -> Iterator[Line]:
    """One line against the baseline. With `memories` or `segments`, one line per length against the first length."""
    batch, segment, memory = preset.train

    def cost(family: str, shape: tuple[int, int, int], *, captured: bool = False, **more: Any) -> StepCost:
        batch, segment, memory = shape
        reading = Reading(segment=segment, memory=memory)
        return _step_cost(family, {**preset.model, **more}, reading, batch, device, dtype, captured)

    if not memories and not segments:
        ours, rival = cost("transformer-xl", preset.train), cost("rotary", preset.train, **POST_NORM)
        yield ours.against(rival, f"batch {batch}, segment {segment}, memory {memory}", "rotary positions")
        return
    few = max(1, batch // 4)  # every row holds a long memory
    shapes = [(few, segment, longer) for longer in memories]
    shapes += [(max(1, few * segment // longer), longer, memory) for longer in segments]  # the same number of tokens
    first: StepCost | None = None
    for batch, segment, memory in shapes:
        name = f"batch {batch}, segment {segment}, memory {memory}"
        # Captured: a short step needs as many launches as a long one, which would hide the growth.
        ours = cost("transformer-xl", (batch, segment, memory), captured=True)
        if first is None:
            first, shortest = ours, name
        yield ours.against(first, name, shortest)


def _step_cost(
    family: str,
    values: dict[str, Any],
    reading: Reading,
    batch: int,
    device: torch.device,
    dtype: torch.dtype,
    captured: bool,
) -> StepCost:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = build(family, values, reading).to(device).train()
    step = Step(model, batch, device, dtype, captured)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        step()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(2):
            step()
    # Before timing: a replay uses memory that was allocated at the capture.
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
    time = seconds(step, device)
    c, products = model.config, 3 if family == "transformer-xl" else 2
    operations = 3 * dense_flops(model.parameter_count)
    operations += training_attention_flops(c, reading.memory + (reading.segment + 1) / 2, products)
    # Keys and values of the memory are projected again at every step.
    operations += 3 * 4.0 * reading.memory / reading.segment * c.width**2 * c.layers
    return StepCost(batch * reading.segment / time, operations, peak)


class Step:
    """A training step on random tokens, compiled on CUDA and optionally captured in a CUDA graph."""

    def __init__(
        self, model: LanguageModel, batch: int, device: torch.device, dtype: torch.dtype, captured: bool
    ) -> None:
        self.model, self.device, self.dtype = model, device, dtype
        c, reading = model.config, model.reading
        self.ids = torch.randint(c.vocabulary, (batch, reading.segment + 1), device=device)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=2.5e-4, fused=True)
        empty = model.initial_state(batch, filled=True)
        random = empty.map(lambda t: torch.randn_like(t) if t.is_floating_point() else t + reading.memory)
        self.states = [replace(random, full=True)]
        self.step: Work = CapturedStep(self._work) if captured and device.type == "cuda" else self._work
        compiles = device.type == "cuda"
        self.loss: Any = torch.compile(self._loss, fullgraph=True, dynamic=False) if compiles else self._loss

    def _loss(self, tokens: Tensor, targets: Tensor, state: State) -> tuple[Tensor, State]:
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype == torch.bfloat16):
            return self.model.training_loss(tokens, targets, state, 0.0)

    def _work(self, states: list[State], tokens: Tensor, targets: Tensor) -> tuple[Tensor, list[State]]:
        loss, state = self.loss(tokens, targets, states[0])
        loss.backward()
        self.optimizer.param_groups[0]["capturable"] = is_capturing(loss)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach(), [state]

    def __call__(self) -> None:
        _, self.states = self.step(self.states, self.ids[:, :-1], self.ids[:, 1:])
