"""The training objective, with locked dropout, weight dropout and activation checkpointing for any model."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from longspan.contract import LanguageModel, State
from longspan.nn.dropout import HashedDropout, LockedDropout
from longspan.nn.whole_batch import divided, division
from longspan.shapes import Float, Tensor
from longspan.training.optimizers import hidden_matrices
from longspan.training.recipe import TrainingConfig


def lock_dropout(model: nn.Module) -> None:
    """Replace every dropout of hidden states by a locked one: one mask per row for all positions of a segment."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Dropout):
                setattr(module, name, LockedDropout(child.p).train(child.training))


def hash_dropout(model: nn.Module) -> None:
    """Replace every dropout by one that is faster in compiled code. The masks differ, their distribution does not."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Dropout:
                setattr(module, name, HashedDropout(child.p).train(child.training))


def checkpoint_layers(model: LanguageModel) -> None:
    """Keep only each layer's inputs for the backward pass and recompute the rest."""
    for layer in getattr(model, "layers", ()):
        layer.forward = _recomputed(layer.forward)


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def recomputed(*inputs: Any) -> Any:
        if not torch.is_grad_enabled():  # scoring has no backward pass
            return forward(*inputs)
        here = division()
        if here is None:
            return checkpoint(forward, *inputs, use_reentrant=False)
        again = (contextlib.nullcontext(), divided(here))
        return checkpoint(forward, *inputs, use_reentrant=False, context_fn=lambda: again)

    return recomputed


class Objective(nn.Module):
    """The training loss as one module, with weight dropout if the recipe sets it.

    Weight dropout (DropConnect, Wan et al. 2013; Merity et al. 2018) drops entries of the hidden matrices, with a new
    mask at every call.
    """

    def __init__(self, model: LanguageModel, config: TrainingConfig) -> None:
        super().__init__()
        self.call = _Call(model)
        self.rate = config.weight_dropout
        matrices = hidden_matrices(model) if self.rate else set()
        self.dropped = {f"model.{name}": p for name, p in model.named_parameters() if name in matrices}

    def forward(
        self, tokens: Tensor, targets: Tensor, state: State, progress: float | Tensor, starts: Tensor | None
    ) -> tuple[Float[Tensor, ""], State]:
        inputs = (tokens, targets, state, progress, starts)
        if self.dropped:
            weights = {name: F.dropout(p, self.rate) for name, p in self.dropped.items()}
            loss, state = torch.func.functional_call(self.call, weights, inputs)
        else:
            loss, state = self.call(*inputs)
        # A memory may be a view of a larger tensor. A copy frees that tensor and always has the same strides, which
        # avoids recompilation.
        return loss, state.detach().map(torch.Tensor.contiguous)


class _Call(nn.Module):
    """`training_loss` as `forward`, because `functional_call` calls that."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, tokens: Tensor, targets: Tensor, state: State, progress: float | Tensor, starts: Tensor | None
    ) -> tuple[Float[Tensor, ""], State]:
        return self.model.training_loss(tokens, targets, state, progress, starts)
