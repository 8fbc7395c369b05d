"""AWD-LSTM (Merity et al. 2017): an LSTM with five dropouts and two penalties on its activations. docs/awd_lstm.md

    embedding_dropout   words, at all their positions           weight_dropout  entries of U in every layer
    input_dropout       units of the embedding, locked          hidden_dropout  units between layers, locked
    dropout             units of the last layer's output, locked

Locked: one mask per row for all positions of a segment. Training adds two penalties to the loss, with the last layer's
output h, its dropout mask m, and means over rows, positions and units:

    ar mean((m h_t)^2)  +  tar mean((h_t - h_{t-1})^2)          the paper's alpha and beta
"""

from dataclasses import dataclass
from typing import ClassVar

from longspan.contract import State
from longspan.nn.dropout import LockedDropout, WordDropout
from longspan.nn.lstm import LSTMLayer
from longspan.nn.penalties import ActivationPenalty
from longspan.nn.recurrent import RecurrentConfig, RecurrentModel
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
            self.require_not_negative(name)


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
        hidden, output, state = self.run_layers(tokens, state, starts)
        loss = self.head.losses(hidden[-1], targets, state.reading.temperature).mean()
        return self.penalty(loss, hidden[-1], output, starts), state
