"""The rolling decoder with int8 weights and an int8 cache, for one stream on a CPU.

A step of one row reads every weight and every cached key once, so its time is that of their bytes. Int8 has a quarter
of those of float32, and one call of C replaces some hundred of torch. Prompts are read in float32 by the model.
"""

import ctypes
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from longspan.checkpoints.int8 import quantise_rows
from longspan.contract import LanguageModel, State
from longspan.decoding.fused import plain_softmax
from longspan.decoding.rolling import RollingDecoder, attention_of
from longspan.decoding.step_layers import StepLayer
from longspan.kernels import int8_step
from longspan.kernels.relative_attention.reference import far_discount
from longspan.shapes import Float, Int, Tensor


class Int8Weights:
    """The matrices of a model as int8, with the addresses that the C code reads."""

    def __init__(self, model: Any, layers: Sequence[StepLayer]) -> None:
        self.held: list[Tensor] = []
        self.layers = [self._layer(layer) for layer in layers]
        self.head = self._matrix(model.head.tables[0], model.head.biases[0])
        tied = model.head.tables[0] is model.embedding.tables[0]
        self.embedding = self.head if tied else self._matrix(model.embedding.tables[0])

    def _layer(self, layer: StepLayer) -> tuple[int8_step.Matrix, ...]:
        assert layer.up is not None
        assert layer.down is not None
        pairs = ((layer.qkv, None), (layer.output, None), *((m.weight, m.bias) for m in (layer.up, layer.down)))
        return tuple(self._matrix(weight, bias) for weight, bias in pairs)

    def _matrix(self, weight: Tensor, bias: Tensor | None = None) -> int8_step.Matrix:
        values, scale = quantise_rows(weight)
        parts = (int8_step.padded(values, int8_step.COLUMNS), scale, None if bias is None else bias.detach())
        self.held += [part for part in parts if part is not None]
        return int8_step.matrix(*parts)


_weights: "WeakKeyDictionary[Any, tuple[Any, Int8Weights]]" = WeakKeyDictionary()
"""Of each model, with the versions of its parameters: forks of a session share them."""


def int8_weights(model: LanguageModel, layers: Sequence[StepLayer]) -> Int8Weights:
    versions = [(parameter.data_ptr(), parameter._version) for parameter in model.parameters()]
    found = _weights.get(model)
    if found is None or found[0] != versions:
        found = _weights[model] = (versions, Int8Weights(model, layers))
    return found[1]


class Int8Decoder(RollingDecoder):
    """Keys and values are stored as int8 with a scale per head and slot; `state` restores them to float32."""

    can_undo = False

    @staticmethod
    def supports(model: Any, state: State, layers: Sequence[StepLayer]) -> bool:
        """One row of float32 on a CPU, a plain softmax without projections, and a C compiler."""
        like = layers[0]
        return (
            state.batch == 1
            and next(model.parameters()).device.type == "cpu"
            and next(model.parameters()).dtype == torch.float32
            and plain_softmax(model)
            and like.up is not None
            and like.activation in int8_step.ACTIVATIONS
            and int8_step.compiled() is not None
        )

    def __init__(self, model: Any, state: State, layers: Sequence[StepLayer], age: int) -> None:
        H, D = layers[0].u.shape
        slots = state.reading.window or state.reading.memory + 1
        columns = D + -D % int8_step.HEAD_COLUMNS
        self.cache = torch.zeros(2, len(layers), H, slots, columns, dtype=torch.int8)
        self.scales = torch.ones(2, len(layers), H, slots)
        self.held: list[Tensor] = []
        """What the C code has addresses of."""
        super().__init__(model, state, layers, age)
        self.keys, self.values = [], []  # those of the base class are float32
        with torch.no_grad():
            self.weights = int8_weights(model, layers)
            self.native = self._native(self.weights)

    def load(self, state: State, age: int) -> None:
        kept = min(age, self.size)
        self.written, self.age = kept, age
        for n, cache in enumerate(state.caches[: len(self.layers)]):
            cached = attention_of(cache)
            for which, positions in enumerate((cached.keys, cached.values)):
                values, scales = quantise_rows(positions[0, :, positions.shape[2] - kept :])
                self.cache[which, n, :, :kept, : values.shape[-1]] = values
                self.scales[which, n, :, :kept] = scales
            self.load_inputs(n, cache)

    def state(self) -> State:
        width = self.model.config.head_size
        restored = self.cache[..., :width].float() * self.scales[..., None]
        self.keys, self.values = ([layer[None] for layer in part] for part in restored)
        try:
            return super().state()
        finally:
            self.keys, self.values = [], []

    @torch.no_grad()
    def launch(self, tokens: Int[Tensor, "B"]) -> Float[Tensor, "B V"]:
        logits = torch.empty(1, self.model.config.vocabulary)
        int8_step.step(self.native, int(tokens[0]), self.written, logits[0])
        return logits

    def _keep(self, tensor: Tensor) -> Tensor:
        """A contiguous tensor that stays alive as long as the decoder."""
        self.held.append(tensor.detach().contiguous())
        return self.held[-1]

    def _norm(self, norm: nn.Module) -> int8_step.Norm:
        if isinstance(norm, nn.Identity):
            return int8_step.Norm()
        assert isinstance(norm, nn.LayerNorm | nn.RMSNorm)
        shift = getattr(norm, "bias", None)
        addresses = (None if part is None else self._keep(part).data_ptr() for part in (norm.weight, shift))
        return int8_step.Norm(*addresses, norm.eps or 0.0)

    def _layer(self, n: int, layer: StepLayer, matrices: tuple[int8_step.Matrix, ...]) -> int8_step.Layer:
        distance, distance_scale = quantise_rows(layer.r.flip(1))
        distance = int8_step.padded(distance, int8_step.HEAD_COLUMNS)
        vectors = tuple(self._keep(part) for part in (distance, distance_scale, layer.u, layer.w))
        caches = (self.cache[0, n], self.cache[1, n], self.scales[0, n], self.scales[1, n])
        head_norms = layer.head_norms or (nn.Identity(), nn.Identity())
        norms = (self._norm(norm) for norm in (layer.attention_norm, layer.feed_forward_norm, *head_norms))
        convolution = () if layer.convolution is None else (self._keep(layer.convolution.weight), self.inputs[n])
        addresses = (part.data_ptr() for part in (*vectors, *caches, *convolution))
        return int8_step.Layer(*matrices, *norms, *addresses)

    def _native(self, weights: Int8Weights) -> int8_step.Model:
        layers, c = self.layers, self.model.config
        inside = c.heads * c.head_size
        sizes = (c.width, c.width, c.width, 3 * inside, inside, c.inner_size, c.heads * self.size)
        parts, known = zip(layers, weights.layers, strict=True), layers[0].r.shape[1]
        discounts = far_discount(torch.arange(self.size), known - 1, self.reading.discount)
        array = (int8_step.Layer * len(layers))(*(self._layer(n, *part) for n, part in enumerate(parts)))
        return int8_step.Model(
            ctypes.cast(array, ctypes.POINTER(int8_step.Layer)), weights.embedding, weights.head,
            self._norm(self.final_norm), len(layers), c.width, c.heads, c.head_size, self.size, known,
            layers[0].pre_norm, int8_step.ACTIVATIONS[layers[0].activation],
            self.inputs[0].shape[1] if self.inputs else 0, self.model.embedding.scale, self.reading.temperature,
            self._keep(discounts.float()).data_ptr(),
            *(self._keep(torch.zeros(size + -size % int8_step.COLUMNS)).data_ptr() for size in sizes),
        )  # fmt: skip
