"""Two ways to drop that no family has to know of: the same units at every position, and weights instead of units."""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from longspan.contract import LanguageModel, State
from longspan.layers.dropout import LockedDropout
from longspan.shapes import Float, Tensor
from longspan.training.optimizers import hidden_matrices
from longspan.training.recipe import TrainingConfig


def lock_dropout(model: nn.Module) -> None:
    """Turn every dropout of hidden states into a locked one; neither has weights, so nothing else changes."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Dropout):
                setattr(module, name, LockedDropout(child.p))


def checkpoint_layers(model: LanguageModel) -> None:
    """Keep only the inputs of each layer for the backward pass and compute the rest again."""
    for layer in getattr(model, "layers", ()):
        layer.forward = _recomputed(layer.forward)


def _recomputed(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def recomputed(*inputs: object) -> Tensor:
        # While scoring there is no backward pass to save for.
        return checkpoint(forward, *inputs, use_reentrant=False) if torch.is_grad_enabled() else forward(*inputs)

    return recomputed


class Objective(nn.Module):
    """What a step differentiates, as one module: the model's training loss, weights dropped where a recipe says so.

    Weight dropout (DropConnect, Wan et al. 2013; Merity et al. 2018) drops entries of the hidden matrices, anew at
    every call.
    """

    def __init__(self, model: LanguageModel, config: TrainingConfig) -> None:
        super().__init__()
        self.call = _Call(model)
        self.rate = config.weight_dropout
        matrices = hidden_matrices(model) if self.rate else set()
        self.dropped = {f"model.{name}": p for name, p in model.named_parameters() if name in matrices}

    def forward(
        self, tokens: Tensor, targets: Tensor, state: State, progress: float, starts: Tensor | None
    ) -> tuple[Float[Tensor, ""], State]:
        inputs = (tokens, targets, state, progress, starts)
        if self.dropped:
            weights = {name: F.dropout(p, self.rate) for name, p in self.dropped.items()}
            loss, state = torch.func.functional_call(self.call, weights, inputs)
        else:
            loss, state = self.call(*inputs)
        # A memory may be the end of a larger tensor: a copy lets that one go, and always has the same strides, which
        # a compiled graph counts on.
        return loss, state.detach().map(torch.Tensor.contiguous)


class _Call(nn.Module):
    """`training_loss` as a forward, which is what `functional_call` calls."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, tokens: Tensor, targets: Tensor, state: State, progress: float, starts: Tensor | None
    ) -> tuple[Float[Tensor, ""], State]:
        return self.model.training_loss(tokens, targets, state, progress, starts)
