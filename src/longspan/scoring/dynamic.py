"""Dynamic evaluation: the model learns from every segment after it was scored (Krause et al. 2018, 2019).

A segment is scored before the model learns from it, so no loss depends on its own target. With g the gradient of a
segment's mean loss, v the mean of g^2 over the segments so far and theta_0 the original weights:

    theta <- theta - rate g / (sqrt(v) + epsilon) + decay (theta_0 - theta)

Deviation: Krause et al. compute v on the training text. Here it comes from the scored text, so that the training text
is not needed.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from longspan.compiled_layers import CompiledLayers
from longspan.config import convert_fields
from longspan.contract import LanguageModel, State
from longspan.cuda_graphs import CapturedStep
from longspan.errors import ConfigError
from longspan.kernels.rms_update import RMSUpdate
from longspan.reading import Reading
from longspan.scoring.losses import Arriving, Chunk, Ids, Starts, segments_of
from longspan.scoring.rounded import RoundedWeights, only_cast
from longspan.shapes import Bool, Float, Int, Tensor

EPSILON = 1e-8
WORTH_COMPILING = 1500
"""Segments. Compiling a layer takes as long as some hundreds of steps that are not compiled."""
LONG = 4096
"""Tokens per segment of the static score on a GPU, where segments of a few hundred tokens are launch-bound."""


@dataclass(frozen=True)
class Dynamics:
    """Settings of the update."""

    rate: float = 5e-5
    """Learning rate."""
    decay: float = 0.0
    """Decay towards the original weights."""

    def __post_init__(self) -> None:
        convert_fields(self)
        if not 0 < self.rate < 1:
            raise ConfigError(f"rate={self.rate} must be between 0 and 1; the default is 5e-5")
        if not 0 <= self.decay < 1:
            raise ConfigError(f"decay={self.decay} must be at least 0 and below 1; 0 turns it off")


def learning_dtypes(dtype: torch.dtype) -> tuple[torch.dtype, torch.dtype | None]:
    """The dtype of the weights and of matrix products (None: that of the weights) for a model of this dtype.

    Updates this small would be lost in bfloat16 weights, so only matrix products use bfloat16.
    """
    return (torch.float32, torch.bfloat16) if dtype == torch.bfloat16 else (dtype, None)


def static_reading(reading: Reading, device: torch.device) -> Reading:
    """How the text is read without learning, for comparison with dynamic evaluation in segments of `reading`.

    On a GPU segments are long where that changes no loss, which is with same_length. A pointer compares all pairs of
    positions of a segment, so its segments stay short.
    """
    if device.type != "cuda" or not reading.same_length or reading.pointer:
        return reading
    return replace(reading, segment=max(reading.segment, LONG))


def learning_copy(
    model: LanguageModel, precision: torch.dtype | None = None
) -> tuple[LanguageModel, torch.dtype | None]:
    """The model and the precision to learn with: a float32 copy of a bfloat16 model, otherwise the model itself."""
    dtype = next(model.parameters()).dtype
    weights, products = learning_dtypes(dtype)
    return model if weights == dtype else copy.deepcopy(model).to(weights), precision or products


def dynamic_losses(
    model: LanguageModel,
    ids: Ids,
    reading: Reading,
    *,
    starts: Starts | None = None,
    dynamics: Dynamics | None = None,
    precision: torch.dtype | None = None,
) -> Iterator[Chunk]:
    """Every loss of a text, each scored before the model learns from it.

    The weights change while this runs and are restored at the end, so the model must not be used for anything else in
    between. There is one stream only: several would learn from text that another has not scored yet. The memory holds
    hidden states, because cached keys and values would come from older weights. Matrix products may have a lower
    `precision` than the weights, as in training. A bfloat16 model learns as a float32 copy, with bfloat16 products.
    On a GPU the step is captured in a CUDA graph, and for a long text its layers are compiled.
    """
    model, precision = learning_copy(model, precision)
    learner = Learner(model, dynamics or Dynamics(), precision)
    on_gpu = learner.steps.is_cuda
    compiles = on_gpu and model.hints.compile and len(ids) > WORTH_COMPILING * reading.segment
    captured = CapturedStep(learner.compiled_step if compiles else learner.step)
    before, state, arriving = None, None, None
    try:
        for piece in segments_of(model, ids, segment=reading.segment, starts=starts):
            state = model.initial_state(1, reading, trainable=True) if state is None else state
            # While the memory fills, and in the shorter last segment, shapes differ from those of the captured step.
            shapes = [tensor.shape for tensor in state.tensors().values()]
            steady = shapes == before and piece.tokens.shape[1] == reading.segment
            before = shapes
            step = captured if steady and model.hints.graph_safe else learner.step
            losses, (state,) = step([state], piece.tokens, piece.targets, piece.starts)
            if arriving is not None:
                yield from arriving.chunks()
            arriving = Arriving(piece, losses)
        if arriving is not None:
            yield from arriving.chunks()
    finally:
        learner.restore()


class Learner:
    """Scores segments and updates the weights; keeps the original weights to restore them."""

    rounds: bool | None = None
    """Whether weights of bfloat16 products are kept in bfloat16 too (rounded.py). Default: with the fused update."""

    def __init__(self, model: LanguageModel, dynamics: Dynamics, precision: torch.dtype | None = None) -> None:
        self.model, self.dynamics, self.precision = model, dynamics, precision
        self.weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.original = [weight.detach().clone() for weight in self.weights]
        self.squares = [torch.zeros_like(weight) for weight in self.original]
        # A tensor, because a CUDA graph would capture a number as a constant.
        self.steps = torch.zeros((), device=self.weights[0].device)
        self.fused: tuple[list[int], RMSUpdate] | None = None
        self.leaves: list[Tensor] = list(self.weights)  # what gradients are computed for
        self.rounded: RoundedWeights | None = None
        self.layers: CompiledLayers | None = None

    def compiled_step(
        self,
        states: list[State],
        tokens: Int[Tensor, "B T"],
        targets: Int[Tensor, "B T"],
        starts: Bool[Tensor, "B T"] | None,
    ) -> tuple[Float[Tensor, "B T"], list[State]]:
        """`step` with compiled layers."""
        self.layers = self.layers or CompiledLayers(self.model, any_length=False)
        with self.layers.in_place():
            return self.step(states, tokens, targets, starts)

    def step(
        self,
        states: list[State],
        tokens: Int[Tensor, "B T"],
        targets: Int[Tensor, "B T"],
        starts: Bool[Tensor, "B T"] | None,
    ) -> tuple[Float[Tensor, "B T"], list[State]]:
        """A segment's losses and the state after it, then an update on their mean. `states` has one entry."""
        device = tokens.device.type
        # Autocast caches rounded weights until the outermost one exits, which may be the caller's, and weights change.
        torch.clear_autocast_cache()
        with torch.enable_grad():
            with torch.autocast(device, self.precision, enabled=self.precision is not None):
                losses, state = self.model.losses(tokens, targets, states[0], starts)
            first = self.rounded is None and self._can_round()
            chosen = only_cast(losses, self.weights, torch.bfloat16) if first else []
            gradients = torch.autograd.grad(losses.mean(), self.leaves, allow_unused=True)
        with torch.no_grad():
            self.update(gradients)
        if first:
            self.rounded = RoundedWeights(self.model, self.weights, chosen, torch.bfloat16)
            pairs = zip(self.weights, self.rounded.copies, strict=True)
            self.leaves, self.fused = [w if rounded is None else rounded for w, rounded in pairs], None
        return losses.detach(), [state.detach()]

    def _can_round(self) -> bool:
        """Only families with static shapes: others may choose the dtype of a state by that of a weight."""
        wanted = RMSUpdate.suits(self.weights) if self.rounds is None else self.rounds
        return wanted and self.precision == torch.bfloat16 and self.model.hints.graph_safe

    def update(self, gradients: tuple[Tensor | None, ...]) -> None:
        """Update all weights, with one call per operation instead of one per weight."""
        self.steps += 1
        if RMSUpdate.suits(self.weights):
            self._fused_update(gradients)
            return
        rows = zip(self.weights, self.original, self.squares, gradients, strict=True)
        used = [(*row, g.to(row[0].dtype)) for *row, g in rows if g is not None]
        weights, original, squares, g = (list(column) for column in zip(*used, strict=True))
        torch._foreach_addcmul_(squares, g, g)
        roots = torch._foreach_div(squares, self.steps)
        torch._foreach_sqrt_(roots)
        torch._foreach_add_(roots, EPSILON)
        if self.dynamics.decay:
            torch._foreach_lerp_(weights, original, self.dynamics.decay)
        torch._foreach_addcdiv_(weights, g, roots, value=-self.dynamics.rate)
        for weight, leaf in zip(self.weights, self.leaves, strict=True):
            if leaf is not weight:
                leaf.copy_(weight)

    def _fused_update(self, gradients: tuple[Tensor | None, ...]) -> None:
        """The same in one kernel."""
        used = [k for k, gradient in enumerate(gradients) if gradient is not None]
        if self.fused is None or self.fused[0] != used:
            weights, original, squares = (
                [part[k].detach() for k in used] for part in (self.weights, self.original, self.squares)
            )
            copies = [None if self.leaves[k] is self.weights[k] else self.leaves[k].detach() for k in used]
            self.fused = used, RMSUpdate(weights, original, squares, copies)
        given = [gradient for gradient in gradients if gradient is not None]
        self.fused[1](given, self.steps, self.dynamics.rate, self.dynamics.decay, EPSILON)

    def restore(self) -> None:
        if self.rounded is not None:
            self.rounded.remove()
        with torch.no_grad():
            for weight, original in zip(self.weights, self.original, strict=True):
                weight.copy_(original)
        torch.clear_autocast_cache()
