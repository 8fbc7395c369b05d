"""The tables of a recipe as frozen dataclasses that check their own values."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from longspan import config
from longspan.data import CORPORA
from longspan.nn.model_config import require

# Upper bounds of all keys of a recipe's tables; those of models are in nn/model_config.py.
STEPS, TOKENS, SECONDS = 10**12, 10**18, 10**10
LARGEST: dict[str, config.Bound] = {"steps": STEPS, "tokens": TOKENS, "seconds": SECONDS, "seed": 2**63 - 1}
LARGEST |= dict.fromkeys(("segment", "memory"), (STEPS, 2**20)) | {"batch": (STEPS, 2**24), "accumulate": 2**24}
LARGEST |= dict.fromkeys(("warmup", "average_from", "validate_every", "save_every"), STEPS)
LARGEST |= dict.fromkeys(("average_patience", "patience", "keep", "minimum"), STEPS)
LARGEST |= {"validate_tokens": TOKENS, "parameters": TOKENS, "segment_jitter": 2**12, "overlap": 2**20}
LARGEST |= dict.fromkeys(("lr", "muon_lr", "weight_decay", "clip", "spike", "score"), 1e38)  # the range of float32
LARGEST |= dict.fromkeys(("betas", "epsilon", "muon_momentum", "lr_floor", "cooldown"), 1)
LARGEST |= dict.fromkeys(("weight_dropout", "average_decay"), 1) | dict.fromkeys(("clamp", "pointer", "streams"), 2**20)
LARGEST |= {"temperature": 100, "discount": 100, "layer_decay": 1, "unfreeze_every": STEPS}
LARGEST |= {"embedding_rate": 1000}

SETTINGS = ("memory", "clamp", "same_length", "pointer")
"""Reading settings that only families with memory use."""
Steps = tuple[tuple[int, int], ...]
"""A value that changes with the step: ((0, 64), (1000, 128)) is 64 until step 1000, then 128."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The text of a run."""

    corpus: str = "stdlib"
    """A file, a folder or the name of a corpus."""
    valid: str | None = None
    """A file or folder to validate on. It is never trained on, even if it is inside the corpus. Default: the
    validation split of the corpus."""
    test: str | None = None
    """A file or folder to test on. It is never trained on. Default: the test split of the
    corpus."""
    field: str | None = None
    """The key with the text in JSON lines, or the column with the text in tables. Default: text."""
    encoding: str | None = None
    """Text encoding of the files. Default: UTF-8."""
    tokenizer: str | None = None
    """A name, or the path of a tokenizer.json, of its folder, or of a file with one word per line. Default: the
    tokenizer of the corpus."""
    minimum: int | None = None
    """Minimum count of a word: words that are rarer in the training text become <unk>. Default: the minimum of the
    corpus, or 1."""
    documents: bool = True
    """Reset the memory at the start of every document."""
    reverse: bool = False
    """Read every document from its last token to its first: a backward language model."""
    sentences: bool = False
    """Treat every sentence of a corpus such as lm1b as a document, instead of reading all as one stream."""

    def __post_init__(self) -> None:
        config.require_bounds(self, "data", LARGEST)
        require(self.minimum is None or self.minimum >= 1, f"data.minimum={self.minimum} must be at least 1")
        require(
            self.minimum is None or self.tokenizer == "words",
            f"data.minimum={self.minimum} needs data.tokenizer='words'; set it, or leave out data.minimum",
        )
        for name, path in self.held_out.items():
            require(path != "", f"data.{name} is empty; use a file or a folder, or leave it out")

    @property
    def held_out(self) -> dict[str, str]:
        """The splits that have a file or folder of their own."""
        return {name: path for name in ("valid", "test") if (path := getattr(self, name)) is not None}

    @property
    def paths(self) -> dict[str, str]:
        """Keys whose value is a file or folder, not a known corpus."""
        return ({} if self.corpus in CORPORA else {"corpus": self.corpus}) | self.held_out


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """How a model is trained. The first limit in steps, tokens or seconds that is reached ends the run."""

    steps: int | None = None
    """Maximum number of weight updates. A run needs at least one limit (steps, tokens or seconds) and ends at the first
    that it reaches. Default: no limit."""
    tokens: int | None = None
    """Maximum number of training tokens. Default: no limit."""
    seconds: float | None = None
    """Maximum time in seconds, including validation and saving. Default: no limit."""
    batch: int | Steps = 16
    """Batch size: number of text streams that are read in parallel. [[0, 64], [1000, 128]] uses 64 until step 1000,
    then 128."""
    segment: int | Steps | None = None
    """Tokens per stream and step, or [step, value] pairs as for batch. Default: set by the family."""
    segment_jitter: float = 0.0
    """Standard deviation of the segment length, which is then random; 0 is off."""
    overlap: int = 0
    """Number of tokens before each segment that are read again, without a loss. Unlike those of a memory, their hidden
    states get gradients and have the dropout masks of the segment. Needs a model without memory or pointer."""
    memory: int | Steps | None = None
    """Number of earlier positions that a layer can attend to in training, or [step, value] pairs as for batch. Default:
    set by the family."""
    clamp: int | None = None
    """Distances beyond this share one position key; 0 is off. Default: set by the family."""
    same_length: bool | None = None
    """Every query attends to exactly `memory` keys. Default: set by the family."""
    pointer: int | None = None
    """Number of earlier positions that the pointer can copy from; 0 is off. Default: set by the family."""
    accumulate: int = 1
    """Gradient accumulation: number of parts into which a batch is split, to save memory."""
    optimizer: Literal["adamw", "muon", "sgd"] = "adamw"
    """The optimizer; muon updates matrices with Muon and all other weights with AdamW."""
    lr: float = 2.5e-4
    """Learning rate of AdamW or SGD."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Betas of AdamW."""
    epsilon: float = 1e-8
    """Epsilon of AdamW."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    muon_lr: float = 0.02
    """Learning rate of Muon."""
    muon_momentum: float = 0.95
    """Momentum of Muon."""
    schedule: Literal["cosine", "inverse-sqrt", "linear", "constant", "slanted-triangular"] = "cosine"
    """Learning rate schedule after the warm-up."""
    warmup: int = 0
    """Number of warm-up steps, in which learning rates rise linearly from 0."""
    lr_floor: float = 0.0
    """Final learning rate, as a fraction of the peak rate."""
    cooldown: float = 0.0
    """Fraction of the run, at its end, in which learning rates fall linearly to the floor."""
    layer_decay: float = 1.0
    """Layer-wise learning rate decay: the rate of each layer is this times the rate of the layer above it."""
    embedding_rate: float = 1.0
    """Learning rate of the embedding and of a tied softmax, as a multiple of the other rates."""
    unfreeze_every: int | float = 0
    """Gradual unfreezing: train only the last layer at first, and unfreeze one more each time this many steps have
    passed, or this fraction of the run. 0 trains all layers from the start."""
    clip: float = 0.25
    """Clip gradients to this norm; 0 is off."""
    spike: float = 10.0
    """Skip updates whose gradient norm is this many standard deviations above its running mean; 0 is off."""
    locked_dropout: bool = False
    """Variational dropout: use the same dropout mask at all positions of a segment."""
    weight_dropout: float = 0.0
    """Dropout rate of the weight matrices."""
    averaging: Literal["none", "ema", "asgd"] = "none"
    """Weight averaging: an exponential moving average (ema), or the plain mean since average_from (asgd)."""
    average_decay: float = 0.999
    """Decay of the exponential moving average."""
    average_from: int | float = 0
    """Step after which averaging starts, or a fraction of the run (above 0 and below 1)."""
    average_patience: int = 0
    """Number of validations without improvement after which asgd starts; 0 is off."""
    precision: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    """Precision of matrix products; auto is bfloat16 on CUDA and float32 on a CPU."""
    compile: bool | None = None
    """Use torch.compile. Default: true on CUDA, false on a CPU."""
    cuda_graph: bool = False
    """Capture the training step in a CUDA graph."""
    checkpoint_activations: bool = False
    """Activation checkpointing: recompute layers in the backward pass, to save memory."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """With several processes, replicate the weights (ddp) or shard them (fsdp)."""
    validate_every: int = 0
    """Number of steps between validations; 0 is off."""
    validate_tokens: int | None = None
    """Number of tokens of the validation split to score. Default: all."""
    save_every: int = 1000
    """Number of steps between checkpoints."""
    keep: int = 3
    """Number of checkpoints to keep."""
    patience: int = 0
    """Early stopping: number of validations without improvement after which the run ends; 0 is off."""
    seed: int = 1111
    """Random seed of weights and dropout."""
    init_from: str | None = None
    """A model to take the initial weights from, with its config and tokenizer. Default: random weights."""

    def __post_init__(self) -> None:
        config.require_bounds(self, "training", LARGEST)
        limits = (self.steps, self.tokens, self.seconds)
        require(
            any(v is not None for v in limits),
            "training.steps is missing; set training.steps, training.tokens or training.seconds",
        )
        for name in ("steps", "tokens", "seconds", "lr", "muon_lr", "epsilon", "embedding_rate"):
            value = getattr(self, name)
            require(value is None or value > 0, f"training.{name}={value} must be above 0")
        require(
            self.validate_tokens is None or self.validate_tokens >= 2,
            f"training.validate_tokens={self.validate_tokens} must be at least 2; leave it out to score all tokens",
        )
        for name in ("accumulate", "save_every", "keep"):
            require(getattr(self, name) >= 1, f"training.{name}={getattr(self, name)} must be at least 1")
        for name in ("overlap", "warmup", "weight_decay", "clip", "spike", "validate_every", "patience", "seed"):
            require(getattr(self, name) >= 0, f"training.{name}={getattr(self, name)} must not be negative")
        require(0 < self.layer_decay <= 1, f"training.layer_decay={self.layer_decay} must be above 0 and at most 1")
        for name in ("segment_jitter", "average_from", "average_patience", "unfreeze_every"):
            require(getattr(self, name) >= 0, f"training.{name}={getattr(self, name)} must not be negative")
        for name in ("weight_dropout", "muon_momentum", "average_decay", "lr_floor", "cooldown"):
            require(0 <= getattr(self, name) < 1, f"training.{name}={getattr(self, name)} must be in [0, 1)")
        require(all(0 <= b < 1 for b in self.betas), f"training.betas={list(self.betas)} must both be in [0, 1)")
        for name in ("average_from", "unfreeze_every"):
            value = getattr(self, name)
            require(
                isinstance(value, int) or value < 1,
                f"training.{name}={value} must be a number of steps (an integer) or a fraction of the run below 1",
            )
        self._check_combinations()
        if self.average_patience:
            self._check_trigger()
        for name, least in (("batch", 1), ("segment", 1), ("memory", 0)):
            _check_steps(name, getattr(self, name), least)
        for name in ("clamp", "pointer"):
            value = getattr(self, name)
            require(value is None or value >= 0, f"training.{name}={value} must not be negative; 0 turns it off")
        for _, rows in as_steps(self.batch):
            require(
                rows % self.accumulate == 0,
                f"training.accumulate={self.accumulate} does not divide training.batch={rows}; use a batch that is a "
                f"multiple of {self.accumulate}",
            )

    def _check_combinations(self) -> None:
        """Keys that exclude or need each other."""
        require(
            not (self.unfreeze_every and (self.cuda_graph or self.compile)),
            f"training.unfreeze_every={self.unfreeze_every} changes what a step computes; turn off "
            "training.compile and training.cuda_graph",
        )
        require(
            self.patience == 0 or self.validate_every > 0,
            f"training.patience={self.patience} counts validations; set training.validate_every",
        )
        require(
            not (self.compile and self.segment_jitter),
            f"training.segment_jitter={self.segment_jitter} changes the segment length, and "
            "training.compile=true would compile every length; turn off one of them",
        )
        for name in ("segment_jitter", "checkpoint_activations"):
            require(
                not (self.cuda_graph and getattr(self, name)),
                "training.cuda_graph=true needs steps with static shapes, which "
                f"training.{name}={getattr(self, name)} prevents; turn off one of them",
            )
        require(
            not (self.parallel == "fsdp" and self.weight_dropout),
            f"training.parallel='fsdp' shards the weights, so training.weight_dropout={self.weight_dropout} "
            "cannot be applied; use 'ddp'",
        )

    def _check_trigger(self) -> None:
        given = f"training.average_patience={self.average_patience}"
        require(self.averaging == "asgd", f"{given} needs training.averaging='asgd', not '{self.averaging}'")
        require(self.validate_every > 0, f"{given} counts validations; set training.validate_every")
        require(
            self.average_from == 0,
            f"{given} and training.average_from={self.average_from} both set the start of averaging; use only "
            "one of them",
        )


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """How the trained model is read. Keys without another default have their value at the end of training."""

    segment: int | None = None
    """Tokens per segment. Default: as in training."""
    memory: int | None = None
    """Number of earlier positions that a layer can attend to. Default: as in training."""
    clamp: int | None = None
    """Distances beyond this share one position key; 0 is off. Default: as in training if set there, else the longest
    distance in training."""
    same_length: bool | None = None
    """Every query attends to exactly `memory` keys. Default: as in training."""
    pointer: int | None = None
    """Number of earlier positions that the pointer can copy from; 0 is off. Default: as in training."""
    discount: float | None = None
    """Lower attention scores beyond the clamp by this times log(distance / clamp). Default: 2 for longspan-xl with the
    default clamp, else 0."""
    temperature: float | None = None
    """Divide logits by this before the softmax. Default: 1."""
    streams: int = 1
    """Number of parts into which the text is cut, to read them in parallel."""

    def __post_init__(self) -> None:
        config.require_bounds(self, "evaluation", LARGEST)
        for name, least in (("segment", 1), ("memory", 0), ("clamp", 0), ("pointer", 0), ("streams", 1)):
            value = getattr(self, name)
            require(value is None or value >= least, f"evaluation.{name}={value} must be at least {least}")

    @property
    def settings(self) -> dict[str, Any]:
        """The reading settings that are set."""
        return settings_in(self, ("segment", *SETTINGS, "discount", "temperature"))


@dataclass(frozen=True, kw_only=True)
class ExpectedConfig:
    """The published score and size, with their source."""

    score: float | None = None
    unit: str | None = None
    parameters: int | None = None
    source: str | None = None

    def __post_init__(self) -> None:
        config.require_bounds(self, "expected", LARGEST)


@dataclass(frozen=True, kw_only=True)
class ResultConfig:
    """The score of a run of this recipe, its text, training time and device."""

    score: float | None = None
    on: str | None = None
    unit: str | None = None
    uses: str | None = None
    """What a published score does not use, for example a pointer. None: the score is comparable."""
    seconds: float | None = None
    device: str | None = None

    def __post_init__(self) -> None:
        config.require_bounds(self, "result", LARGEST)


SECTIONS: dict[str, type] = {
    "data": DataConfig,
    "training": TrainingConfig,
    "evaluation": EvaluationConfig,
    "expected": ExpectedConfig,
    "result": ResultConfig,
}


def as_steps(value: int | Steps) -> Steps:
    return ((0, value),) if isinstance(value, int) else value


def value_at(schedule: int | Steps, step: int) -> int:
    """The value of a schedule at `step` (counted from 0)."""
    return next(value for start, value in reversed(as_steps(schedule)) if start <= step)


def settings_in(table: Any, names: Sequence[str]) -> dict[str, Any]:
    return {name: value for name in names if (value := getattr(table, name)) is not None}


def _check_steps(name: str, value: int | Steps | None, least: int) -> None:
    if value is None:
        return
    pairs = as_steps(value)
    steps = [step for step, _ in pairs]
    require(
        steps[:1] == [0] and all(a < b for a, b in itertools.pairwise(steps)),
        f"training.{name}={config.shown(value)} must list [step, value] pairs with increasing steps from step 0",
    )
    for _, item in pairs:
        require(item >= least, f"training.{name}={item} must be at least {least}")
