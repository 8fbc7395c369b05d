"""The fused decoder with one kernel per step, for one stream on a GPU."""

from collections.abc import Sequence
from typing import Any

import torch

from longspan.contract import LanguageModel, State
from longspan.decoding.fused import FusedDecoder, plain_softmax
from longspan.decoding.step_layers import StepLayer, cache_size, final_norm
from longspan.kernels.one_token import Norm, kind_of
from longspan.kernels.one_token import persistent as kernel
from longspan.shapes import Float, Int, Tensor


class PersistentDecoder(FusedDecoder):
    """One launch instead of six per layer. Its activations are float32, so that results of a bfloat16 model differ from
    those of `FusedDecoder` by rounding. Models that it does not support are left to `FusedDecoder`."""

    persistent = True
    """False: one launch per phase. The result is bit-equal."""

    @classmethod
    def fits(cls, model: Any, state: State, layers: Sequence[StepLayer]) -> bool:
        """One row, a plain softmax without projections, norms of one kind, no convolution, and tiles that fit."""
        norms = [Norm.of(norm) for layer in layers for norm in (layer.attention_norm, layer.feed_forward_norm)]
        return (
            state.batch == 1
            and plain_softmax(model)
            and all(layer.convolution is None for layer in layers)
            and len({(kind_of(norm), norm and norm.eps) for norm in norms}) == 1
            and norms[0] is not None
            and shape_of(model, state, _programs(layers[0].qkv.device)).fits()
        )

    def __init__(
        self, model: Any, state: State, layers: Sequence[StepLayer], age: int, programs: int | None = None
    ) -> None:
        super().__init__(model, state, layers, age)
        device = self.keys[0].device
        self.shape = shape_of(model, state, programs or _programs(device))
        self.work = kernel.Buffers(self.shape, device)
        self.copies: list[Tensor] = []
        self.weights = self._weights()

    def _weights(self) -> kernel.Weights:
        model, layers = self.model, self.layers
        norm = Norm.of(layers[0].attention_norm)
        assert norm is not None
        assert layers[0].up is not None
        table = [self._addresses(n, layer) for n, layer in enumerate(layers)]
        return kernel.Weights(
            embedding=model.embedding.tables[0].detach(),
            embedding_scale=model.embedding.scale,
            head=model.head.tables[0].detach(),
            head_bias=model.head.biases[0].detach(),
            final_norm=Norm.of(final_norm(model)),
            temperature=self.reading.temperature,
            table=torch.tensor(table, dtype=torch.int64, device=self.keys[0].device),
            distances=self.tables[0][0].shape[1],
            pre_norm=layers[0].pre_norm,
            norm=norm,
            head_eps=layers[0].head_norms[0].eps if layers[0].head_norms else None,
            biases=layers[0].up.bias is not None,
            activation=layers[0].activation,
            discount=self.reading.discount,
        )

    def _addresses(self, n: int, layer: StepLayer) -> list[int]:
        """The tensors of a layer, in the order that the kernel expects. All outlive the decoder's steps: they are the
        model's parameters and the decoder's buffers."""
        assert layer.up is not None
        assert layer.down is not None
        norms: tuple[Any, ...] = (layer.attention_norm, layer.feed_forward_norm)
        tensors = [
            *(layer.qkv, layer.output, layer.up.weight, layer.up.bias, layer.down.weight, layer.down.bias),
            *(part for norm in norms for part in (norm.weight, getattr(norm, "bias", None))),
            *(self.keys[n], self.values[n], *self.tables[n]),
            *(norm.weight for norm in layer.head_norms),
        ]
        tensors += [None] * (kernel.ENTRIES - len(tensors))
        return [0 if tensor is None else self._aligned(tensor).data_ptr() for tensor in tensors]

    def _aligned(self, tensor: Tensor) -> Tensor:
        """The tensor, or a copy if its address is not a multiple of 16 bytes, which the kernel assumes."""
        if tensor.data_ptr() % 16 and tensor.is_cuda:
            tensor = tensor.detach().clone()
            self.copies.append(tensor)
        return tensor

    def buffers(self) -> list[Tensor]:
        return [self.count]

    @torch.no_grad()
    def launch(self, tokens: Int[Tensor, "B"]) -> Float[Tensor, "B V"]:
        kernel.step(self.shape, self.weights, self.work, tokens, self.count, persistent=self.persistent)
        return self.work.logits


def shape_of(model: LanguageModel, state: State, programs: int) -> kernel.Shape:
    c = model.config
    return kernel.Shape(
        c.vocabulary, c.width, c.heads, c.head_size, c.inner_size, c.layers, cache_size(state), programs
    )


def _programs(device: torch.device) -> int:
    """The largest power of two that is at most the number of multiprocessors: one program each, all resident."""
    count = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
    return 1 << (count.bit_length() - 1)
