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
from longspan.layers.model_config import require
from longspan.layers.recurrent import RecurrentConfig, RecurrentModel, wide
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
            require(
                getattr(self, name) >= 0, f"model.{name}={getattr(self, name)} must not be negative; 0 turns it off"
            )


class AWDLSTM(RecurrentModel):
    Config: ClassVar[type] = AWDLSTMConfig

    def __init__(self, config: AWDLSTMConfig) -> None:
        super().__init__(config, [LSTMLayer(inputs, units, config.weight_dropout) for inputs, units in config.widths])
        self.word_dropout = WordDropout(config.vocabulary, config.embedding_dropout)
        self.input_dropout = LockedDropout(config.input_dropout)
        self.hidden_dropout = LockedDropout(config.hidden_dropout)
        self.output_dropout = LockedDropout(config.dropout)

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
        if self.training:
            loss = loss + self.config.ar * mean_square(hidden[-1]).mean()
            loss = loss + self.config.tar * slowness(output, starts)
        return loss, state


def mean_square(h: Float[Tensor, "B T D"]) -> Float[Tensor, "B T"]:
    """Over the units; in float32 or wider, whatever h came in."""
    return h.to(wide(h.dtype)).square().mean(dim=-1)


def slowness(h: Float[Tensor, "B T D"], starts: Bool[Tensor, "B T"] | None) -> Float[Tensor, ""]:
    """mean((h_t - h_{t-1})^2) over neighbours of one document: at another's first token h has every right to jump."""
    jumps = mean_square(h[:, 1:] - h[:, :-1])
    if starts is None:
        return jumps.sum() / max(jumps.numel(), 1)
    within = ~starts[:, 1:]
    return (jumps * within).sum() / within.sum().clamp(min=1)
