"""The quasi-recurrent network (Bradbury et al. 2016): gates by convolution, fo-pooling along time. docs/qrnn.md

    z, f, o = tanh, sigmoid, sigmoid of W [x_{t-1}; x_t] + b          (window 2; of W x_t + b for window 1)
    c_t = f_t c_{t-1} + (1 - f_t) z_t        h_t = o_t c_t

The gates do not depend on c, so those of a segment are one product, and the pooling is a scan.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from longspan.cache.recurrent import QRNNCache
from longspan.kernels.recurrence import recurrence
from longspan.nn.model_config import require
from longspan.nn.precision import wide
from longspan.nn.recurrent import RecurrentConfig, RecurrentLayer, RecurrentModel
from longspan.shapes import Bool, Float, Tensor


@dataclass(frozen=True, kw_only=True)
class QRNNConfig(RecurrentConfig):
    """`dropout` acts on the inputs and outputs of layers, `zoneout` on the updates of c."""

    window: int = 2
    zoneout: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.window in (1, 2), f"model.window={self.window} is not supported; use 1 or 2")
        self.require_rate("zoneout")


class QRNNLayer(RecurrentLayer):
    Cache = QRNNCache

    def __init__(self, inputs: int, units: int, window: int, zoneout: float) -> None:
        super().__init__()
        self.convolution = nn.Linear(window * inputs, 3 * units)
        self.window, self.zoneout = window, zoneout
        self.cached_inputs, self.units = inputs if window == 2 else 0, units

    def initial(self, batch: int, like: Tensor) -> QRNNCache:
        return QRNNCache(
            like.new_zeros(batch, self.cached_inputs), like.new_zeros(batch, self.units, dtype=wide(like.dtype))
        )

    @staticmethod
    def prepare(starts: Bool[Tensor, "B T"]) -> Bool[Tensor, "B T 1"]:
        """1 where a position belongs to the same document as the one before it."""
        return ~starts[..., None]

    def forward(
        self, x: Float[Tensor, "B T E"], cache: QRNNCache, starts: Bool[Tensor, "B T 1"] | None
    ) -> tuple[Float[Tensor, "B T D"], QRNNCache]:
        source = x
        if self.window == 2:
            previous = torch.cat([cache.x[:, None].to(x.dtype), x[:, :-1]], dim=1)
            if starts is not None:
                previous = previous * starts
            source = torch.cat([previous, x], dim=-1)
        gates = self.convolution(source)
        z, f, o = gates.to(wide(gates.dtype)).chunk(3, dim=-1)
        update = self._zoneout(torch.sigmoid(-f))  # 1 - f
        keep = 1 - update if starts is None else (1 - update) * starts
        cells = recurrence(keep, update * z.tanh(), cache.c.to(keep.dtype))
        after = QRNNCache(x[:, -1, : self.cached_inputs].to(cache.x.dtype), cells[:, -1].to(cache.c.dtype))
        return (o.sigmoid() * cells).to(gates.dtype), after

    def _zoneout(self, update: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        """Zoneout (Krueger et al. 2017): some units keep their c, f = 1 - dropout(1 - f) without rescaling. Outside
        training, every update is multiplied by 1 - zoneout."""
        if self.training:
            return update * (F.dropout(torch.ones_like(update), self.zoneout) > 0) if self.zoneout else update
        return update * (1 - self.zoneout)


class QRNN(RecurrentModel):
    Config: ClassVar[type] = QRNNConfig

    def __init__(self, config: QRNNConfig) -> None:
        layers = [QRNNLayer(inputs, units, config.window, config.zoneout) for inputs, units in config.widths]
        super().__init__(config, layers)
