"""The LSTM language model (Zaremba et al. 2014, tied as in Press & Wolf 2017). docs/lstm.md"""

from dataclasses import dataclass
from typing import ClassVar

from longspan.nn.lstm import LSTMLayer
from longspan.nn.recurrent import RecurrentConfig, RecurrentModel


@dataclass(frozen=True, kw_only=True)
class LSTMConfig(RecurrentConfig):
    """`dropout` acts on the inputs and outputs of layers, never along time."""


class LSTM(RecurrentModel):
    """A stack of LSTM layers; the state of a row is h and c of each."""

    Config: ClassVar[type] = LSTMConfig

    def __init__(self, config: LSTMConfig) -> None:
        super().__init__(config, [LSTMLayer(inputs, units) for inputs, units in config.widths])
