"""result.json of a fine-tuning run: the scores of best/ on dev and test, and what they belong to."""

import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from longspan.checkpoints import store
from longspan.checkpoints.manifest import CARD
from longspan.checkpoints.store import write_file
from longspan.data.cache import sha256
from longspan.errors import CheckpointError
from longspan.training.loop import Trainer
from longspan.training.observer import Observer
from longspan.transfer.predict import Prediction, as_row, evaluate, load_predictor
from longspan.transfer.tasks import TaskData

RESULT, PREDICTIONS, PROBABILITIES = "result.json", "predictions.jsonl", "probabilities.npz"


class RemoveResult(Observer):
    """Removes the result of a finished run that continues, because best/ may change from now on."""

    def __init__(self, out: Path) -> None:
        self.paths = out / RESULT, out / PREDICTIONS, out / PROBABILITIES

    def begin(self, trainer: Trainer) -> None:  # noqa: ARG002
        for path in self.paths:
            path.unlink(missing_ok=True)


def scored_on(out: Path, data: TaskData) -> str:
    """SHA-256 of what a result depends on: best/, the dev examples and the test file."""
    files = store.read_folder(out / "best").files
    facts: list[Any] = [sorted((name, entry.sha256) for name, entry in files.items() if name != CARD)]
    facts.append([[example.texts, example.label] for example in data.dev])
    facts.append(sha256(data.files["test"]) if data.has_test else None)
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def write_result(out: Path, data: TaskData, device: torch.device | str) -> dict[str, Any]:
    """Score dev, then test, with the weights of best/, and write result.json. Call `read_result` first, so that test is
    scored only once for these weights. Test rows without labels get predictions.jsonl. The probabilities of classes and
    choices are kept in probabilities.npz, to average those of several models."""
    best = load_predictor(out / "best", device=device)
    found = {"dev": best.predict(data.dev, best.encode(data.dev, "dev"))}
    values: dict[str, Any] = {"task": data.task.name, "metric": data.task.metric}
    values["dev"] = evaluate(best.config, data.dev, found["dev"])
    if data.has_test:
        examples = data.test()
        found["test"] = best.predict(examples, best.encode(examples, "test"))
        if examples[0].label is not None:
            values["test"] = evaluate(best.config, examples, found["test"])
        else:
            rows = (json.dumps(as_row(best.config, one), ensure_ascii=False) for one in found["test"])
            write_file(out / PREDICTIONS, "".join(f"{row}\n" for row in rows).encode())
            values["predictions"] = PREDICTIONS
    if found["dev"][0].probabilities:
        write_file(out / PROBABILITIES, packed_probabilities(found))
    values["scored_on"] = scored_on(out, data)
    write_file(out / RESULT, (json.dumps(values, indent=1) + "\n").encode())
    return values


def packed_probabilities(found: Mapping[str, Sequence[Prediction]]) -> bytes:
    """The contents of probabilities.npz: [rows, classes] for every split, in the order of its rows."""
    file = io.BytesIO()
    arrays: dict[str, Any] = {split: np.array([one.probabilities for one in rows]) for split, rows in found.items()}
    np.savez(file, **arrays)
    return file.getvalue()


def read_result(out: Path, data: TaskData) -> dict[str, Any] | None:
    """The contents of result.json, or None if there is none for this best/ and these dev and test examples."""
    try:
        values = json.loads((out / RESULT).read_text("utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{out / RESULT} cannot be read: {error!s:.80}; delete it to score again") from None
    if not isinstance(values, dict) or not isinstance(values.get("dev"), dict):
        raise CheckpointError(f"{out / RESULT} has no dev scores; delete it to score again")
    return values if values.get("scored_on") == scored_on(out, data) else None
