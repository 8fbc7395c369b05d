"""Universal Transformer (Dehghani et al. 2018): one block, applied as often as needed. docs/universal.md

For step t, until a position halts or `steps` are taken:

    x = s + P + P_t                        sinusoids of the place in the document and of the step
    p = sigmoid(x . v + b)                 halting probability, adaptive computation time (Graves 2016)
    s <- block(x)                          where the position still runs; a halted one keeps s and is still attended to
    output <- output + w_t s               w_t = p, at the last step what is left to 1

    training loss = mean loss + ponder * mean(steps + remainder)
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from longspan.contract import State
from longspan.layers.model_config import require
from longspan.layers.ponder import Ponder
from longspan.layers.positions import place_in_document, place_sinusoid
from longspan.layers.transformer import TransformerConfig, TransformerLayer, initialise
from longspan.memory.window import WithoutMemory
from longspan.shapes import Bool, Float, Int, Tensor


@dataclass(frozen=True, kw_only=True)
class UniversalConfig(TransformerConfig):
    """`layers` make up the block, one as in the paper; it is applied at most `steps` times."""

    layers: int = 1
    steps: int = 6
    threshold: float = 0.99
    ponder: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.steps >= 1, f"model.steps={self.steps} must be at least 1")
        require(0 < self.threshold <= 1, f"model.threshold={self.threshold} must lie above 0 and not above 1")
        require(self.ponder >= 0, f"model.ponder={self.ponder} must not be negative")


class Universal(WithoutMemory):
    Config: ClassVar[type] = UniversalConfig

    def __init__(self, config: UniversalConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = config.make_embedding()
        self.layers = nn.ModuleList(TransformerLayer(config) for _ in range(config.layers))
        self.halting = nn.Linear(config.width, 1)
        self.final_norm = config.make_final_norm()
        self.head = config.make_head(self.embedding)
        self.dropout = nn.Dropout(config.dropout)
        initialise(self)
        nn.init.ones_(self.halting.bias)  # as in the authors' code: few steps at first
        self._taken: list[Tensor] = []

    def facts(self) -> dict[str, Any]:
        """The mean of the steps taken by every position read outside training since the model was made."""
        if not self._taken:
            return {}
        steps, positions = torch.stack(self._taken).tolist()
        return {"mean_steps": steps / positions}

    def hidden_states(
        self, tokens: Int[Tensor, "B T"], state: State | None = None, starts: Bool[Tensor, "B T"] | None = None
    ) -> tuple[tuple[Tensor, ...], State]:
        """The embedding, what every position held after each step but the last, and the weighted sum over steps."""
        hidden, state, _ = self._read(tokens, state, starts)
        return hidden, state

    def training_loss(
        self,
        tokens: Int[Tensor, "B T"],
        targets: Int[Tensor, "B T"],
        state: State | None = None,
        progress: float | Tensor = 0.0,  # noqa: ARG002
        starts: Bool[Tensor, "B T"] | None = None,
    ) -> tuple[Float[Tensor, ""], State]:
        """The mean loss; in training also the cost of pondering."""
        hidden, state, ponder = self._read(tokens, state, starts)
        loss = self.head.losses(hidden[-1], targets).mean()
        return (loss + self.config.ponder * ponder.cost() if self.training else loss), state

    def _read(
        self, tokens: Int[Tensor, "B T"], state: State | None, starts: Bool[Tensor, "B T"] | None
    ) -> tuple[tuple[Tensor, ...], State, Ponder]:
        c, (B, T) = self.config, tokens.shape
        state, first_key = self.begin(tokens, state, starts)
        places = place_sinusoid(place_in_document(first_key, T, tokens.device), c.width)
        times = place_sinusoid(torch.arange(1, c.steps + 1, device=tokens.device)[:, None], c.width)
        s = self.dropout(self.embedding(tokens))
        ponder = Ponder(s.new_zeros(B, T, dtype=torch.promote_types(s.dtype, torch.float32)), c.threshold)
        hidden, output = [s], torch.zeros_like(s)
        for t in range(c.steps):
            x = s + (places + times[t]).to(s.dtype)
            running = ponder.running[..., None]
            counts = ponder.step(self._probability(x), last=t == c.steps - 1)
            s = torch.where(running, self._block(x, first_key), s)
            output = output + counts[..., None].to(s.dtype) * s
            hidden.append(s)
            if self._all_halted(ponder):
                break
        hidden += [s] * (c.steps + 1 - len(hidden))
        hidden[-1] = self.dropout(self.final_norm(output))
        if not self.training:
            self._note(ponder)
        return tuple(hidden), state, ponder

    def _probability(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T"]:
        """In float32 at least: sums of it are compared with a threshold near 1."""
        score = self.halting(x)[..., 0]
        return torch.sigmoid(score.to(torch.promote_types(score.dtype, torch.float32)))

    def _block(self, x: Float[Tensor, "B T D"], first_key: Int[Tensor, "B T"] | None) -> Float[Tensor, "B T D"]:
        layers: Any = self.layers
        for layer in layers:
            x = layer(x, *layer.keys_values(x), None, None, first_key)
        return x

    def _all_halted(self, ponder: Ponder) -> bool:
        """Whether the rest can be left out; a training step on a GPU does not wait to be told."""
        waits = not (self.training and ponder.running.is_cuda) and not torch.compiler.is_compiling()
        return waits and not bool(ponder.running.any())

    def _note(self, ponder: Ponder) -> None:
        new = [ponder.steps.detach().sum(), torch.full_like(ponder.steps[0, 0], ponder.steps.numel())]
        self._taken = [a + b for a, b in zip(self._taken, new, strict=True)] if self._taken else new
