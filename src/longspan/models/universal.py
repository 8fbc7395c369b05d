"""Universal Transformer (Dehghani et al. 2018): one block, applied as often as needed. docs/universal.md

For step t, until a position halts or `steps` are taken:

    x = s + P + P_t                        sinusoids of the position in the document and of the step
    p = sigmoid(x . v + b)                 halting probability, adaptive computation time (Graves 2016)
    s <- block(x)                          for running positions; halted ones keep s and are still attended to
    output <- output + w_t s               w_t = p; at the last step the remainder to 1

    training loss = mean loss + ponder * mean(steps + remainder)
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from longspan.cache import SegmentMask
from longspan.contract import State
from longspan.nn.model_config import require
from longspan.nn.ponder import Ponder
from longspan.nn.positions import position_in_document, position_sinusoid
from longspan.nn.transformer import TransformerConfig, TransformerLayer, initialise
from longspan.nn.whole_batch import division, sum_over_batch
from longspan.nn.window_transformer import WindowModel
from longspan.shapes import Bool, Float, Int, Tensor


@dataclass(frozen=True, kw_only=True)
class UniversalConfig(TransformerConfig):
    """The block has `layers` layers, one in the paper, and is applied at most `steps` times. `ponder` weighs the cost
    of steps."""

    layers: int = 1
    steps: int = 6
    threshold: float = 0.99
    ponder: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.steps >= 1, f"model.steps={self.steps} must be at least 1")
        require(0 < self.threshold <= 1, f"model.threshold={self.threshold} must be above 0 and at most 1")
        require(self.ponder >= 0, f"model.ponder={self.ponder} must not be negative")

    @property
    def feature_widths(self) -> list[int]:
        """The widths of the embedding and of the state after every step."""
        return [self.width] * (self.steps + 1)


class Universal(WindowModel):
    Config: ClassVar[type] = UniversalConfig

    def __init__(self, config: UniversalConfig) -> None:
        super().__init__(config)
        self.embedding = config.make_embedding()
        self.layers = nn.ModuleList(TransformerLayer(config) for _ in range(config.layers))
        self.halting = nn.Linear(config.width, 1)
        self.final_norm = config.make_final_norm()
        self.head = config.make_head(self.embedding)
        self.dropout = nn.Dropout(config.dropout)
        initialise(self)
        nn.init.ones_(self.halting.bias)  # as in the authors' code, so that training starts with few steps
        self._step_counts: list[Tensor] = []

    def facts(self) -> dict[str, Any]:
        """The mean number of steps per position, over everything read outside training."""
        if not self._step_counts:
            return {}
        steps, positions = torch.stack(self._step_counts).tolist()
        return {"mean_steps": steps / positions}

    def hidden_states(
        self, tokens: Int[Tensor, "B T"], state: State | None = None, starts: Bool[Tensor, "B T"] | None = None
    ) -> tuple[tuple[Tensor, ...], State]:
        """The embedding, the state after each step except the last, and the weighted sum over steps."""
        hidden, state, _ = self._run_layers(tokens, state, starts)
        return hidden, state

    def training_loss(
        self,
        tokens: Int[Tensor, "B T"],
        targets: Int[Tensor, "B S"],
        state: State | None = None,
        progress: float | Tensor = 0.0,  # noqa: ARG002
        starts: Bool[Tensor, "B T"] | None = None,
    ) -> tuple[Float[Tensor, ""], State]:
        """The mean loss; in training also the cost of pondering."""
        hidden, state, ponder = self._run_layers(tokens, state, starts)
        loss = self.head.losses(hidden[-1][:, -targets.shape[1] :], targets, state.reading.temperature).mean()
        return (loss + self.config.ponder * ponder.cost() if self.training else loss), state

    def _run_layers(
        self, tokens: Int[Tensor, "B T"], state: State | None, starts: Bool[Tensor, "B T"] | None
    ) -> tuple[tuple[Tensor, ...], State, Ponder]:
        c, (B, T) = self.config, tokens.shape
        state, mask = self.begin(tokens, state, starts)
        positions = position_sinusoid(position_in_document(mask.first_key, T, tokens.device), c.width)
        times = position_sinusoid(torch.arange(1, c.steps + 1, device=tokens.device)[:, None], c.width)
        s = self.dropout(self.embedding(tokens))
        ponder = Ponder(s.new_zeros(B, T, dtype=torch.promote_types(s.dtype, torch.float32)), c.threshold)
        hidden, output = [s], torch.zeros_like(s)
        for t in range(c.steps):
            x = s + (positions + times[t]).to(s.dtype)
            running = ponder.running[..., None]
            weights = ponder.step(self._probability(x), last=t == c.steps - 1)
            s = torch.where(running, self._block(x, mask), s)
            output = output + weights[..., None].to(s.dtype) * s
            hidden.append(s)
            if self._all_halted(ponder):
                break
        hidden += [s] * (c.steps + 1 - len(hidden))
        hidden[-1] = self.dropout(self.final_norm(output))
        if not self.training:
            self._count_steps(ponder)
        return tuple(hidden), state, ponder

    def _probability(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T"]:
        """At least float32, because its sums are compared with a threshold near 1."""
        score = self.halting(x)[..., 0]
        return torch.sigmoid(score.to(torch.promote_types(score.dtype, torch.float32)))

    def _block(self, x: Float[Tensor, "B T D"], mask: SegmentMask) -> Float[Tensor, "B T D"]:
        for layer in self.layers:
            x, _ = layer(x, None, mask)
        return x

    def _all_halted(self, ponder: Ponder) -> bool:
        """Whether the remaining steps can be skipped. Training on a GPU does not check, to avoid a sync."""
        checks = not (self.training and ponder.running.is_cuda) and not torch.compiler.is_compiling()
        return checks and not bool(sum_over_batch(ponder.running.sum(), division()))

    def _count_steps(self, ponder: Ponder) -> None:
        new = [ponder.steps.detach().sum(), torch.full_like(ponder.steps[0, 0], ponder.steps.numel())]
        self._step_counts = [a + b for a, b in zip(self._step_counts, new, strict=True)] if self._step_counts else new
