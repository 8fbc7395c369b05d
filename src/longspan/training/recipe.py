"""A recipe: everything that decides what a run computes, as TOML and as frozen dataclasses."""

import dataclasses
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from longspan import config
from longspan.data import CORPORA
from longspan.errors import ConfigError, UnknownNameError
from longspan.layers.model_config import WEIGHTLESS, require
from longspan.models.families import family

# The largest value of every key of a recipe's tables, as `layers/model_config.py` has it for models.
STEPS, TOKENS, SECONDS = 10**12, 10**18, 10**10
LARGEST: dict[str, config.Bound] = {"steps": STEPS, "tokens": TOKENS, "seconds": SECONDS, "seed": 2**63 - 1}
LARGEST |= dict.fromkeys(("segment", "memory"), (STEPS, 2**20)) | {"batch": (STEPS, 2**24), "accumulate": 2**24}
LARGEST |= dict.fromkeys(("warmup", "average_from", "validate_every", "save_every"), STEPS)
LARGEST |= dict.fromkeys(("average_patience", "patience", "keep", "minimum"), STEPS)
LARGEST |= {"validate_tokens": TOKENS, "parameters": TOKENS, "segment_jitter": 2**12}
LARGEST |= dict.fromkeys(("lr", "muon_lr", "weight_decay", "clip", "spike", "score"), 1e38)  # as a float32 has it
LARGEST |= dict.fromkeys(("betas", "epsilon", "muon_momentum", "lr_floor", "cooldown"), 1)
LARGEST |= dict.fromkeys(("weight_dropout", "average_decay"), 1) | {"clamp": 2**20, "copy": 2**20, "lanes": 2**20}

S = TypeVar("S")
Steps = tuple[tuple[int, int], ...]
"""A value that changes with the step: ((0, 64), (1000, 128)) is 64 until step 1000, then 128."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What is read and how: `tokens` names a reading, the corpus's own unless given, and words that come fewer than
    `minimum` times in the training text are <unk>; `documents` are forgotten at their ends. `valid` and `test` are
    files or folders to take for these splits, and are not trained on where they lie in the corpus."""

    corpus: str = "stdlib"
    valid: str | None = None
    test: str | None = None
    tokens: str | None = None
    minimum: int | None = None
    documents: bool = True

    def __post_init__(self) -> None:
        config.require_bounds(self, "data", LARGEST)
        require(self.minimum is None or self.minimum >= 1, f"data.minimum={self.minimum} must be at least 1")
        require(
            self.minimum is None or self.tokens == "words",
            f"data.minimum={self.minimum} counts words; set data.tokens to words too",
        )
        for name, path in self.held_out.items():
            require(path != "", f"data.{name} is empty; give a file or a folder, or leave it out")

    @property
    def held_out(self) -> dict[str, str]:
        """The files or folders that are given for a split."""
        return {name: path for name in ("valid", "test") if (path := getattr(self, name)) is not None}

    @property
    def paths(self) -> dict[str, str]:
        """Keys that name files or folders of the user, not a known corpus."""
        return ({} if self.corpus in CORPORA else {"corpus": self.corpus}) | self.held_out


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """How a model is trained. A limit may be given in steps, tokens or seconds; the first one met ends the run."""

    steps: int | None = None
    tokens: int | None = None
    seconds: float | None = None
    batch: int | Steps = 16
    segment: int | Steps | None = None
    segment_jitter: float = 0.0
    memory: int | Steps | None = None
    accumulate: int = 1
    optimizer: Literal["adamw", "muon", "sgd"] = "adamw"
    lr: float = 2.5e-4
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    muon_lr: float = 0.02
    muon_momentum: float = 0.95
    schedule: Literal["cosine", "inverse-sqrt", "linear", "constant"] = "cosine"
    warmup: int = 0
    lr_floor: float = 0.0
    cooldown: float = 0.0
    clip: float = 0.25
    spike: float = 10.0
    locked_dropout: bool = False
    weight_dropout: float = 0.0
    averaging: Literal["none", "ema", "asgd"] = "none"
    average_decay: float = 0.999
    average_from: int = 0
    average_patience: int = 0
    precision: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    compile: bool | None = None
    record: bool = False
    checkpoint_activations: bool = False
    validate_every: int = 0
    validate_tokens: int | None = None
    save_every: int = 1000
    keep: int = 3
    patience: int = 0
    seed: int = 1111

    def __post_init__(self) -> None:
        config.require_bounds(self, "training", LARGEST)
        limits = (self.steps, self.tokens, self.seconds)
        require(
            any(v is not None for v in limits), "training.steps is missing; give a limit in steps, tokens or seconds"
        )
        for name in ("steps", "tokens", "seconds", "lr", "muon_lr", "epsilon"):
            value = getattr(self, name)
            require(value is None or value > 0, f"training.{name}={value} must be above 0")
        for name in ("accumulate", "save_every", "keep"):
            require(getattr(self, name) >= 1, f"training.{name}={getattr(self, name)} must be at least 1")
        for name in ("warmup", "weight_decay", "clip", "spike", "validate_every", "patience", "seed"):
            require(getattr(self, name) >= 0, f"training.{name}={getattr(self, name)} must not be negative")
        for name in ("segment_jitter", "average_from", "average_patience"):
            require(getattr(self, name) >= 0, f"training.{name}={getattr(self, name)} must not be negative")
        for name in ("weight_dropout", "muon_momentum", "average_decay", "lr_floor", "cooldown"):
            require(0 <= getattr(self, name) < 1, f"training.{name}={getattr(self, name)} must lie in [0, 1)")
        require(all(0 <= b < 1 for b in self.betas), f"training.betas={list(self.betas)} must both lie in [0, 1)")
        require(
            self.patience == 0 or self.validate_every > 0,
            f"training.patience={self.patience} counts validations; set training.validate_every too",
        )
        require(
            not (self.compile and self.segment_jitter),
            f"training.segment_jitter={self.segment_jitter} gives every step another length, and training.compile=true "
            "would compile each; turn one of them off",
        )
        for name in ("segment_jitter", "checkpoint_activations"):
            require(
                not (self.record and getattr(self, name)),
                f"training.record=true replays one step, which training.{name}={getattr(self, name)} does not allow; "
                "turn one of them off",
            )
        if self.average_patience:
            self._check_trigger()
        for name, least in (("batch", 1), ("segment", 1), ("memory", 0)):
            _check_steps(name, getattr(self, name), least)
        for _, rows in as_steps(self.batch):
            require(
                rows % self.accumulate == 0,
                f"training.accumulate={self.accumulate} does not divide training.batch={rows}",
            )

    def _check_trigger(self) -> None:
        given = f"training.average_patience={self.average_patience}"
        require(self.averaging == "asgd", f"{given} is when training.averaging='asgd' begins; set that too")
        require(self.validate_every > 0, f"{given} counts validations; set training.validate_every too")
        require(
            self.average_from == 0,
            f"{given} and training.average_from={self.average_from} both say when averaging begins; set one of them",
        )


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """How the trained model is scored; what is left out is as in training."""

    segment: int | None = None
    memory: int | None = None
    clamp: int | None = None
    same_length: bool | None = None
    copy: int | None = None
    lanes: int = 1

    def __post_init__(self) -> None:
        config.require_bounds(self, "evaluation", LARGEST)
        for name, least in (("segment", 1), ("memory", 0), ("clamp", 0), ("copy", 0), ("lanes", 1)):
            value = getattr(self, name)
            require(value is None or value >= least, f"evaluation.{name}={value} must be at least {least}")

    @property
    def settings(self) -> dict[str, Any]:
        """Those of the model's settings that are given."""
        return {key: value for key in WEIGHTLESS if (value := getattr(self, key)) is not None}


@dataclass(frozen=True, kw_only=True)
class ExpectedConfig:
    """What the recipe should come to, and who says so."""

    score: float | None = None
    unit: str | None = None
    parameters: int | None = None
    source: str | None = None

    def __post_init__(self) -> None:
        config.require_bounds(self, "expected", LARGEST)


@dataclass(frozen=True, kw_only=True)
class ReachedConfig:
    """What the recipe has come to here, in the unit of `expected`, and on which text; how long it took, on what."""

    score: float | None = None
    on: str | None = None
    unit: str | None = None
    seconds: float | None = None
    device: str | None = None

    def __post_init__(self) -> None:
        config.require_bounds(self, "reached", LARGEST)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A run before it has met its data; `model` is the config of `family`."""

    name: str
    family: str
    model: Any
    training: TrainingConfig
    data: DataConfig = field(default_factory=DataConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    expected: ExpectedConfig = field(default_factory=ExpectedConfig)
    reached: ReachedConfig = field(default_factory=ReachedConfig)

    def __post_init__(self) -> None:
        require(
            not (self.training.record and self.model.cutoffs),
            f"training.record=true replays fixed shapes, and with model.cutoffs={list(self.model.cutoffs)} those of "
            "the softmax depend on the text; turn one of them off",
        )

    def with_vocabulary(self, size: int) -> "Recipe":
        """The same recipe for a text of that many symbols: the data knows, a preset only states."""
        return dataclasses.replace(self, model=dataclasses.replace(self.model, vocabulary=size))

    def to_toml(self) -> str:
        tables = {name: config.plain(getattr(self, name)) for name in SECTIONS}
        return config.to_toml(
            {"name": self.name, "model": {"family": self.family, **config.plain(self.model)}} | tables
        )


SECTIONS: dict[str, type] = {
    "data": DataConfig,
    "training": TrainingConfig,
    "evaluation": EvaluationConfig,
    "expected": ExpectedConfig,
    "reached": ReachedConfig,
}


def as_steps(value: int | Steps) -> Steps:
    return ((0, value),) if isinstance(value, int) else value


def _check_steps(name: str, value: int | Steps | None, least: int) -> None:
    if value is None:
        return
    pairs = as_steps(value)
    steps = [step for step, _ in pairs]
    require(
        steps[:1] == [0] and all(a < b for a, b in itertools.pairwise(steps)),
        f"training.{name}={config.shown(value)} must list [step, value] pairs with rising steps, the first at step 0",
    )
    for _, item in pairs:
        require(item >= least, f"training.{name}={item} must be at least {least}")


def recipe_folders() -> list[Path]:
    """Where recipes are looked up by name: inside the installed package, or beside its source."""
    package = Path(__file__).parents[1]
    return [folder for folder in (package / "recipes", package.parents[1] / "recipes") if folder.is_dir()]


def recipe_names() -> list[str]:
    return sorted({path.stem for folder in recipe_folders() for path in folder.glob("*.toml")})


def find_recipe(name_or_path: str | Path) -> Path:
    """The file of a recipe: a path as it is, a name in the recipes that came with longspan, or a file of that name."""
    text = str(name_or_path)
    if text.endswith(".toml") or "/" in text:
        if not Path(text).is_file():
            raise ConfigError(f"there is no recipe file {text}; known by name: {', '.join(recipe_names())}")
        return Path(text)
    for folder in recipe_folders():
        if (folder / f"{text}.toml").is_file():
            return folder / f"{text}.toml"
    if Path(text).is_file():
        return Path(text)
    raise UnknownNameError("recipe", text, recipe_names())


def load_recipe(name_or_path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe of that name or file, with `key=value` overrides laid on top."""
    path = find_recipe(name_or_path)
    values = config.read_toml(path)
    over = config.parse_overrides(overrides)
    try:
        return build_recipe(config.merge(values, over), path.stem)
    except ConfigError as error:
        line = _line_of(str(error), path, over)
        if line is None:
            raise
        raise ConfigError(f"{path.name}, line {line}: {error}") from None


def held_out_of(model: Path, corpus: str) -> dict[str, str]:
    """What the recipe of a run gives for valid and test, where `model` is of that run and `corpus` what it reads.

    Without it, a split of that corpus would hold text that the run was trained on.
    """
    for folder in (model, model.parent):
        try:
            data = config.build(DataConfig, config.read_toml(folder / "recipe.toml").get("data", {}), "data")
        except (ConfigError, AttributeError):  # no recipe, or none that can be read
            continue
        return data.held_out if Path(data.corpus).resolve() == Path(corpus).resolve() else {}
    return {}


def build_recipe(values: Mapping[str, Any], name: str = "recipe") -> Recipe:
    """A recipe from plain values, every key of them known and of its type."""
    tables = dict(values)
    name = tables.pop("name", name)
    for key, table in tables.items():
        if key not in ("model", *SECTIONS):
            raise UnknownNameError("table", key, ["model", *SECTIONS])
        if not isinstance(table, Mapping):
            raise ConfigError(f"{key}={config.shown(table)} is a plain value; it takes a table of keys")
    if not isinstance(name, str):
        raise ConfigError(f"name={config.shown(name)} is of the wrong type; it takes a word")
    config.require_unicode(name, "name")
    model = dict(tables.get("model", {}))
    chosen = model.pop("family", "transformer-xl")
    if not isinstance(chosen, str):
        raise ConfigError(f"model.family={config.shown(chosen)} is of the wrong type; it takes a word")
    cls = family(chosen).Config
    sections: dict[str, Any] = {key: config.build(c, tables.get(key, {}), key) for key, c in SECTIONS.items()}
    return Recipe(name=name, family=chosen, model=config.build(cls, model, "model"), **sections)


def _line_of(sentence: str, path: Path, over: Mapping[str, Any]) -> int | None:
    """The line of the file that holds the key a sentence speaks of; None if an override set it, or none is named."""
    lines = path.read_text(encoding="utf-8-sig").splitlines()
    keys = re.findall(r"\b([a-z]\w*)\.([a-z]\w*)", sentence)
    if sentence.startswith("no family called"):
        keys = [("model", "family")]
    for table, key in keys:
        if key in over.get(table, {}):
            return None
        if number := _line_of_key(lines, table, key):
            return number
    for found in re.finditer(r"no table called '([^']+)'|^(\w+)=.* is a plain value", sentence):
        table = found[1] or found[2]
        if table in over:
            return None
        name = re.escape(table)
        for number, line in enumerate(lines, start=1):
            if re.match(rf"\s*(\[+\s*{name}\s*[\].]|{name}\s*[.=])", line):
                return number
    return None


def _line_of_key(lines: Sequence[str], table: str, key: str) -> int | None:
    """Where a key is given: under its table's header, dotted, inside an inline table, or as a header of its own."""
    name = rf"[\"']?{re.escape(key)}[\"']?"
    outside = rf"\s*{table}\s*(\.\s*{name}\s*=|=\s*\{{.*\b{name}\s*=)"
    inside = ""
    for number, line in enumerate(lines, start=1):
        if header := re.match(r"\s*\[+([^\]]+)\]", line):
            inside = header[1].strip()
            if re.fullmatch(rf"{table}\s*\.\s*{name}", inside):
                return number
        elif inside in ("", table) and re.match(rf"\s*{name}\s*=" if inside else outside, line):
            return number
    return None
