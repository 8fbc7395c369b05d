"""AdamW, Muon for the matrices between embedding and head, and plain SGD.

All take a flag on the device. If it is set, a step changes nothing: a gradient that is not finite never reaches the
weights, without a host sync.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from longspan.checkpoints.weights import copy_into, local, sharded_like
from longspan.contract import LanguageModel
from longspan.cuda_graphs import is_capturing
from longspan.kernels import muon
from longspan.kernels.muon import NEWTON_SCHULZ
from longspan.kernels.triton_works import TRITON_WORKS
from longspan.shapes import Float, Tensor
from longspan.training.depth import rate_factors
from longspan.training.processes import ALONE, Processes
from longspan.training.recipe import TrainingConfig

FACTOR = "layer_factor"
"""The key of a parameter group that multiplies its learning rate: lower layers may learn more slowly."""


def orthogonalise(matrices: Float[Tensor, "N R C"], steps: int = 5) -> Float[Tensor, "N R C"]:
    """Approximately U V^T for every matrix U S V^T, by the quintic Newton-Schulz iteration of Jordan et al. 2024.

    X <- a X + (b A + c A^2) X with A = X X^T drives all singular values to about 1. Matrices of one shape are batched,
    because one small product per matrix is launch-bound.
    """
    a, b, c = NEWTON_SCHULZ
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.transpose(1, 2) if tall else matrices
    if x.is_cuda and x.dtype != torch.float64:
        x = x.bfloat16()
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = torch.bmm(x, x.transpose(1, 2))
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.transpose(1, 2) if tall else x).to(matrices.dtype)


class Muon(torch.optim.Optimizer):
    """Orthogonalised momentum (Jordan et al. 2024): w <- w - lr sqrt(max(1, rows / columns)) orthogonalise(m).

    The momenta of parameters of one shape are slices of one tensor. `found_inf` is the flag on the device that blocks
    an update; fused AdamW reads it under the same name. Each of several processes orthogonalises its share of the
    matrices. `rows` are those of complete matrices, of which the parameters may be shards.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        *,
        processes: Processes = ALONE,
        rows: Sequence[int] | None = None,
    ) -> None:
        super().__init__(list(parameters), {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self.found_inf: Tensor | None = None
        self.processes = processes
        self.fused: bool | None = None
        """Whether to use the kernels of kernels/muon. Default: if all matrices suit them."""
        given = self.param_groups[0]["params"]
        shapes: dict[tuple[int, int], list[nn.Parameter]] = {}
        for parameter, count in zip(given, rows or [p.shape[0] for p in given], strict=True):
            shapes.setdefault((count, parameter.shape[1]), []).append(parameter)
        self.batches: list[tuple[int, list[nn.Parameter], Tensor]] = []
        for (count, _), parameters_here in shapes.items():
            momenta = torch.zeros_like(torch.stack([p.detach() for p in parameters_here]))
            for parameter, slot in zip(parameters_here, momenta, strict=True):
                self.state[parameter]["momentum"] = slot
            self.batches.append((count, parameters_here, momenta))

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        lr, momentum, decay = group["lr"], group["momentum"], group["weight_decay"]
        if self._suits_kernels() if self.fused is None else self.fused:
            self._fused_step(lr, momentum, decay)
            return
        for rows, parameters, momenta in self.batches:
            gradients = torch.stack([torch.zeros_like(p) if p.grad is None else p.grad for p in parameters])
            allow: Tensor | float = 1.0
            if self.found_inf is not None:
                # Set to zero first, because 0 * NaN is NaN.
                gradients.masked_fill_(self.found_inf.bool(), 0.0)
                allow = 1.0 - self.found_inf
            momenta.lerp_(gradients, allow * (1 - momentum))
            change = self._orthogonalise(gradients.lerp_(momenta, momentum), rows)
            change *= max(1.0, rows / change.shape[2]) ** 0.5
            weights = _without_frozen(parameters)
            if decay:
                change.add_(torch.stack(weights), alpha=decay)
            change *= allow * -lr
            torch._foreach_add_(weights, list[Tensor](change.unbind()))

    def _suits_kernels(self) -> bool:
        """Whether the kernels can be used: float32 matrices on one CUDA device, none of them narrow."""
        return (
            TRITON_WORKS
            and self.processes.size == 1
            and all(
                momenta.is_cuda and momenta.dtype == torch.float32 and min(momenta.shape[1:]) >= muon.SMALLEST
                for _, _, momenta in self.batches
            )
        )

    def _fused_step(self, lr: float | Tensor, momentum: float, decay: float) -> None:
        """The same step by the kernels of kernels/muon."""
        like = self.batches[0][2]
        batches = []
        for _, parameters, momenta in self.batches:
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad.contiguous() for p in parameters]
            batches.append(muon.Batch(_without_frozen(parameters), gradients, momenta))
        muon.step(
            batches,
            lr=lr.float() if isinstance(lr, Tensor) else like.new_full((), lr),  # a copy could not be captured
            momentum=momentum,
            decay=decay,
            blocked=like.new_zeros(()) if self.found_inf is None else self.found_inf,
            dtype=torch.bfloat16 if like.is_cuda else torch.float32,
        )

    def _orthogonalise(self, matrices: Float[Tensor, "N R C"], rows: int) -> Float[Tensor, "N R C"]:
        """`orthogonalise`, divided among the processes. Shards of rows go to the process of their matrix and back."""
        size, rank = self.processes.size, self.processes.rank
        if size == 1:
            return orthogonalise(matrices)
        count, own, columns = matrices.shape
        share = -(-count // size)
        padded = torch.cat([matrices, matrices.new_zeros(share * size - count, own, columns)])
        if own == rows:
            mine = orthogonalise(padded[rank * share :][:share])
            found = torch.empty_like(padded)
            dist.all_gather(list(found.chunk(size)), mine)
            return found[:count]
        parts = [min(max(rows - k * -(-rows // size), 0), -(-rows // size)) for k in range(size)]
        sizes = [share * part * columns for part in parts]
        arrived = padded.new_empty(sum(sizes))
        dist.all_to_all_single(arrived, padded.flatten(), output_split_sizes=sizes)
        pieces = [piece.view(share, -1, columns) for piece in arrived.split(sizes) if piece.numel()]
        mine = orthogonalise(torch.cat(pieces, dim=1))
        leaving = torch.cat([piece.flatten() for piece in mine.split(parts, dim=1)])
        found = torch.empty_like(padded)
        dist.all_to_all_single(found.view(-1), leaving, input_split_sizes=sizes)
        return found[:count]


def _without_frozen(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """The weights to update in place, with new tensors for frozen ones, which have no gradient and must not change."""
    return [torch.zeros_like(p) if p.grad is None else p.detach() for p in parameters]


TOKENS, CLASSES = ("embedding", "head"), ("next_sentence", "classifier")
"""Modules that map hidden states from or to tokens, and to classes."""


def hidden_matrices(model: LanguageModel) -> set[str]:
    """Names of the matrices that map hidden states to hidden states. Muon updates these."""
    return _matrices(model, without=(*TOKENS, *CLASSES))


def _matrices(model: LanguageModel, without: tuple[str, ...]) -> set[str]:
    """Names of matrices. Those of a language model are the same in a model of a task, where they begin with `base`."""
    return {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and not name.removeprefix("base.").startswith(without)
    }


def _groups(
    names: Mapping[nn.Parameter, str], decayed: set[nn.Parameter], factors: Mapping[str, float], config: TrainingConfig
) -> list[dict[str, Any]]:
    """Parameter groups: one for every weight decay and factor of the learning rate."""
    groups = []
    for decays in (True, False):
        for factor in sorted(set(factors.values())):
            own = [p for p, name in names.items() if (p in decayed) == decays and factors[name] == factor]
            if own:
                groups.append({"params": own, "weight_decay": config.weight_decay if decays else 0.0, FACTOR: factor})
    return groups


def _adamw(groups: list[dict[str, Any]], config: TrainingConfig) -> torch.optim.AdamW:
    """AdamW with its state, created now instead of at the first step, so that every checkpoint has the same tensors."""
    adamw = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.epsilon, fused=True)
    for group in groups:
        for parameter in group["params"]:
            adamw.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
    return adamw


class Optimizer:
    """The optimizers of a run: AdamW or SGD for all parameters, or Muon for hidden matrices and AdamW for the rest.

    Weight decay applies to matrices and embedding tables, not to biases and gains.
    """

    def __init__(self, model: LanguageModel, config: TrainingConfig, processes: Processes = ALONE) -> None:
        # Of sharded weights, the parts of this process are optimised as plain tensors that share their memory.
        self.given = dict(model.named_parameters())
        own = {name: p if local(p) is p else nn.Parameter(local(p).detach()) for name, p in self.given.items()}
        self.names = {parameter: name for name, parameter in own.items()}
        by_muon = hidden_matrices(model) if config.optimizer == "muon" else set()
        self.parts: list[torch.optim.Optimizer] = []
        self.lrs: list[float] = []
        if hidden := [p for p, name in self.names.items() if name in by_muon]:
            self.parts.append(self._muon(hidden, config, processes))
            self.lrs.append(config.muon_lr)
        rest = {p: name for p, name in self.names.items() if name not in by_muon}
        matrices = _matrices(model, without=TOKENS)
        decayed = {p for p, name in rest.items() if name in matrices or ".tables." in name}
        groups = _groups(rest, decayed, rate_factors(model, config.layer_decay, config.embedding_rate), config)
        if config.optimizer == "sgd":
            self.parts.append(torch.optim.SGD(groups, lr=config.lr, fused=True))
        else:
            self.parts.append(_adamw(groups, config))
        self.lrs.append(config.lr)

    def _muon(self, hidden: list[nn.Parameter], config: TrainingConfig, processes: Processes) -> Muon:
        rows = [self.given[self.names[p]].shape[0] for p in hidden]
        settings = (config.muon_lr, config.muon_momentum, config.weight_decay)
        return Muon(hidden, *settings, processes=processes, rows=rows)

    def step(self, factor: float | Float[Tensor, ""], skip: Float[Tensor, ""]) -> None:
        """One update at `factor` times the learning rates, or none if `skip` is 1."""
        capturing = is_capturing(skip)
        for part, lr in zip(self.parts, self.lrs, strict=True):
            part.found_inf = skip  # type: ignore[attr-defined]
            for group in part.param_groups:
                group["lr"], group["capturable"] = lr * group.get(FACTOR, 1.0) * factor, capturing
            part.step()

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=True)
        for _, parameter in self._sharded():
            parameter.grad = None

    def parameters(self) -> list[nn.Parameter]:
        """What is optimised, with its gradients: the parameters, or the parts of this process."""
        for own, parameter in self._sharded():
            own.grad = None if parameter.grad is None else local(parameter.grad)
        return list(self.names)

    def _sharded(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        """The parts of this process, and the sharded parameters they belong to."""
        for own, name in self.names.items():
            if own is not self.given[name]:
                yield own, self.given[name]

    def tensors(self) -> dict[str, Tensor]:
        """The optimizer state by parameter name, sharded like the parameters."""
        return {
            f"{name}:{key}": sharded_like(value, self.given[name])
            for part in self.parts
            for parameter, name in self.names.items()
            for key, value in part.state.get(parameter, {}).items()
        }

    def load(self, tensors: Mapping[str, Tensor], where: str) -> None:
        copy_into(self.tensors(), tensors, where)
