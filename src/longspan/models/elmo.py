"""ELMo (Peters et al. 2018, arXiv 1802.05365): two LSTMs, forward and backward, over characters of tokens. docs/elmo.md

    x      = W highway(highway([max over positions of relu(conv_k(characters))]_k))           for every token
    right  = layers of a forward LSTM over x;   left = layers of a backward LSTM over x, with residuals
    p(next token) = softmax(V right + b)        p(token before) = softmax(V left + b)         one V for both

Training minimises the mean of both losses. Scoring and generation use the forward model, which is an ordinary language
model. Tasks use `encode`: [x; x] and [right; left] of every layer, which `features = "mix"` of a task weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from longspan.contract import State
from longspan.hints import Hints
from longspan.nn.lstm import LSTMLayer
from longspan.nn.model_config import require
from longspan.nn.recurrent import RecurrentConfig, RecurrentModel
from longspan.shapes import Bool, Float, Int, Tensor

BEGIN, END, PADDING = 256, 257, 258
"""Characters besides the bytes."""


@dataclass(frozen=True, kw_only=True)
class ELMoConfig(RecurrentConfig):
    layers: int = 2
    characters: int = 16
    """Bytes of a token that are read; the rest of a longer one is not."""
    character_width: int = 16
    filters: tuple[tuple[int, int], ...] = ((1, 32), (2, 32), (3, 64), (4, 128), (5, 256))
    """Convolutions over characters: width and number of filters."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("characters", "character_width"):
            require(getattr(self, name) >= 1, f"model.{name}={getattr(self, name)} must be at least 1")
        require(bool(self.filters), "model.filters is empty; use for example [[1, 32], [3, 64]]")
        for width, count in self.filters:
            fits = 1 <= width <= self.characters + 2 and count >= 1
            require(
                fits,
                f"model.filters={[width, count]} must be [width, number of filters] with a width between 1 and "
                f"{self.characters + 2} and at least 1 filter",
            )
        require(self.inner is None, "model.inner has no effect on elmo, whose layers have one width; leave it out")

    @property
    def feature_widths(self) -> list[int]:
        """The widths of what `encode` returns."""
        return [2 * self.width] * (self.layers + 1)


class CharacterEmbedding(nn.Module):
    """A vector per token from its characters: convolutions, two highway layers (Srivastava et al. 2015), projection."""

    spelling: Tensor

    def __init__(self, config: ELMoConfig) -> None:
        super().__init__()
        self.tables = nn.ParameterList([torch.empty(PADDING + 1, config.character_width)])
        self.convolutions = nn.ModuleList(nn.Conv1d(config.character_width, n, k) for k, n in config.filters)
        total = sum(count for _, count in config.filters)
        self.highways = nn.ModuleList(nn.Linear(total, 2 * total) for _ in range(2))
        self.projection = nn.Linear(total, config.width)
        self.register_buffer("spelling", torch.zeros(config.vocabulary, config.characters + 2, dtype=torch.int64))
        if not self.spelling.is_meta:
            # Until a tokenizer says more, a token is spelled as the bytes of its number.
            digits = torch.arange(config.vocabulary)[:, None] >> torch.tensor([0, 8, 16])
            self.spelling.copy_(self._bordered(digits & 255, config.characters))

    def _bordered(self, rows: Int[Tensor, "V C"], size: int) -> Int[Tensor, "V L"]:
        rows = F.pad(rows, (0, max(size - rows.shape[1], 0)), value=PADDING)[:, :size]
        ends = (rows != PADDING).sum(1, keepdim=True)
        rows = F.pad(rows, (1, 1), value=PADDING)
        return rows.scatter(1, ends + 1, END).index_fill(
            1, torch.zeros(1, dtype=torch.int64, device=rows.device), BEGIN
        )

    def spell(self, tokens: Sequence[bytes]) -> None:
        size = self.spelling.shape[1] - 2
        cut = [list(token[:size]) for token in tokens]
        rows = torch.tensor([row + [PADDING] * (size - len(row)) for row in cut])
        self.spelling[: len(rows)] = self._bordered(rows, size).to(self.spelling.device)

    def forward(self, tokens: Int[Tensor, "B T"]) -> Float[Tensor, "B T D"]:
        different, place = tokens.unique(return_inverse=True)  # frequent tokens are computed once
        x = F.embedding(self.spelling[different], self.tables[0]).transpose(1, 2)
        x = torch.cat([F.relu(convolution(x)).amax(-1) for convolution in self.convolutions], dim=-1)
        for highway in self.highways:
            change, gate = highway(x).chunk(2, dim=-1)
            gate = gate.sigmoid()
            x = gate * F.relu(change) + (1 - gate) * x
        return self.projection(x)[place]


class ResidualLSTM(LSTMLayer):
    """h + x above the first layer."""

    def __init__(self, width: int, *, residual: bool) -> None:
        super().__init__(width, width)
        self.residual = residual

    def forward(self, x: Float[Tensor, "B T E"], cache: Any, starts: Any) -> tuple[Float[Tensor, "B T D"], Any]:
        output, cache = super().forward(x, cache, starts)
        return (output + x if self.residual else output), cache


class ELMo(RecurrentModel):
    Config: ClassVar[type] = ELMoConfig
    causal = False
    classify_at = "both"
    spelled = True
    embedding: Any
    backward_layers: Any

    def __init__(self, config: ELMoConfig) -> None:
        super().__init__(config, [ResidualLSTM(config.width, residual=n > 0) for n in range(config.layers)])
        self.head = config.make_head(self.embedding, tied=False)
        self.head.chunked = True
        self.embedding = CharacterEmbedding(config)
        self.backward_layers = nn.ModuleList(ResidualLSTM(config.width, residual=n > 0) for n in range(config.layers))
        self.initialise_characters()

    @torch.no_grad()
    def initialise_characters(self) -> None:
        if self.embedding.tables[0].is_meta:
            return  # there is nothing to draw, and torch would import its compiler for it
        for part in (self.embedding, self.head):
            for parameter in part.parameters():
                if parameter.dim() > 1:
                    nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
                else:
                    parameter.zero_()
        for highway in self.embedding.highways:
            highway.bias[len(highway.bias) // 2 :].fill_(-2.0)  # first, a highway carries its input
        for layer in self.backward_layers:
            for parameter in layer.parameters():
                parameter.uniform_(-(self.config.width**-0.5), self.config.width**-0.5)

    @property
    def hints(self) -> Hints:  # type: ignore[override]
        return Hints(compile=False, shard_layers=False)

    def spell(self, tokens: Sequence[bytes]) -> None:
        self.embedding.spell(tokens)

    def backward_states(
        self, x: Float[Tensor, "B T D"], starts: Bool[Tensor, "B T"] | None
    ) -> list[Float[Tensor, "B T D"]]:
        """The outputs of the backward layers, which read a segment from its end. Each document starts from zeros."""
        ends = None
        if starts is not None:
            # Backwards, a document starts at its last token.
            last = F.pad(starts[:, 1:], (0, 1), value=True).flip(1)
            ends = self.backward_layers[0].prepare(last)
        h, found = x.flip(1), []
        for layer in self.backward_layers:
            h, _ = layer(h, layer.initial(len(x), x), ends)
            h = self.hidden_dropout(h)
            found.append(h.flip(1))
        return found

    def encode(
        self, tokens: Int[Tensor, "B T"], state: State | None = None, starts: Bool[Tensor, "B T"] | None = None
    ) -> tuple[tuple[Tensor, ...], State]:
        right, _, state = self.run_layers(tokens, state, starts)
        left = self.backward_states(right[0], starts)
        pairs = zip(right, [right[0], *left], strict=True)
        return tuple(torch.cat(pair, dim=-1) for pair in pairs), state

    def training_loss(
        self,
        tokens: Int[Tensor, "B T"],
        targets: Int[Tensor, "B T"],
        state: State | None = None,
        progress: float | Float[Tensor, ""] = 0.0,  # noqa: ARG002
        starts: Bool[Tensor, "B T"] | None = None,
    ) -> tuple[Float[Tensor, ""], State]:
        """Half the loss of the next token and half that of the token before, of which the segment has one fewer."""
        right, _, state = self.run_layers(tokens, state, starts)
        temperature = state.reading.temperature
        loss = self.head.losses(right[-1], targets, temperature).mean()
        if tokens.shape[1] == 1:
            return loss, state
        left = self.backward_states(right[0], starts)[-1]
        before = self.head.losses(left[:, 1:], tokens[:, :-1], temperature).mean()
        return (loss + before) / 2, state
