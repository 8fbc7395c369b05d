"""Gradients over several processes: replicated weights (DDP) or sharded ones (FSDP2)."""

import contextlib
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from longspan.contract import LanguageModel
from longspan.nn.whole_batch import Division, divided
from longspan.training.processes import Processes

Objective = Callable[..., Any]
POSITION_KEYS = ("distances", "position")
"""Parts of a layer that the model calls before the layer."""
ENTRIES = ("training_loss", "losses", "hidden_states", "initial_state", "scores", "choose_tags")
"""Methods of a model that the trainer and observers call. The last two are those of a TaskModel."""


class Parallel:
    """The objective of a run, eager and compiled, with gradients that are means over all processes."""

    def __init__(
        self, objective: nn.Module, fast: Any, model: LanguageModel, processes: Processes, device: torch.device
    ) -> None:
        self.eager: Objective = objective
        self.fast: Objective = fast
        self.sharded: Any = model if hasattr(model, "set_requires_gradient_sync") else None
        self.replica: DistributedDataParallel | None = None
        self.division: Division | None = None
        if not processes.distributed:
            return
        # Masks of the whole batch cost as many draws as there are processes. On a GPU every process draws its own.
        same_masks = device.type == "cpu"
        self.division = Division(processes.rank, processes.size, processes.counting, same_masks)
        if self.sharded is not None:
            return
        # Some steps use some weights only, for example a softmax without words of a cluster. This also keeps the order
        # of gradients in their buckets, and with it that of the sums, the same after a resume.
        both = _Both(objective, fast)
        with warnings.catch_warnings():
            # The new name of the option for buffers, which are constants here, is not in torch 2.11.
            warnings.simplefilter("ignore", FutureWarning)
            # Gradients are views of the buckets that are exchanged, which saves a copy of all of them.
            self.replica = DistributedDataParallel(
                both, find_unused_parameters=True, broadcast_buffers=False, gradient_as_bucket_view=True
            )
        self.eager = partial(self.replica, False)
        self.fast = self.eager if fast is objective else partial(self.replica, True)

    @contextlib.contextmanager
    def part(self, last: bool) -> Any:
        """Around the forward and backward pass of a part of a batch. Gradients are exchanged after the last one."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(divided(self.division))
            if self.replica is not None and not last:
                stack.enter_context(self.replica.no_sync())
            if self.sharded is not None:
                self.sharded.set_requires_gradient_sync(last)
            yield


def shard(model: LanguageModel, processes: Processes, precision: torch.dtype) -> None:
    """Shard the weights with FSDP2, layer by layer. They are gathered in the precision of a step."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    narrow = torch.bfloat16 if precision == torch.bfloat16 else None
    policy = MixedPrecisionPolicy(narrow, torch.float32 if narrow else None, cast_forward_inputs=False)
    layers: Any = getattr(model, "layers", ()) if model.hints.shard_layers else ()
    for layer in layers:
        for name, part in layer.named_children():
            if name in POSITION_KEYS and next(part.parameters(), None) is not None:
                fully_shard(part, mesh=processes.mesh, mp_policy=policy)
        fully_shard(layer, mesh=processes.mesh, mp_policy=policy)
    fully_shard(model, mesh=processes.mesh, mp_policy=policy, reshard_after_forward=False)
    if model.config.cutoffs:
        model.training_loss = _touching(model)  # type: ignore[method-assign]
    entered = [False]
    for name in ENTRIES:
        if not hasattr(model, name):
            continue
        plain = getattr(model, name)
        register_fsdp_forward_method(model, name)
        setattr(model, name, _entry(plain, getattr(model, name), entered))


def _entry(plain: Objective, gathering: Objective, entered: list[bool]) -> Objective:
    """A method that gathers the weights, unless another one that has done so calls it."""

    def call(*inputs: Any, **options: Any) -> Any:
        if entered[0]:
            return plain(*inputs, **options)
        entered[0] = True
        try:
            return gathering(*inputs, **options)
        finally:
            entered[0] = False

    return call


def _touching(model: LanguageModel) -> Objective:
    """The training loss with a gradient of zero for every weight outside the layers.

    A cluster of the softmax may have no words in the rows of a process, and FSDP needs gradients of the same weights in
    all processes.
    """
    training_loss = model.training_loss
    layers = {id(layer) for layer in getattr(model, "layers", ())}
    inner = tuple(f"{name}." for name, module in model.named_modules() if id(module) in layers)

    def touching(*inputs: Any) -> Any:
        loss, state = training_loss(*inputs)
        outside = [p for name, p in model.named_parameters() if p.requires_grad and not name.startswith(inner)]
        return loss + 0.0 * sum(p.flatten()[0] for p in outside), state

    return touching


class _Both(nn.Module):
    """Both forms of the objective as one module, because DDP must see every backward pass of the weights."""

    def __init__(self, objective: nn.Module, fast: Any) -> None:
        super().__init__()
        self.eager, self.fast = objective, fast

    def forward(self, fast: bool, *inputs: Any) -> Any:
        return self.fast(*inputs) if fast else self.eager(*inputs)
