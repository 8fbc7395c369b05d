"""A training step of Transformer-XL against the same model with rotary positions in place of the four-term score.

Data, loss, gradients and fused AdamW included; memory carried as hidden states and projected anew on both sides.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from longspan.bench.timing import Line, Preset, dense_flops, learnt_attention_flops, seconds
from longspan.contract import LanguageModel, State
from longspan.memory.recording import RecordedStep, Work, being_recorded
from longspan.models.families import build
from longspan.shapes import Tensor

POST: dict[str, Any] = {"norm": "post", "norm_type": "layer", "final_norm": False, "activation": "relu", "biases": True}


@dataclass(frozen=True)
class Measured:
    """One model alone: tokens per second, operations per token, and bytes at the peak where the device tells."""

    rate: float
    operations: float
    peak: int | None

    @property
    def tflops(self) -> float:
        return self.rate * self.operations / 1e12

    def against(self, rival: "Measured", what: str, who: str) -> Line:
        return Line(
            what,
            who,
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
    """One line against the rival; with `memories` or `segments`, a line for each against the first of them."""
    batch, segment, memory = preset.train

    def take(family: str, shape: tuple[int, int, int], *, recorded: bool = False, **more: Any) -> Measured:
        batch, segment, memory = shape
        values = {**preset.model, "segment": segment, "memory": memory, **more}
        return _measured(family, values, batch, device, dtype, recorded)

    if not memories and not segments:
        ours, rival = take("transformer-xl", preset.train), take("rotary", preset.train, **POST)
        yield ours.against(rival, f"batch {batch}, segment {segment}, memory {memory}", "rotary positions")
        return
    few = max(1, batch // 4)  # a long memory is held for every row
    shapes = [(few, segment, longer) for longer in memories]
    shapes += [(max(1, few * segment // longer), longer, memory) for longer in segments]  # as many tokens in all
    first: Measured | None = None
    for batch, segment, memory in shapes:
        name = f"batch {batch}, segment {segment}, memory {memory}"
        # Launches, of which a short step has as many as a long one, would hide how it grows.
        ours = take("transformer-xl", (batch, segment, memory), recorded=True)
        if first is None:
            first, shortest = ours, name
        yield ours.against(first, name, shortest)


def _measured(
    family: str, values: dict[str, Any], batch: int, device: torch.device, dtype: torch.dtype, recorded: bool
) -> Measured:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = build(family, values).to(device).train()
    step = Step(model, batch, device, dtype, recorded)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        step()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(2):
            step()
    # Before the clock runs: what a replay uses was allocated when it was recorded.
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
    took = seconds(step, device)
    c, products = model.config, 3 if family == "transformer-xl" else 2
    operations = 3 * dense_flops(model.parameter_count)
    operations += learnt_attention_flops(c, c.memory + (c.segment + 1) / 2, products)
    # Keys and values of the memory are projected anew at every step.
    operations += 3 * 4.0 * c.memory / c.segment * c.width**2 * c.layers
    return Measured(batch * c.segment / took, operations, peak)


class Step:
    """A training step on random tokens, compiled where the device gains by it, and recorded if asked for."""

    def __init__(
        self, model: LanguageModel, batch: int, device: torch.device, dtype: torch.dtype, recorded: bool
    ) -> None:
        self.model, self.device, self.dtype = model, device, dtype
        c = model.config
        self.ids = torch.randint(c.vocabulary, (batch, c.segment + 1), device=device)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=2.5e-4, fused=True)
        hidden = tuple(torch.randn(batch, c.memory, c.width, device=device) for _ in range(c.layers))
        full = torch.full((batch,), c.memory, dtype=torch.int64, device=device)
        self.states = [State(full, {"hidden": hidden}, whole=True)]
        self.take: Work = RecordedStep(self._work) if recorded and device.type == "cuda" else self._work
        compiles = device.type == "cuda"
        self.loss: Any = torch.compile(self._loss, fullgraph=True, dynamic=False) if compiles else self._loss

    def _loss(self, tokens: Tensor, targets: Tensor, state: State) -> tuple[Tensor, State]:
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype == torch.bfloat16):
            return self.model.training_loss(tokens, targets, state, 0.0)

    def _work(self, states: list[State], tokens: Tensor, targets: Tensor) -> tuple[Tensor, list[State]]:
        loss, state = self.loss(tokens, targets, states[0])
        loss.backward()
        self.optimizer.param_groups[0]["capturable"] = being_recorded(loss)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach(), [state]

    def __call__(self) -> None:
        _, self.states = self.take(self.states, self.ids[:, :-1], self.ids[:, 1:])
