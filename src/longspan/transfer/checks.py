"""Preflight of fine-tuning: refuses combinations of task, model and settings that cannot work, before any training."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from longspan.checkpoints.model_folder import load_model
from longspan.contract import LanguageModel
from longspan.errors import ConfigError, DataError, LongspanError, counted
from longspan.models.families import outline
from longspan.nn.model_config import require
from longspan.tokenizers import Tokenizer
from longspan.training.folder import check_folder
from longspan.training.launch import launched
from longspan.training.recipe import Recipe, load_recipe
from longspan.training.resume import RECIPE, check_same
from longspan.transfer.encoded import encode_texts
from longspan.transfer.formats import Sequences, as_bytes
from longspan.transfer.metrics import is_entity_tag
from longspan.transfer.tasks import Example, TaskData
from longspan.transfer.tasks.task import Kind


def check_settings(recipe: Recipe) -> None:
    """Refuse settings of the classifier and of training that exclude each other, or that this model cannot use."""
    model, training = recipe.model, recipe.training
    shape = outline(recipe.family, model)
    given = f"model.lm_weight={model.lm_weight}"
    require(
        not model.lm_weight or shape.causal,
        f"{given} needs a left-to-right language model, but {model.base_family} is not one; leave it out",
    )
    require(
        not (model.lm_weight and model.frozen),
        f"{given} trains the model that model.frozen=true freezes; leave out one of them",
    )
    require(
        not (model.frozen and training.unfreeze_every),
        f"training.unfreeze_every={training.unfreeze_every} trains what model.frozen=true freezes; leave out one",
    )
    require(
        not (model.crf and model.hidden),
        f"model.hidden={model.hidden} has no effect on a tagger with model.crf={model.crf}; leave out one",
    )
    require(
        not (model.frozen and training.weight_dropout),
        f"training.weight_dropout={training.weight_dropout} drops frozen weights (model.frozen=true); leave out one",
    )
    for key, value, default in (
        ("training.segment_jitter", training.segment_jitter, 0.0),
        ("training.overlap", training.overlap, 0),
        ("training.validate_tokens", training.validate_tokens, None),
        ("evaluation.streams", recipe.evaluation.streams, 1),
    ):
        require(value == default, f"{key}={value} has no effect on complete texts; leave it out")
    check_segments(recipe, shape)


def check_segments(recipe: Recipe, shape: LanguageModel) -> None:
    """Refuse training segments that are shorter than the texts of a model without memory: it would read each segment of
    a text on its own."""
    later = recipe.evaluation_reading()
    if shape.has_memory(later):
        return
    longest = min(later.segment, recipe.model.longest or later.segment)
    shortest = min(reading.segment for _, reading in recipe.reading_schedule())
    require(
        shortest >= longest,
        f"training.segment={shortest} is shorter than the {longest} tokens of a text, which {recipe.model.base_family} "
        f"reads at once; use at least {longest}, or set evaluation.segment or model.longest to {shortest}",
    )


def tags_of(example: Example) -> tuple[str, ...]:
    return example.label if isinstance(example.label, tuple) else ()


def check_labels(data: TaskData, labels: Sequence[str]) -> None:
    """Refuse training labels of a single class, and those that do not fit the metrics of the task."""
    name, kind, metrics = data.task.name, data.task.kind, data.task.metrics
    if kind == "similarity" and len(scores := {example.label for example in data.train}) == 1:
        raise DataError(f"all training rows of {name} have the score {scores.pop()}; use at least 2 different scores")
    if kind in ("similarity", "choice"):
        return
    if len(labels) < 2:
        held = " (others are held out as dev)" * (data.held_out and any(one.unseen(labels) for one in data.dev))
        raise DataError(
            f"all training rows of {name} have the label {labels[0]!r:.40}{held}; a classifier needs at least 2 "
            "different labels"
        )
    if "f1" in metrics and len(labels) != 2:
        raise ConfigError(f"the metric f1 needs 2 classes, but {name} has {len(labels)}; use macro-f1 in its task.toml")
    if "entity-f1" in metrics:
        every = {*labels, *(tag for example in data.dev for tag in tags_of(example))}
        if other := sorted(tag for tag in every if not is_entity_tag(tag)):
            raise ConfigError(
                f"entity-f1 needs tags such as O, B-PER and I-PER (or E-, S-), but {name} has {other[0]!r:.40}; "
                'write metrics = ["accuracy"] into its task.toml'
            )


def check_run(recipe: Recipe, out: Path, resume: str | None, model: LanguageModel) -> None:
    """Raise an error if `out` cannot be used, or if its run has other settings or initial weights than those of
    `model`. All seeds are checked before the first is trained."""
    if out.is_dir() and not launched():  # torchrun starts processes again, which then resume
        check_folder(out, resume)
    if not (out / RECIPE).is_file():
        return
    stored = load_recipe(out / RECIPE)
    check_same(recipe, stored, out)
    before, now = stored.training.init_from, recipe.training.init_from
    if before == now or (before and now and (not Path(before).exists() or same_weights(before, model))):
        return
    names = [path or "random weights (--from-scratch)" for path in (before, now)]
    raise ConfigError(f"{out} began with {names[0]}, but this command with {names[1]}; use another folder")


def same_weights(path: str, model: LanguageModel) -> bool:
    own, other = model.state_dict(), load_model(Path(path)).model.state_dict()
    return own.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in own.items())


def check_tokens(held_out: Mapping[str, Sequence[Example]], kind: Kind, tokenizer: Tokenizer) -> None:
    """Refuse dev and test texts with parts that the tokenizer does not know."""
    for split, examples in held_out.items():
        rows = [as_bytes(example, kind) for example in examples]
        try:
            encode_texts(tokenizer, [text for row in rows for text in row])
        except LongspanError:
            for number, row in enumerate(rows, start=1):
                try:
                    encode_texts(tokenizer, row)
                except LongspanError as error:
                    raise DataError(f"{split}, row {number}: {error}") from None
            raise


def with_words(examples: Sequence[Sequences], longest: int | None, name: str) -> list[Sequences]:
    """The examples with at least one tag: a sentence may be too long for any of its tags."""
    found = [example for example in examples if example.targets]
    if not found:
        raise DataError(
            f"no tagged word of {name} fits into a sequence, because model.longest or training.segment allows "
            f"{counted(longest or 0, 'token')}; increase that limit"
        )
    return found
