"""BERT (Devlin et al. 2018, arXiv 1810.04805): masked language modelling and next sentence prediction. docs/bert.md

    h = norm(Table[x] + P[position] + S[segment])
    h = norm(h + attention(h))        h = norm(h + W2 gelu(W1 h))          every position sees its whole document
    masked token:   softmax(norm(gelu(W h)) Table^T + b)
    next sentence:  softmax(Wn tanh(Wp h_first))

In training, the text of a row becomes [classify] first half [separator] second half [separator]; in half of the rows
the second half is that of another row. 15% of its tokens are predicted, the same number in every row: 80% of them are
replaced by [mask], 10% by a random token, and 10% stay. Without the special tokens in the config, rows are used as
they are and there is no next sentence.

With `norm = "pre"` the norms come before attention and feed-forward, and one more after the last layer (Xiong et al.
2020, arXiv 2002.04745). With `first_positions = "sinusoid"` positions start as sinusoids and are learned from there.
Neither is as published; both end the long plateau of masked language modelling much earlier.

`hidden_states` are those of a causal mask, as the contract asks; BERT is not trained for them. Tasks use `encode`.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from torch.nn import functional as F

from longspan.contract import State
from longspan.hints import Hints
from longspan.nn.adaptive_softmax import AdaptiveSoftmax
from longspan.nn.biased_layer import BiasedConfig, BiasedLayer, Bidirectional, initialise_normal
from longspan.nn.embedding import AdaptiveEmbedding
from longspan.nn.learned_positions import LearnedPositions
from longspan.nn.model_config import require
from longspan.nn.precision import wide
from longspan.nn.whole_batch import has_several_rows, random_rows, row_before
from longspan.nn.window_transformer import WindowTransformer
from longspan.shapes import Bool, Float, Int, Tensor


@dataclass(frozen=True, kw_only=True)
class BERTConfig(BiasedConfig):
    mask: int | None = None
    """The token that hides a predicted one. Default: token 0."""
    classify: int | None = None
    separator: int | None = None
    masked: float = 0.15
    """The share of tokens that are predicted."""
    norm: Literal["post", "pre"] = "post"
    """Where the norms are: after attention and feed-forward as published, or before."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.masked < 1, f"model.masked={self.masked} must be between 0 and 1")
        for name in ("mask", "classify", "separator"):
            token = getattr(self, name)
            known = token is None or 0 <= token < self.vocabulary
            require(known, f"model.{name}={token} must be a token id between 0 and {self.vocabulary - 1}")

    @property
    def pairs(self) -> bool:
        return self.classify is not None and self.separator is not None


class MaskedHead(AdaptiveSoftmax):
    """norm(gelu(W h)), then the softmax that is tied to the embedding."""

    def __init__(
        self,
        embedding: AdaptiveEmbedding,
        vocabulary: int,
        cutoffs: tuple[int, ...] = (),
        *,
        tie_embedding: bool = True,
        tie_projections: bool = False,
    ) -> None:
        super().__init__(embedding, vocabulary, cutoffs, tie_embedding=tie_embedding, tie_projections=tie_projections)
        self.dense, self.norm = nn.Linear(embedding.width, embedding.width), nn.LayerNorm(embedding.width, eps=1e-12)

    def transform(self, hidden: Float[Tensor, "... D"]) -> Float[Tensor, "... D"]:
        return self.norm(F.gelu(self.dense(hidden)))


class BERT(WindowTransformer):
    Config: ClassVar[type] = BERTConfig
    causal = False
    predicts_next = False
    classify_at = "first"
    layers: Any

    def __init__(self, config: BERTConfig) -> None:
        super().__init__(config)
        E = config.width
        self.embedding = config.make_embedding(scaled=False)
        self.places = LearnedPositions(config.positions, E)
        self.segments = nn.Parameter(torch.empty(2, E))
        self.embedding_norm = nn.LayerNorm(E, eps=1e-12)
        self.layers = nn.ModuleList(
            BiasedLayer(config, config.norm, epsilon=1e-12, approximate="none") for _ in range(config.layers)
        )
        self.final_norm = nn.LayerNorm(E, eps=1e-12) if config.norm == "pre" else nn.Identity()
        self.head = config.make_head(self.embedding, kind=MaskedHead)
        self.pooler, self.next_sentence = nn.Linear(E, E), nn.Linear(E, 2)
        self.dropout = nn.Dropout(config.dropout)
        initialise_normal(self)
        if config.first_positions == "sinusoid":
            self.places.start_with_sinusoids()

    @property
    def hints(self) -> Hints:  # type: ignore[override]
        return Hints(graph_safe=True)

    def embed(
        self, tokens: Int[Tensor, "B T"], first: Int[Tensor, "B T"] | None, segments: Int[Tensor, "B T"]
    ) -> Float[Tensor, "B T E"]:
        x = self.embedding(tokens) + self.places(tokens.shape[1], first) + F.embedding(segments, self.segments)
        return self.dropout(self.embedding_norm(x))

    def segments_of(self, tokens: Int[Tensor, "B T"]) -> Int[Tensor, "B T"]:
        """0 up to the first separator, then 1."""
        if self.config.separator is None:
            return torch.zeros_like(tokens)
        ends = tokens == self.config.separator
        return (ends.cumsum(1) - ends.long()).clamp(max=1)

    def hidden_states(
        self, tokens: Int[Tensor, "B T"], state: State | None = None, starts: Bool[Tensor, "B T"] | None = None
    ) -> tuple[tuple[Float[Tensor, "B T E"], ...], State]:
        # A causal model does not know which text of a pair it is in, so all tokens are of the first.
        state, mask = self.begin(tokens, state, starts)
        return self.run_layers(self.embed(tokens, mask.first_key, torch.zeros_like(tokens)), mask), state

    def encode(
        self, tokens: Int[Tensor, "B T"], state: State | None = None, starts: Bool[Tensor, "B T"] | None = None
    ) -> tuple[tuple[Float[Tensor, "B T E"], ...], State]:
        state, mask = self.begin(tokens, state, starts)
        return self.bidirectional(tokens, self.segments_of(tokens), starts, mask.first_key), state

    def bidirectional(
        self,
        tokens: Int[Tensor, "B T"],
        segments: Int[Tensor, "B T"],
        starts: Bool[Tensor, "B T"] | None = None,
        first: Int[Tensor, "B T"] | None = None,
    ) -> tuple[Float[Tensor, "B T E"], ...]:
        """The embedding and every layer's output, where a position sees its document in both directions."""
        mask = Bidirectional(None)
        if starts is not None:
            number = starts.cumsum(1)
            mask = Bidirectional((number[..., None] == number[:, None])[:, None])
        hidden = [self.embed(tokens, first, segments)]
        for layer in self.layers:
            hidden.append(layer(hidden[-1], None, mask)[0])
        hidden[-1] = self.final_norm(hidden[-1])
        return tuple(hidden)

    def training_loss(
        self,
        tokens: Int[Tensor, "B T"],
        targets: Int[Tensor, "B T"],  # noqa: ARG002 (the tokens themselves are predicted)
        state: State | None = None,
        progress: float | Float[Tensor, ""] = 0.0,  # noqa: ARG002
        starts: Bool[Tensor, "B T"] | None = None,
    ) -> tuple[Float[Tensor, ""], State]:
        """The mean loss of masked tokens plus that of the next sentence."""
        state = self.initial_state(len(tokens)) if state is None else state
        following = None
        if self.config.pairs and tokens.shape[1] > 4:
            tokens, following = self.make_pairs(tokens)
            starts = None  # a row is one document now
        hidden_tokens, chosen = self.hide(tokens)
        losses, related = self.pretraining_losses(
            hidden_tokens, tokens.gather(1, chosen), self.segments_of(tokens), following, starts, chosen
        )
        return losses.mean() if related is None else losses.mean() + related, state

    def pretraining_losses(
        self,
        tokens: Int[Tensor, "B T"],
        targets: Int[Tensor, "B N"],
        segments: Int[Tensor, "B T"],
        following: Int[Tensor, "B"] | None,
        starts: Bool[Tensor, "B T"] | None = None,
        chosen: Int[Tensor, "B N"] | None = None,
    ) -> tuple[Float[Tensor, "B N"], Float[Tensor, ""] | None]:
        """The losses of the tokens at the chosen positions (default: all), and the mean loss of the next sentence: 1
        where the second text is a random one."""
        first = None if starts is None else self.begin(tokens, None, starts)[1].first_key
        last = self.bidirectional(tokens, segments, starts, first)[-1]
        # The softmax is a third of a small model's work, so only predicted positions have one.
        predicted = last if chosen is None else last.gather(1, chosen[..., None].expand(-1, -1, last.shape[-1]))
        losses = self.head.losses(predicted, targets)
        if following is None:
            return losses, None
        # With an axis of positions, because dropout takes a tensor without one for weights that all rows share.
        pooled = self.dropout(self.pooler(last[:, :1]).tanh())[:, 0]
        scores = self.next_sentence(pooled)
        return losses, F.cross_entropy(scores.to(wide(scores.dtype)), following)

    def make_pairs(self, tokens: Int[Tensor, "B T"]) -> tuple[Int[Tensor, "B T"], Int[Tensor, "B"]]:
        """[classify] first [separator] second [separator] with as many tokens as before, and 1 where the second text
        comes from another row."""
        T = tokens.shape[1]
        half = (T - 3) // 2
        first, second = tokens[:, :half], tokens[:, half : T - 3]
        # A batch of one row has no other text, so the second half is always its own.
        random = (random_rows(tokens[:, 0]) < 0.5) & has_several_rows(tokens)
        second = torch.where(random[:, None], row_before(second), second)
        mark = torch.full_like(tokens[:, :1], self.config.separator)
        rows = torch.cat([torch.full_like(mark, self.config.classify), first, mark, second, mark], dim=1)
        return rows, random.long()

    def hide(self, tokens: Int[Tensor, "B T"]) -> tuple[Int[Tensor, "B T"], Int[Tensor, "B N"]]:
        """The tokens with some of them hidden, and the positions that are predicted: in every row as many, as in the
        authors' code, so that shapes are static. Special tokens are never chosen."""
        drawn = random_rows(tokens)
        for special in (self.config.classify, self.config.separator):
            if special is not None:
                drawn = torch.where(tokens == special, -1.0, drawn)
        count = max(1, round((tokens.shape[1] - 3 * self.config.pairs) * self.config.masked))
        chosen = drawn.topk(count, dim=1).indices
        own, how = tokens.gather(1, chosen), random_rows(chosen)
        random = (random_rows(chosen).double() * self.config.vocabulary).long()
        replaced = torch.where(how < 0.8, self.config.mask or 0, torch.where(how < 0.9, random, own))
        return tokens.scatter(1, chosen, replaced), chosen
