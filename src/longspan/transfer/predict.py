"""Predictions of a TaskModel, and their metrics."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from longspan.checkpoints.model_folder import load_model
from longspan.errors import ConfigError
from longspan.tokenizers import Tokenizer
from longspan.transfer.batches import by_length, collate
from longspan.transfer.formats import Format, Sequences
from longspan.transfer.metrics import compute
from longspan.transfer.model import TaskConfig, TaskModel
from longspan.transfer.tasks.task import Example, Label, Task

TOKENS = {"cpu": 8192, "cuda": 32_768}
"""Tokens of a batch, padding included. More are not faster on a GPU, and several runs share its memory."""


@dataclass(frozen=True)
class Prediction:
    """The predicted label of an example; for classes and choices, the probability of each."""

    label: Label
    probabilities: tuple[float, ...] = ()


def make_format(tokenizer: Tokenizer, model: TaskModel) -> Format:
    """The input format of a model."""
    c = model.config
    return Format(tokenizer, c.kind, c.labels, model, c.longest, reverse=c.reverse, symmetric=c.symmetric)


class Predictor:
    """A TaskModel with its tokenizer, in eval mode."""

    def __init__(self, model: TaskModel, tokenizer: Tokenizer) -> None:
        self.model, self.tokenizer, self.config = model.eval(), tokenizer, model.config
        self.format = make_format(tokenizer, model)

    @property
    def task(self) -> Task:
        """The task that the model was trained for, to read rows of the same form."""
        c = self.config
        label = {"similarity": "score", "tags": "tags"}.get(c.kind, "label")
        return Task(name=c.task, kind=c.kind, texts=c.texts, label=label, metrics=c.metrics)

    def encode(self, examples: Sequence[Example], name: str = "the input") -> list[Sequences]:
        """The examples as tokens, without their labels. `name` is for warnings."""
        return self.format.encode([Example(example.texts) for example in examples], name)

    def predict(self, examples: Sequence[Example], encoded: Sequence[Sequences] | None = None) -> list[Prediction]:
        """The predictions, in the order of the examples. `encoded` are those of `encode`, to use them again."""
        encoded = self.encode(examples) if encoded is None else encoded
        found: dict[int, Prediction] = {}
        lengths = [example.length * len(example.rows) for example in encoded]
        for chosen in by_length(lengths, TOKENS.get(self._device.type, TOKENS["cpu"])):
            batch = [encoded[k] for k in chosen]
            scores = self._scores(batch)
            if self.config.kind == "tags":
                tags = self.model.choose_tags(scores, [torch.from_numpy(example.marks) for example in batch])
                found |= {k: self._tagged(row, len(examples[k].texts)) for k, row in zip(chosen, tags, strict=True)}
            else:
                rows = scores.float().cpu().numpy()
                found |= {k: self._prediction(row) for k, row in zip(chosen, rows, strict=True)}
        return [found[k] for k in range(len(examples))]

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    def _scores(self, examples: list[Sequences]) -> torch.Tensor:
        batch, rows = collate(examples), len(examples[0].rows)
        tokens, starts = (torch.from_numpy(array).to(self._device) for array in (batch.tokens, batch.starts))
        documents = tokens.view(len(examples) * rows, -1)
        with torch.inference_mode():
            valid = starts.view_as(documents).cumsum(1) == 0
            return self.model.scores(documents, valid, rows=rows)[0]

    def _tagged(self, tags: list[int], words: int) -> Prediction:
        labels = self.config.labels
        return Prediction((*(labels[k] for k in tags), *[self.format.other_tag] * (words - len(tags))))

    def _prediction(self, scores: NDArray[np.float32]) -> Prediction:
        c = self.config
        if c.kind == "similarity":
            return Prediction(float(c.low + scores[0] * (c.high - c.low)))
        shifted = np.exp(scores.astype(np.float64) - scores.max())
        return most_probable(c, shifted / shifted.sum())

    def evaluate(self, examples: Sequence[Example], encoded: Sequence[Sequences] | None = None) -> dict[str, float]:
        """Every metric of the task."""
        return evaluate(self.config, examples, self.predict(examples, encoded))


def most_probable(c: TaskConfig, probabilities: NDArray[np.float64]) -> Prediction:
    """The prediction of the class or choice with the highest probability."""
    best = int(probabilities.argmax())
    return Prediction(best if c.kind == "choice" else c.labels[best], tuple(probabilities.tolist()))


def evaluate(c: TaskConfig, examples: Sequence[Example], predictions: Sequence[Prediction]) -> dict[str, float]:
    gold, predicted = [example.label for example in examples], [prediction.label for prediction in predictions]
    return {name: compute(name, c.kind, c.labels, gold, predicted) for name in c.metrics}


def as_row(c: TaskConfig, found: Prediction) -> dict[str, Any]:
    """A prediction as a JSON object: the label and, for classes and choices, the probability of each."""
    values: dict[str, Any] = {"label": list(found.label) if isinstance(found.label, tuple) else found.label}
    if found.probabilities:
        names = c.labels if c.kind != "choice" else [str(k) for k in range(len(found.probabilities))]
        values["probabilities"] = dict(zip(names, found.probabilities, strict=True))
    return values


class Ensemble:
    """Several models of one task, for example a forward and a backward one: the mean of their probabilities."""

    def __init__(self, members: Sequence[Predictor]) -> None:
        self.members, first = list(members), members[0].config
        for member in members:
            c = member.config
            if c.kind not in ("single", "pair", "choice"):
                raise ConfigError(f"a model of kind {c.kind!r} has no probabilities; an ensemble needs classifiers")
            if (c.task, c.kind, c.texts, c.labels) != (first.task, first.kind, first.texts, first.labels):
                raise ConfigError(
                    f"the models were trained for {first.task!r} ({', '.join(first.texts)}) and {c.task!r} "
                    f"({', '.join(c.texts)}); an ensemble needs models of one task with the same labels"
                )
        self.config, self.task = first, members[0].task

    def predict(self, examples: Sequence[Example]) -> list[Prediction]:
        every = [[one.probabilities for one in member.predict(examples)] for member in self.members]
        return [most_probable(self.config, row) for row in np.mean(every, axis=0)]

    def evaluate(self, examples: Sequence[Example]) -> dict[str, float]:
        """Every metric of the task."""
        return evaluate(self.config, examples, self.predict(examples))


def load_predictor(path: str | Path, *, device: torch.device | str = "cpu", **settings: Any) -> Predictor:
    """The fine-tuned model in the folder of a run or a model."""
    if runs := sorted(Path(path).glob("seed-*/best")):
        others = "".join(f" --with {run.parent}" for run in runs[1:])
        joined = f", or average their class probabilities: {runs[0].parent}{others}" if others else ""
        raise ConfigError(f"{path} has one run per seed; use {runs[0].parent}{joined}")
    loaded = load_model(Path(path), overrides=settings, device=device)
    if not isinstance(loaded.model, TaskModel):
        raise ConfigError(
            f"{path} is a language model, not a fine-tuned model; train one with longspan finetune {path}"
        )
    return Predictor(loaded.model, loaded.tokenizer)
