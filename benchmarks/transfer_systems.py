"""What benchmarks/transfer.py runs: the systems, their published settings, and the command of every row.

Rates of Transformers are for 25M parameters: 3e-4 is that of ELECTRA-small (14M; Clark et al. 2020) and the largest of
the compact BERTs (Turc et al. 2019). GPT, BERT and XLNet used 1e-5 to 6e-5 for 110M to 340M, with the same batch (32),
passes (3; 10 for small tasks), dropout (0.1) and weight of GPT's auxiliary loss (0.5). Dev decides between 1e-4 and
3e-4: XLNet is post-norm and needs 1e-4 on two tasks, as 1,500 steps showed; for GPT and Transformer-XL complete runs
differ little.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

IMDB, CONLL, ZERO_SHOT = ("imdb",), ("conll2003",), "zero-shot"
MUST = ("imdb", "conll2003", "sst2", "trec6", ZERO_SHOT)
"""The tasks with a target, in the order in which they are run."""
OTHER = ("rte", "cola", "mrpc", "sts-b", "copa", "cb")
LIKELIHOOD = "blimp,lambada,copa,wikitext2"
EPOCHS = {"imdb": 3, "sst2": 3, "conll2003": 10, "trec6": 15, "cola": 5, "mrpc": 8, "copa": 20, "cb": 20}
EPOCHS |= {"rte": 10, "sts-b": 10}
ESTIMATE = {"imdb": 150, "conll2003": 110, "sst2": 110, "trec6": 50, ZERO_SHOT: 70}
"""Seconds of a job with eight side by side on an H200, until one of its kind has finished. Others: 50."""


@dataclass(frozen=True)
class System:
    """A row of the table: a pre-trained model and how it is fine-tuned."""

    of: str
    """The system it belongs to, for `--systems`."""
    model: str
    """The name of its run below `--models`."""
    settings: tuple[str, ...] = ()
    lr: str = ""
    """The learning rate. Default: that of the settings or the recipe."""
    task_lr: dict[str, str] = field(default_factory=dict)
    """Those of tasks for which another one was best on dev."""
    recipe: str = "finetune"
    group: str = "systems"
    tasks: tuple[str, ...] = ()
    """The tasks it is for. Default: all that are chosen."""
    from_scratch: bool = False
    epochs: float | None = None
    language_model: str | None = None
    """The run that is scored by likelihood."""

    @property
    def all_settings(self) -> tuple[str, ...]:
        return (f"training.lr={self.lr}", *self.settings) if self.lr else self.settings


def transformer(name: str, *settings: str, scored: bool = True) -> System:
    return System(name, name, settings, lr="3e-4", language_model=name if scored else None)


LSTM_DROPOUT = ("dropout=0.2", "input_dropout=0.2", "hidden_dropout=0.15", "embedding_dropout=0.02")
ULMFIT = System(
    "ulmfit",
    "ulmfit",
    tuple(f"model.base.{rate}" for rate in (*LSTM_DROPOUT, "weight_dropout=0.25")),
    recipe="finetune-ulmfit",
    language_model="awd-lstm",
)
"""Half of the published dropout, as in the authors' library."""
FILMS = ("imdb", "sst2")
"""Tasks for which ULMFiT's language model is tuned on film reviews. On others it is the one of Wikipedia."""
EQUAL_RATES, NO_UNFREEZING = "training.layer_decay=1.0", "training.unfreeze_every=0"
FROZEN = ("training.lr=1e-3", "training.batch=64", "model.frozen=true")
TAGGER = ("model.crf=200", "model.dropout=0.5")
ELMO = System("elmo", "elmo", (*FROZEN, "model.features=mix", "model.pooling=concat"), language_model="elmo")
SYSTEMS = {
    "gpt": replace(transformer("gpt", "model.lm_weight=0.5"), task_lr={"imdb": "1e-4"}),
    "bert": transformer("bert", "model.base.dropout=0.1", scored=False),  # pre-trained without dropout
    "xlnet": replace(transformer("xlnet", "model.base.dropout=0.1"), task_lr={"imdb": "1e-4", "sst2": "1e-4"}),
    "transformer-xl": replace(transformer("transformer-xl", "model.pooling=concat"), task_lr={"sst2": "1e-4"}),
    "longspan-xl": transformer("longspan-xl", "model.pooling=concat"),
    "elmo": ELMO,
    "ulmfit": ULMFIT,
    "ulmfit-backward": replace(
        ULMFIT, model="ulmfit-backward", settings=(*ULMFIT.settings, "model.reverse=true"), language_model=None
    ),
}
DIRECTIONS, ENSEMBLE = ("ulmfit", "ulmfit-backward"), "ulmfit-ensemble"
NOT_CLASSES = ("conll2003", "sts-b")
"""Tasks without probabilities of classes, so without an ensemble. A backward model is for the ensemble only."""
ABLATIONS = {
    "from-scratch": replace(ULMFIT, settings=(EQUAL_RATES, NO_UNFREEZING), from_scratch=True),
    "no-lm-tuning": replace(ULMFIT, model="awd-lstm"),
    "no-wikipedia": replace(ULMFIT, model="ulmfit-no-wikipedia"),
    "no-unfreezing": replace(ULMFIT, settings=(*ULMFIT.settings, NO_UNFREEZING)),
    "no-discriminative-rates": replace(ULMFIT, settings=(*ULMFIT.settings, EQUAL_RATES)),
}
"""Howard & Ruder 2018, section 5. New weights have nothing to protect, so they are all trained at the same rate."""
FEATURES = ("embedding", "second-to-last", "last", "sum", "sum-last-four", "concat-last-four")
"""Devlin et al. 2019, table 7."""
MEMORY = ("transformer-xl", "longspan-xl", "xlnet")
PARTS = {"transformer-xl": 2, "longspan-xl": 4}
"""Of a batch of 32 reviews of 1,024 tokens, which took 55 GiB at once with longspan-xl. XLNet's needs 10 GiB by
count, and its steps of four parts took four times as long as those of 512 tokens in one part."""
SYSTEMS |= {f"{name}-512": replace(SYSTEMS[name], group="memory", tasks=IMDB) for name in MEMORY}
SYSTEMS |= {f"ulmfit-{name}": replace(one, group="ablations", tasks=IMDB) for name, one in ABLATIONS.items()}
LAYERS = (*FROZEN, *TAGGER, "model.normalised=true")  # this BERT is pre-norm
SYSTEMS |= {
    f"bert-{name}": System("bert", "bert", (*LAYERS, f"model.features={name}"), group="features", tasks=CONLL)
    for name in FEATURES
}
SYSTEMS |= {
    f"{name}-crf": replace(SYSTEMS[name], settings=(*SYSTEMS[name].settings, *TAGGER), group="taggers", tasks=CONLL)
    for name in ("bert", "xlnet", "longspan-xl")
}
RATES = ("1e-4", "3e-4")
"""Learning rates that are tried on dev. XLNet was worse with 3e-5 on three tasks."""
GROUPS = ("systems", "memory", "features", "ablations", "taggers")
"""Those of the tables. The group `rates` is run when it is named."""
CONTROLLED = ("gpt", "bert", "xlnet", "transformer-xl", "longspan-xl")
"""Systems with a control of new weights (`--scratch`). That of ULMFiT is an ablation, and ELMo is not trained."""
SYSTEMS |= {
    f"{name}-{rate}": replace(own, lr=rate, task_lr={}, group="rates", language_model=None)
    for name, own in ((name, SYSTEMS[name]) for name in CONTROLLED)
    for rate in RATES
}


def tune(entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Give every system the learning rate that was best on dev among its rows of the group `rates`, for each task of
    theirs. Returns the entries of the best rows, as the first seed of the system."""
    best = dict[tuple[str, str], dict[str, Any]]()
    for entry in entries:
        if entry["row"] in SYSTEMS and SYSTEMS[entry["row"]].group == "rates" and entry["seed"] == 1:
            key = SYSTEMS[entry["row"]].of, entry["task"]
            best[key] = max(best.get(key, entry), entry, key=lambda one: one["dev"][one["metric"]])
    for name, own in SYSTEMS.items():
        if own.group != "rates":
            rates = {task: SYSTEMS[entry["row"]].lr for (of, task), entry in best.items() if of == own.of}
            SYSTEMS[name] = replace(own, task_lr=own.task_lr | rates)
    return [entry | {"row": of} for (of, _), entry in best.items()]


@dataclass(frozen=True)
class Row:
    """A system on a task; `scratch` is its control with new weights."""

    name: str
    task: str
    scratch: bool = False

    @property
    def title(self) -> str:
        return self.name + ("-scratch" if self.scratch else "")

    @property
    def system(self) -> System:
        """With its settings for this task."""
        own = SYSTEMS[self.name]
        own = replace(own, lr=own.task_lr.get(self.task, own.lr))
        if self.name in DIRECTIONS and self.task not in FILMS:
            own = replace(own, model=own.model.replace("ulmfit", "awd-lstm"))
        if self.task == "conll2003":
            return _tagging(self.name, own)
        return self._for_imdb(own) if self.task == "imdb" else own

    def _for_imdb(self, own: System) -> System:
        """Dev is a tenth of train, so 20 validations would take a third of the time. 2.5% of the reviews are longer
        than 1,024 tokens."""
        longest = 512 if own.group == "memory" else 1024
        settings = [*own.settings, "training.validate_every=250", f"model.longest={longest}"]
        if own.model in MEMORY:
            settings.append("training.segment=512")  # fewer launches
            settings += [f"training.accumulate={PARTS[own.model]}"] if longest > 512 and own.model in PARTS else []
        passes = 5 if own.recipe == "finetune-ulmfit" else own.epochs
        return replace(own, settings=tuple(settings), epochs=passes)

    @property
    def epochs(self) -> float:
        return self.system.epochs or EPOCHS.get(self.task, 3)

    def folder(self, out: Path, seed: int) -> Path:
        return out / self.task / self.title / f"seed-{seed}"


def _tagging(name: str, own: System) -> System:
    """Other settings for tags. ULMFiT's hidden layer is for whole texts."""
    if name == "elmo":
        return replace(own, settings=(*own.settings, *TAGGER), epochs=20)
    return replace(own, settings=(*own.settings, "model.hidden=0")) if name == "ulmfit" else own


def rows(systems: list[str], groups: list[str], tasks: list[str], scratch: list[str]) -> Iterator[Row]:
    """The rows in the order of their rank: those of systems on tasks with a target, their controls, then the rest."""
    chosen = [name for name, system in SYSTEMS.items() if system.group in groups and system.of in systems]
    own = [name for name in chosen if SYSTEMS[name].group == "systems"]
    trained = [task for task in tasks if task != ZERO_SHOT]
    yield from (Row(name, task) for task in tasks if task in MUST for name in own if fits(name, task))
    controls = [name for name in own if name in CONTROLLED]
    yield from (Row(name, task, scratch=True) for task in trained if task in scratch for name in controls)
    others = [name for name in chosen if name not in own]
    yield from (Row(name, task) for name in others for task in trained if fits(name, task))
    yield from (Row(name, task) for task in tasks if task not in MUST for name in own if fits(name, task))


def fits(name: str, task: str) -> bool:
    """Whether a system is run on a task."""
    system = SYSTEMS[name]
    if task == ZERO_SHOT:
        return system.group == "systems" and system.language_model is not None
    return (not system.tasks or task in system.tasks) and not (name == DIRECTIONS[1] and task in NOT_CLASSES)


def finetuning(row: Row, models: Path, out: Path, seed: int, task: str, more: list[str]) -> list[str]:
    """The command of one seed of a row; `task` is its name or a folder, `more` are settings of all rows."""
    system = row.system
    words = ["finetune", str(models / system.model), "--task", task, "--recipe", system.recipe]
    words += ["--out", str(row.folder(out, seed)), "--set", f"training.seed={seed}"]
    if not any(setting.startswith("training.steps=") for setting in more):
        words += ["--epochs", f"{row.epochs:g}"]
    for setting in [*system.all_settings, *more]:
        words += ["--set", setting]
    return [*words, *(["--from-scratch"] if row.scratch or system.from_scratch else [])]


def likelihoods(model: Path, *, pointer: bool) -> list[str]:
    """The command of the scores without training."""
    words = ["evaluate-tasks", str(model), "--tasks", LIKELIHOOD, "--dtype", "float32", "--json"]
    return words if pointer else [*words, "--pointer", "0"]
