"""The quasi-recurrent network (Bradbury et al. 2016): gates by convolution, fo-pooling along time. docs/qrnn.md

    z, f, o = tanh, sigmoid, sigmoid of W [x_{t-1}; x_t] + b          (window 2; of W x_t + b for window 1)
    c_t = f_t c_{t-1} + (1 - f_t) z_t        h_t = o_t c_t

The gates know nothing of c, so all of a segment's are one product, and the pooling is a scan.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from longspan.kernels.recurrence import recurrence
from longspan.layers.model_config import require
from longspan.layers.recurrent import RecurrentConfig, RecurrentLayer, RecurrentModel, wide
from longspan.shapes import Bool, Float, Tensor


@dataclass(frozen=True, kw_only=True)
class QRNNConfig(RecurrentConfig):
    """`dropout` is of what goes up, `zoneout` of the updates of c."""

    window: int = 2
    zoneout: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.window in (1, 2), f"model.window={self.window} is no window of a qrnn; it takes 1 or 2")
        self.require_rate("zoneout")


class QRNNLayer(RecurrentLayer):
    """Carries the cell c, and with window 2 the last input x."""

    def __init__(self, inputs: int, units: int, window: int, zoneout: float) -> None:
        super().__init__()
        self.convolution = nn.Linear(window * inputs, 3 * units)
        self.window, self.zoneout = window, zoneout
        self.parts = ("x", "c") if window == 2 else ("c",)
        self.carried = (inputs, units) if window == 2 else (units,)

    def initial(self, batch: int, like: Tensor) -> tuple[Tensor, ...]:
        """c is a sum over the whole stream: it is kept in float32 or wider."""
        *x, c = super().initial(batch, like)
        return *x, c.to(wide(c.dtype))

    @staticmethod
    def boundaries(starts: Bool[Tensor, "B T"]) -> Bool[Tensor, "B T 1"]:
        """Where a position may see what came before it."""
        return ~starts[..., None]

    def forward(
        self, x: Float[Tensor, "B T E"], carried: tuple[Tensor, ...], boundaries: Bool[Tensor, "B T 1"] | None
    ) -> tuple[Float[Tensor, "B T D"], tuple[Tensor, ...]]:
        *last, c = carried
        source = x
        if self.window == 2:
            previous = torch.cat([last[0][:, None].to(x.dtype), x[:, :-1]], dim=1)
            if boundaries is not None:
                previous = previous * boundaries
            source = torch.cat([previous, x], dim=-1)
        gates = self.convolution(source)
        z, f, o = gates.to(wide(gates.dtype)).chunk(3, dim=-1)
        update = self._zoned(torch.sigmoid(-f))  # 1 - f
        keep = 1 - update if boundaries is None else (1 - update) * boundaries
        states = recurrence(keep, update * z.tanh(), c.to(keep.dtype))
        last = [x[:, -1].to(before.dtype) for before in last]
        return (o.sigmoid() * states).to(gates.dtype), (*last, states[:, -1].to(c.dtype))

    def _zoned(self, update: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        """Zoneout (Krueger et al. 2017): some units keep their c as it is, f = 1 - dropout(1 - f) without rescaling;
        when nothing is trained, each does so for its share."""
        if self.training:
            return update * (F.dropout(torch.ones_like(update), self.zoneout) > 0) if self.zoneout else update
        return update * (1 - self.zoneout)


class QRNN(RecurrentModel):
    Config: ClassVar[type] = QRNNConfig

    def __init__(self, config: QRNNConfig) -> None:
        layers = [QRNNLayer(inputs, units, config.window, config.zoneout) for inputs, units in config.widths]
        super().__init__(config, layers)
