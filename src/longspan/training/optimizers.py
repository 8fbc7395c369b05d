"""AdamW, Muon for the matrices between embedding and head, and plain SGD.

All take a flag on the device. If it is set, a step changes nothing: a gradient that is not finite never reaches the
weights, without a host sync.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from longspan.checkpoints.weights import require_match
from longspan.contract import LanguageModel
from longspan.cuda_graphs import is_capturing
from longspan.shapes import Float, Tensor
from longspan.training.recipe import TrainingConfig

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def orthogonalise(matrices: Float[Tensor, "N R C"], steps: int = 5) -> Float[Tensor, "N R C"]:
    """Approximately U V^T for every matrix U S V^T, by the quintic Newton-Schulz iteration of Jordan et al. 2024.

    X <- a X + (b A + c A^2) X with A = X X^T drives all singular values to about 1. Matrices of one shape are batched,
    because one small product per matrix is launch-bound.
    """
    a, b, c = NEWTON_SCHULZ
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.transpose(1, 2) if tall else matrices
    if x.is_cuda:
        x = x.bfloat16()
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = torch.bmm(x, x.transpose(1, 2))
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.transpose(1, 2) if tall else x).to(matrices.dtype)


class Muon(torch.optim.Optimizer):
    """Orthogonalised momentum (Jordan et al. 2024): w <- w - lr sqrt(max(1, rows / columns)) orthogonalise(m).

    The momenta of parameters of one shape are slices of one tensor. `found_inf` is the flag on the device that blocks
    an update; fused AdamW reads it under the same name.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], lr: float, momentum: float = 0.95, weight_decay: float = 0.0
    ) -> None:
        super().__init__(list(parameters), {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self.found_inf: Tensor | None = None
        shapes: dict[tuple[int, ...], list[nn.Parameter]] = {}
        for parameter in self.param_groups[0]["params"]:
            shapes.setdefault(tuple(parameter.shape), []).append(parameter)
        self.batches: list[tuple[list[nn.Parameter], Tensor]] = []
        for parameters_here in shapes.values():
            momenta = torch.zeros_like(torch.stack([p.detach() for p in parameters_here]))
            for parameter, slot in zip(parameters_here, momenta, strict=True):
                self.state[parameter]["momentum"] = slot
            self.batches.append((parameters_here, momenta))

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        lr, momentum, decay = group["lr"], group["momentum"], group["weight_decay"]
        for parameters, momenta in self.batches:
            gradients = torch.stack([torch.zeros_like(p) if p.grad is None else p.grad for p in parameters])
            allow: Tensor | float = 1.0
            if self.found_inf is not None:
                # Set to zero first, because 0 * NaN is NaN.
                gradients.masked_fill_(self.found_inf.bool(), 0.0)
                allow = 1.0 - self.found_inf
            momenta.lerp_(gradients, allow * (1 - momentum))
            change = orthogonalise(gradients.lerp_(momenta, momentum))
            change *= max(1.0, change.shape[1] / change.shape[2]) ** 0.5
            if decay:
                change.add_(torch.stack([p.detach() for p in parameters]), alpha=decay)
            change *= allow * -lr
            torch._foreach_add_([p.detach() for p in parameters], list[Tensor](change.unbind()))


def hidden_matrices(model: LanguageModel) -> set[str]:
    """Names of the matrices that map hidden states to hidden states. Muon updates these."""
    return {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and not name.startswith(("embedding", "head"))
    }


class Optimizer:
    """The optimisers of a run: AdamW or SGD for all parameters, or Muon for hidden matrices and AdamW for the rest.

    Weight decay applies to matrices and embedding tables, not to biases and gains.
    """

    def __init__(self, model: LanguageModel, config: TrainingConfig) -> None:
        self.names = {parameter: name for name, parameter in model.named_parameters()}
        matrices = hidden_matrices(model)
        by_muon = matrices if config.optimizer == "muon" else set()
        self.parts: list[torch.optim.Optimizer] = []
        self.lrs: list[float] = []
        chosen = [p for p, name in self.names.items() if name in by_muon]
        if chosen:
            self.parts.append(Muon(chosen, config.muon_lr, config.muon_momentum, config.weight_decay))
            self.lrs.append(config.muon_lr)
        rest = {p: name for p, name in self.names.items() if name not in by_muon}
        decayed = [p for p, name in rest.items() if name in matrices or ".tables." in name]
        plain = [p for p in rest if all(p is not d for d in decayed)]
        both = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}]
        groups = [group for group in both if group["params"]]
        self.lrs.append(config.lr)
        if config.optimizer == "sgd":
            self.parts.append(torch.optim.SGD(groups, lr=config.lr, fused=True))
            return
        adamw = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.epsilon, fused=True)
        for parameter in rest:
            # Created now instead of at the first step, so that every checkpoint has the same tensors.
            adamw.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
        self.parts.append(adamw)

    def step(self, factor: float | Float[Tensor, ""], skip: Float[Tensor, ""]) -> None:
        """One update at `factor` times the learning rates, or none if `skip` is 1."""
        capturing = is_capturing(skip)
        for part, lr in zip(self.parts, self.lrs, strict=True):
            part.found_inf = skip  # type: ignore[attr-defined]
            for group in part.param_groups:
                group["lr"], group["capturable"] = lr * factor, capturing
            part.step()

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=True)

    def tensors(self) -> dict[str, Tensor]:
        """The optimiser state by parameter name."""
        return {
            f"{name}:{key}": value
            for part in self.parts
            for parameter, name in self.names.items()
            for key, value in part.state.get(parameter, {}).items()
        }

    def load(self, tensors: Mapping[str, Tensor], where: str) -> None:
        own = self.tensors()
        require_match(own, tensors, where)
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(tensors[name])
