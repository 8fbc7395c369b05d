"""AWD-LSTM (Merity et al. 2017): an LSTM with five dropouts and two penalties on its activations. docs/awd_lstm.md

    embedding_dropout   words, wherever they stand              weight_dropout  entries of every layer's U
    input_dropout       units of the embedding, locked          hidden_dropout  units between layers, locked
    dropout             units of the last layer's output, locked

Locked: one mask per row for all positions of a segment. The penalties join the loss while training, m being the mask
of the output, h the last layer's output before it, means over rows, positions and units:

    ar mean((m h_t)^2)  +  tar mean((h_t - h_{t-1})^2)          the paper's alpha and beta
"""

from dataclasses import dataclass
from typing import ClassVar

from longspan.contract import State
from longspan.layers.dropout import LockedDropout, WordDropout
from longspan.layers.lstm import LSTMLayer
from longspan.layers.penalties import ActivationPenalty
from longspan.layers.recurrent import RecurrentConfig, RecurrentModel
from longspan.shapes import Bool, Float, Int, Tensor


@dataclass(frozen=True, kw_only=True)
class AWDLSTMConfig(RecurrentConfig):
    dropout: float = 0.4
    input_dropout: float = 0.4
    hidden_dropout: float = 0.3
    embedding_dropout: float = 0.1
    weight_dropout: float = 0.5
    ar: float = 2.0
    tar: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("input_dropout", "hidden_dropout", "embedding_dropout", "weight_dropout"):
            self.require_rate(name)
        for name in ("ar", "tar"):
            self.require_penalty(name)


class AWDLSTM(RecurrentModel):
    Config: ClassVar[type] = AWDLSTMConfig

    def __init__(self, config: AWDLSTMConfig) -> None:
        super().__init__(config, [LSTMLayer(inputs, units, config.weight_dropout) for inputs, units in config.widths])
        self.word_dropout = WordDropout(config.vocabulary, config.embedding_dropout)
        self.input_dropout = LockedDropout(config.input_dropout)
        self.hidden_dropout = LockedDropout(config.hidden_dropout)
        self.output_dropout = LockedDropout(config.dropout)
        self.penalty = ActivationPenalty(config.ar, config.tar)

    def embed(self, tokens: Int[Tensor, "B T"]) -> Float[Tensor, "B T D"]:
        return self.word_dropout(self.embedding(tokens), tokens)

    def training_loss(
        self,
        tokens: Int[Tensor, "B T"],
        targets: Int[Tensor, "B T"],
        state: State | None = None,
        progress: float | Float[Tensor, ""] = 0.0,  # noqa: ARG002
        starts: Bool[Tensor, "B T"] | None = None,
    ) -> tuple[Float[Tensor, ""], State]:
        hidden, output, state = self.read(tokens, state, starts)
        loss = self.head.losses(hidden[-1], targets).mean()
        return self.penalty(loss, hidden[-1], output, starts), state
