"""TaskModel: a language model with a classifier or a tagger, for documents of any length. docs/transfer.md

A document is read one segment at a time, and the language model's memory connects the segments. Its pooled hidden
states are part of the state, so a document can be cut anywhere with the same result:

    state = model.open_document(batch)
    state = model.read(tokens, state)             # any number of times
    scores = model.document_scores(state)         # [B, labels]

The wrapped model stays a language model: scoring and generation work with it as before.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, cast

import torch
from torch.nn import functional as F

from longspan import config as configs
from longspan.contract import Head, LanguageModel, State
from longspan.errors import ConfigError
from longspan.hints import Hints
from longspan.models.families import create, family
from longspan.nn.model_config import require
from longspan.nn.precision import wide
from longspan.nn.whole_batch import mean_of_marked
from longspan.reading import Reading
from longspan.shapes import Bool, Float, Int, Tensor
from longspan.transfer.batches import IGNORED
from longspan.transfer.features import Features, ScalarMix, combine, width_of
from longspan.transfer.formats import MILLIONTHS
from longspan.transfer.heads import Classifier, Pool
from longspan.transfer.tagger import BiLSTMCRF
from longspan.transfer.tasks.task import Kind

LARGEST: dict[str, configs.Bound] = {"vocabulary": 2**24, "choices": 2**10}
LARGEST |= dict.fromkeys(("hidden", "crf", "longest"), 2**20)
LARGEST |= {"dropout": 1, "lm_weight": 1e6, "low": 1e9, "high": 1e9}


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """A model of a family, and what is added for a task."""

    base_family: str = "transformer-xl"
    base: dict[str, Any] = field(default_factory=dict)
    """The config of the wrapped model."""
    vocabulary: int = 256
    task: str = ""
    kind: Kind = "single"
    labels: tuple[str, ...] = ("0", "1")
    metrics: tuple[str, ...] = ("accuracy",)
    texts: tuple[str, ...] = ("text",)
    """The keys of the texts in a row of data."""
    symmetric: bool = False
    """A causal model reads a pair in both orders, as it does for a similarity."""
    choices: int = 2
    low: float = 0.0
    high: float = 1.0
    """The range of scores in training: the model predicts (score - low) / (high - low)."""
    pooling: Literal["last", "mean", "concat"] = "last"
    features: Features = "last"
    normalised: bool = False
    """Normalise the vector of every layer (Peters et al. 2018, section 3.2), and sums of them. The layers of a pre-norm
    model need it, because their scale grows with depth, except for the last."""
    hidden: int = 0
    """Units of a hidden layer with batch norm in the classifier; 0 for none."""
    crf: int = 0
    """Units of a BiLSTM-CRF tagger, per direction, in place of a linear one; 0 for none."""
    dropout: float = 0.1
    lm_weight: float = 0.0
    """Weight of the language model's loss on the task's texts (Radford et al. 2018)."""
    frozen: bool = False
    """Train the classifier only."""
    reverse: bool = False
    """Read texts from their end, with a backward language model (`data.reverse`)."""
    longest: int | None = None
    """Tokens of a sequence; longer texts are shortened. Default: no limit, or a segment without memory."""

    def __post_init__(self) -> None:
        configs.require_bounds(self, "model", LARGEST)
        require(not (self.reverse and self.kind == "tags"), "model.reverse=true has no effect on tags; leave it out")
        require(bool(self.labels) or self.kind in ("similarity", "choice"), "model.labels is empty; name the classes")
        require(
            not (self.hidden and self.kind == "tags"),
            f"model.hidden={self.hidden} is a layer for whole texts; leave it out for tags, or use model.crf",
        )
        require(not self.crf or self.kind == "tags", f"model.crf={self.crf} needs a task of tags, not {self.kind!r}")
        for name in ("hidden", "crf", "lm_weight"):
            require(getattr(self, name) >= 0, f"model.{name}={getattr(self, name)} must not be negative")
        require(0 <= self.dropout < 1, f"model.dropout={self.dropout} must be in [0, 1)")
        require(self.longest is None or self.longest >= 8, f"model.longest={self.longest} must be at least 8")
        require(self.low < self.high, f"model.low={self.low} must be below model.high={self.high}")
        self.base_config  # an invalid config is an error here  # noqa: B018

    @property
    def base_config(self) -> Any:
        known = family(self.base_family)
        if issubclass(known, TaskModel):
            raise ConfigError(f"model.base_family={self.base_family!r} is already a task; use its base")
        return configs.build(known.Config, {**self.base, "vocabulary": self.vocabulary}, "model.base")

    @property
    def cutoffs(self) -> tuple[int, ...]:
        return self.base_config.cutoffs

    @property
    def outputs(self) -> int:
        return 1 if self.kind in ("similarity", "choice") else len(self.labels)


class TaskModel(LanguageModel):
    Config: ClassVar[type] = TaskConfig
    settings = frozenset(configs.keys(Reading))

    def __init__(self, config: TaskConfig) -> None:
        super().__init__(config)
        self.base = create(config.base_family, config.base_config)
        widths = self._widths()
        self.width = width_of(widths, config.features)
        inputs = self.width * (3 if config.pooling == "concat" and config.kind != "tags" else 1)
        self.mix = ScalarMix(len(widths)) if config.features == "mix" else None
        self.classifier: Classifier | BiLSTMCRF
        if config.crf:
            self.classifier = BiLSTMCRF(inputs, config.crf, config.outputs, config.dropout)
        else:
            self.classifier = Classifier(inputs, config.outputs, config.hidden, config.dropout)
        if config.frozen:
            self.base.requires_grad_(False)

    def _widths(self) -> list[int]:
        """The widths of the embedding and of every layer's output."""
        made = self.config.base_config
        if hasattr(made, "feature_widths"):
            return list(made.feature_widths)
        layers = [outputs for _, outputs in made.widths] if hasattr(made, "widths") else [made.width] * made.layers
        return [made.width, *layers]

    @property
    def hints(self) -> Hints:  # type: ignore[override]
        own = self.base.hints
        return Hints(
            compile=False,
            compile_layers=own.compile and own.graph_safe,  # one graph without breaks
            shard_layers=own.shard_layers,
            graph_safe=own.graph_safe and not self.config.crf,  # the CRF loops over the words of a batch
        )

    @property
    def layers(self) -> Any:
        """Those of the wrapped model."""
        return getattr(self.base, "layers", ())

    @property
    def causal(self) -> bool:  # type: ignore[override]
        return self.base.causal

    @property
    def predicts_next(self) -> bool:  # type: ignore[override]
        return self.base.predicts_next

    @property
    def classify_at(self) -> Literal["first", "last", "both"]:  # type: ignore[override]
        return self.base.classify_at

    @property
    def _weight(self) -> Tensor:
        """A weight of the classifier: its device and dtype are those of the pool."""
        return next(self.classifier.parameters())

    @property
    def head(self) -> Head:  # type: ignore[override]
        return self.base.head

    @property
    def multiplied_parameters(self) -> int:
        """The head counts only if the language model's loss is used; else its table is just looked up."""
        if self.config.lm_weight:
            return self.parameter_count - self.base.parameter_count + self.base.multiplied_parameters
        parts = self.base.parameters_by_part()
        return self.parameter_count - parts.get("embedding", 0) - parts.get("head", 0)

    @property
    def inner_config(self) -> Any:
        return self.base.config

    def train(self, mode: bool = True) -> "TaskModel":
        super().train(mode)
        self.base.train(mode and not self.config.frozen)
        return self

    # As a language model.

    def check_reading(self, reading: Reading) -> None:
        self.base.check_reading(reading)

    def has_memory(self, reading: Reading | None = None) -> bool:
        return self.base.has_memory(reading or self.reading)

    def reach(self, reading: Reading | None = None) -> int:
        return self.base.reach(reading or self.reading)

    def initial_state(
        self, batch: int = 1, reading: Reading | None = None, *, trainable: bool | None = None, filled: bool = False
    ) -> State:
        reading = reading or self.reading
        if self.training:  # a batch is complete documents, so a state carries nothing to the next one
            self.check_reading(reading)
            return State((), torch.zeros(batch, dtype=torch.int64, device=self._weight.device), reading)
        return self.base.initial_state(batch, reading, trainable=trainable, filled=filled)

    def hidden_states(
        self, tokens: Int[Tensor, "B T"], state: State | None = None, starts: Bool[Tensor, "B T"] | None = None
    ) -> tuple[tuple[Tensor, ...], State]:
        hidden, after = self.base.hidden_states(tokens, self._continued(state, len(tokens)), starts)
        return hidden, state if self.training and state is not None else after

    def encode(
        self, tokens: Int[Tensor, "B T"], state: State | None = None, starts: Bool[Tensor, "B T"] | None = None
    ) -> tuple[tuple[Tensor, ...], State]:
        return self.base.encode(tokens, self._continued(state, len(tokens)), starts)

    def _continued(self, state: State | None, batch: int) -> State:
        """The state that the wrapped model continues from: a new one if the given one carries nothing."""
        if state is None or self.training:
            return self.base.initial_state(batch, self.reading if state is None else state.reading)
        return state

    def forward(
        self, tokens: Int[Tensor, "B T"], state: State | None = None, starts: Bool[Tensor, "B T"] | None = None
    ) -> tuple[Float[Tensor, "B T V"], State]:
        return self.base(tokens, self._continued(state, len(tokens)), starts)

    def losses(
        self,
        tokens: Int[Tensor, "B T"],
        targets: Int[Tensor, "B S"],
        state: State | None = None,
        starts: Bool[Tensor, "B T"] | None = None,
        *,
        last: int | None = None,
    ) -> tuple[Float[Tensor, "B S"], State]:
        return self.base.losses(tokens, targets, self._continued(state, len(tokens)), starts, last=last)

    # As a classifier.

    def open_document(self, batch: int, reading: Reading | None = None) -> State:
        """The state before a document: an empty memory and an empty pool."""
        state = self.base.initial_state(batch, reading or self.reading, trainable=self.training)
        pool = Pool.empty(batch, self.width, self._weight)
        return replace(state, caches=(*state.caches, pool))

    def read(self, tokens: Int[Tensor, "B T"], state: State, valid: Bool[Tensor, "B T"] | None = None) -> State:
        """The state after more tokens of every document. `valid` is false for padding, which may follow a document."""
        return self._read(tokens, state, valid)[-1]

    def _read(
        self, tokens: Int[Tensor, "B T"], state: State, valid: Bool[Tensor, "B T"] | None
    ) -> tuple[tuple[Tensor, ...], Tensor, State]:
        """The hidden states, the features and the state after one segment."""
        pool = cast(Pool, state.caches[-1])
        starts = None
        if valid is not None and not self.causal:
            starts = ~valid & torch.cat([torch.ones_like(valid[:, :1]), valid[:, :-1]], dim=1)  # padding begins
        hidden, after = self.base.encode(tokens, replace(state, caches=state.caches[:-1]), starts)
        features = self.features_of(hidden, self.config.features)
        valid = torch.ones_like(tokens, dtype=torch.bool) if valid is None else valid
        pool = pool.add(features, valid, first=self.classify_at == "first")
        return hidden, features, replace(after, caches=(*after.caches, pool))

    def features_of(self, hidden: Sequence[Float[Tensor, "B T _"]], how: str) -> Float[Tensor, "B T _"]:
        """The features of every position; `mix` uses the weights that were learned."""
        normalised = self.config.normalised
        if normalised:
            hidden = [F.layer_norm(h, h.shape[-1:]) for h in hidden]
        if self.mix is not None and how == "mix":
            return self.mix(hidden)
        features = combine(hidden, how)
        return F.layer_norm(features, features.shape[-1:]) if normalised else features

    def document_scores(self, state: State, rows: int = 1) -> Float[Tensor, "B C"]:
        """The scores of the labels of every document that was read; of an example, `rows` neighbouring documents."""
        vectors = cast(Pool, state.caches[-1]).vector(self.config.pooling).unflatten(0, (-1, rows))
        if self.config.kind == "choice":
            return self.classifier(vectors.flatten(0, 1)).view(-1, rows)
        return self.classifier(vectors.sum(1))

    def scores(
        self, tokens: Int[Tensor, "N T"], valid: Bool[Tensor, "N T"], reading: Reading | None = None, rows: int = 1
    ) -> tuple[Float[Tensor, "..."], Float[Tensor, ""]]:
        """Scores of complete documents: [examples, labels], or [documents, T, labels] for tags; with a CRF, the
        features of its tagger. Then the loss of the language model on them, if its weight is not 0."""
        state = self.open_document(len(tokens), reading)
        lm, pieces = tokens.new_zeros((), dtype=torch.float32), []
        for begin in range(0, tokens.shape[1], state.reading.segment):
            here = slice(begin, begin + state.reading.segment)
            hidden, features, state = self._read(tokens[:, here], state, valid[:, here])
            if self.config.kind == "tags":
                pieces.append(features)
            if self.config.lm_weight and self.causal:
                following = slice(begin + 1, begin + 1 + hidden[-1].shape[1])
                lm = lm + self._lm_loss(hidden[-1], tokens[:, following], valid[:, following], state.reading)
        lm = mean_of_marked(lm, valid[:, 1:])
        if self.config.kind == "tags":
            features = torch.cat(pieces, dim=1)
            return features if self.config.crf else self.classifier(features), lm
        return self.document_scores(state, rows), lm

    def _lm_loss(
        self, h: Float[Tensor, "N T D"], following: Int[Tensor, "N S"], valid: Bool[Tensor, "N S"], reading: Reading
    ) -> Float[Tensor, ""]:
        """The summed loss of the tokens that follow those of a segment. The last token of a document has none after it,
        so S is T or T - 1."""
        size = following.shape[1]
        if not size:
            return h.new_zeros(())
        losses = self.base.head.losses(h[:, :size], following, reading.temperature)
        return torch.where(valid, losses, 0.0).sum()

    def training_loss(
        self,
        tokens: Int[Tensor, "B T"],
        targets: Int[Tensor, "B T"],
        state: State | None = None,
        progress: float | Float[Tensor, ""] = 0.0,  # noqa: ARG002
        starts: Bool[Tensor, "B T"] | None = None,
    ) -> tuple[Float[Tensor, ""], State]:
        """The loss of a batch from `transfer.batches`. The state is returned as it is: documents do not continue."""
        state = self.initial_state(len(tokens)) if state is None else state
        batch, rows = len(tokens), self.rows
        documents = tokens.view(batch * rows, -1)
        padding = torch.zeros_like(documents, dtype=torch.bool) if starts is None else starts.view_as(documents)
        found, lm = self.scores(documents, padding.cumsum(1) == 0, state.reading, rows)
        loss = self.loss(found.to(wide(found.dtype)), targets.view(batch, rows, -1)[:, 0])
        return loss + self.config.lm_weight * lm, state

    def choose_tags(self, scores: Float[Tensor, "N T _"], marks: Sequence[Int[Tensor, "_"]]) -> list[list[int]]:
        """The tags of the words at these positions, from what `scores` returns."""
        if isinstance(self.classifier, BiLSTMCRF):
            return self.classifier.decode(scores, marks)
        best = scores.argmax(-1)
        return [row[places.to(row.device)].tolist() for row, places in zip(best, marks, strict=True)]

    @property
    def rows(self) -> int:
        """Sequences per example, as `transfer.formats` makes them."""
        c = self.config
        both = (c.symmetric or c.kind == "similarity") and self.causal and len(c.texts) == 2
        return c.choices if c.kind == "choice" else 2 if both else 1

    def loss(self, scores: Float[Tensor, "..."], targets: Int[Tensor, "B T"]) -> Float[Tensor, ""]:
        """Cross-entropy over classes, choices or words; the squared error of a similarity."""
        if self.config.kind == "similarity":
            wanted = (targets[:, 0] / MILLIONTHS - self.config.low) / (self.config.high - self.config.low)
            return F.mse_loss(scores[:, 0], wanted.to(scores.dtype))
        if isinstance(self.classifier, BiLSTMCRF):
            return self.classifier.loss(scores, targets)
        if self.config.kind == "tags":
            total = F.cross_entropy(scores.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
            return mean_of_marked(total, targets != IGNORED)
        return F.cross_entropy(scores, targets[:, 0])
