"""Fine-tuning: it learns, resumes exactly, chooses on dev, and reads test once."""

import json
import math
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import longspan
from longspan.checkpoints.model_folder import Loaded, load_model
from longspan.errors import ConfigError, DataError, DataWarning
from longspan.models.families import create
from longspan.nn.dropout import HashedDropout, LockedDropout
from longspan.training import utilisation
from longspan.training.depth import depths, rate_factors, unfreeze
from longspan.training.dropout import hash_dropout, lock_dropout
from longspan.training.loop import Trainer
from longspan.training.observer import Observer, ResumeWarning
from longspan.training.observers.average_trigger import AverageTrigger
from longspan.training.optimizers import Optimizer, hidden_matrices
from longspan.training.processes import ALONE, Processes
from longspan.training.recipe import TrainingConfig
from longspan.training.schedules import lr_factor
from longspan.transfer.batches import ExampleBatches, by_length, rounded
from longspan.transfer.checks import check_settings
from longspan.transfer.finetune import finetune, finetune_once, resolve, watchers
from longspan.transfer.formats import Sequences
from longspan.transfer.model import TaskConfig, TaskModel
from longspan.transfer.predict import Ensemble, load_predictor, make_format
from longspan.transfer.results import write_result
from longspan.transfer.tasks import TaskData, open_task
from tests.programs import PYTHON
from tests.training.conftest import Losses
from tests.training.processes import on_processes
from tests.transfer.conftest import BAD, GOOD, REST, sentences, write

REPOSITORY = Path(__file__).parents[2]
FAST = ["model.pooling=concat", "training.batch=6", "training.lr=8e-3"]
FAST += ["training.validate_every=21", "training.segment=64"]


@pytest.fixture(scope="module")
def finished(base: Path, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("run") / "moods"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(utilisation, "peak_flops", lambda device: 1e9)  # metrics as on a GPU
        result = finetune(base, folder, out, overrides=FAST, epochs=7, device="cpu")
    return out, result.summary()


def test_it_learns(finished: tuple[Path, dict[str, Any]]) -> None:
    out, summary = finished
    assert summary["metric"] == "accuracy"
    assert summary["test"] > 0.8
    best = load_predictor(out)
    labels = [p.label for p in best.predict(best_examples(out))]
    assert labels == ["good", "bad"]
    scores = [json.loads(line)["metrics"]["accuracy"] for line in (out / "validation.jsonl").read_text().splitlines()]
    assert summary["dev"] == max(scores)


def test_utilisation_is_that_of_the_wrapped_model(finished: tuple[Path, dict[str, Any]]) -> None:
    row = json.loads((finished[0] / "metrics.jsonl").read_text().splitlines()[-1])
    # q, k, v, r and o; up and down with biases; two norms. u and w are shared. The table and the head's biases are not
    # multiplied.
    layer = 5 * 32 * 32 + (2 * 32 * 48 + 48 + 32) + 4 * 32
    classifier = 3 * 32 * 2 + 2
    flops = 6 * (2 * layer + 2 * 32 + classifier) + 12 * 2 * 32 * (64 + 65 / 2)
    assert row["mfu"] == pytest.approx(row["tokens_per_second"] * flops / 1e9, rel=1e-3)
    assert row["mfu"] > 0


SHAPES: dict[str, dict[str, Any]] = {
    "transformer-xl": {"heads": 2},
    "longspan-xl": {"heads": 2},
    "gpt": {"heads": 2, "positions": 64},
    "bert": {"heads": 2, "positions": 64, "separator": 1},
    "xlnet": {"heads": 2, "separator": 1},
}
ON_GPU = [pytest.param("cuda", name, marks=pytest.mark.gpu) for name in SHAPES]


def train(base: Loaded, data: TaskData, device: str, *settings: str) -> tuple[Trainer, list[float]]:
    """Two passes over the task with these settings. Returns the trainer and the losses."""
    losses = Losses()
    made = resolve(base, data, overrides=[*FAST, *settings], epochs=2)
    torch.manual_seed(1)
    model = create(made.family, made.model, made.evaluation_reading())
    assert isinstance(model, TaskModel)
    streams = ExampleBatches(make_format(base.tokenizer, model).encode(data.train), 6, 1, "", "moods")
    trainer = Trainer(made, model, base.tokenizer, streams, torch.device(device), [losses])
    trainer.run()
    return trainer, losses.curve


def small(family: str, path: Path, dropout: float = 0.1) -> Loaded:
    reading = {"segment": 64} if family in ("gpt", "bert") else {"segment": 16, "memory": 64}
    shape = {"layers": 2, "width": 24, "dropout": dropout, **SHAPES[family]}
    longspan.init(family, reading=reading, device="cpu", **shape).save(path)
    return load_model(path)


@pytest.mark.parametrize(("device", "family"), [("cpu", "transformer-xl"), *ON_GPU])
def test_steps_of_every_length_are_captured(device: str, family: str, folder: Path, tmp_path: Path) -> None:
    """With dropout. Losses do not depend on whether a step is captured."""
    base, data, curves = small(family, tmp_path / "base"), open_task(folder), list[list[float]]()
    for graph in (False, True):
        trainer, curve = train(base, data, device, f"training.cuda_graph={str(graph).lower()}")
        curves.append(curve)
        assert ({key[0][1] for key in trainer.captured} >= {16, 32}) == graph
    np.testing.assert_allclose(curves[1], curves[0], rtol=1e-5 if device == "cpu" else 1e-2)


@pytest.mark.parametrize("family", [pytest.param(name, marks=pytest.mark.gpu) for name in SHAPES])
def test_compiled_layers_give_the_same_losses(family: str, folder: Path, tmp_path: Path) -> None:
    """On a GPU, in captured steps."""
    base, data = small(family, tmp_path / "base", dropout=0.0), open_task(folder)
    _, expected = train(base, data, "cuda", "model.dropout=0.0", "training.compile=false")
    trainer, got = train(base, data, "cuda", "model.dropout=0.0", "training.compile=true", "training.cuda_graph=true")
    np.testing.assert_allclose(got, expected, rtol=2e-2)
    assert {key[0][1] for key in trainer.captured} >= {16, 32}
    assert not any("forward" in vars(layer) for layer in trainer.model.layers)  # type: ignore[operator]


COMPILED = """
import json, sys
from pathlib import Path
import torch
from longspan.transfer.tasks import open_task
from tests.transfer.test_finetune import small, train

folder, out, families = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
found = {}
for family in families:
    graphs = []
    compiler = torch.compile

    def record(graph, _):
        graphs.append(graph)
        return graph

    torch.compile = lambda function, **options: compiler(function, backend=record, fullgraph=True, **options)
    base, data = small(family, out / family, dropout=0.0), open_task(folder)
    curves = [train(base, data, "cpu", "model.dropout=0.0", f"training.compile={on}")[1] for on in ("false", "true")]
    torch.compile = compiler
    torch.compiler.reset()
    found[family] = len(graphs), curves
print(json.dumps(found))
"""


OTHERS = " ".join(name for name in SHAPES if name != "transformer-xl")


@pytest.mark.parametrize("families", ["transformer-xl", pytest.param(OTHERS, marks=pytest.mark.slow)])
def test_layers_are_compiled_once_for_all_lengths(families: str, folder: Path, tmp_path: Path) -> None:
    """Without graph breaks, and the losses are the same. It runs in another process, because torch.compile cannot trace
    the shape checks of these tests."""
    command = [PYTHON, "-c", COMPILED, folder, tmp_path, *families.split()]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr[-2000:]
    for family, (graphs, curves) in json.loads(done.stdout.splitlines()[-1]).items():
        assert graphs == 1, family
        np.testing.assert_allclose(*curves, rtol=1e-5)


def test_activations_of_a_wrapped_model_are_recomputed(base: Path, folder: Path) -> None:
    loaded, data = load_model(base), open_task(folder)
    _, expected = train(loaded, data, "cpu")
    trainer, got = train(loaded, data, "cpu", "training.checkpoint_activations=true")
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    assert all("forward" in vars(layer) for layer in trainer.model.layers)  # type: ignore[operator]


def test_frozen_weights_do_not_change(base: Path, folder: Path) -> None:
    """By weight decay of Muon either. Their dropout is off, also if it is replaced."""
    loaded, data = load_model(base), open_task(folder)
    settings = ("training.optimizer=muon", "training.weight_decay=0.5", "training.locked_dropout=true")
    for freezing in ("model.frozen=true", "training.unfreeze_every=100"):
        trainer, _ = train(loaded, data, "cpu", freezing, *settings, "model.base.dropout=0.5")
        assert isinstance(trainer.model, TaskModel)
        torch.manual_seed(1)
        first = create(trainer.model.config.base_family, trainer.model.config.base_config)
        for name, weight in first.named_parameters():
            assert torch.equal(weight, trainer.model.base.get_parameter(name)), (freezing, name)
        hash_dropout(trainer.model)
        dropouts = [one for one in trainer.model.base.modules() if isinstance(one, LockedDropout | HashedDropout)]
        assert dropouts
        assert {one.training for one in dropouts} == {freezing != "model.frozen=true"}


def test_the_average_trigger_sees_validations(base: Path, folder: Path, tmp_path: Path) -> None:
    loaded, data = load_model(base), open_task(folder)
    settings = ["training.steps=9", "training.averaging=asgd", "training.average_patience=1"]
    made = resolve(loaded, data, overrides=settings)
    assert [one for one in watchers(made, data, tmp_path, ALONE) if isinstance(one, AverageTrigger)]


@pytest.mark.parametrize("patience", [0, 3])
def test_other_dev_rows_after_a_resume_are_noticed(patience: int, base: Path, folder: Path, tmp_path: Path) -> None:
    task, out = tmp_path / "moods", tmp_path / "run"
    shutil.copytree(folder, task)
    sets = ["training.batch=6", "training.validate_every=1", f"training.patience={patience}"]
    write(task / "dev.jsonl", sentences(8, seed=4))
    finetune(base, task, out, overrides=[*sets, "training.steps=2"], device="cpu")
    write(task / "dev.jsonl", sentences(8, seed=5))
    named = "dev rows of moods"
    with pytest.raises(DataError, match=named) if patience else pytest.warns(ResumeWarning, match=named):
        finetune(base, task, out, overrides=[*sets, "training.steps=3"], resume="auto", device="cpu")


def test_the_steps_of_a_recipe_of_the_user(base: Path, folder: Path, tmp_path: Path) -> None:
    """Those of our own recipes stand for three epochs."""
    loaded, data, own = load_model(base), open_task(folder), tmp_path / "own.toml"
    own.write_text('[model]\nfamily = "task"\n[training]\nsteps = 4\nbatch = 8\n')
    length = -(-len(data.train) // 8)
    assert resolve(loaded, data, own).training.steps == 4
    assert resolve(loaded, data, own, epochs=1).training.steps == length
    assert resolve(loaded, data, overrides=["training.batch=8"]).training.steps == 3 * length


@pytest.mark.parametrize(
    ("family", "settings", "named"),
    [
        ("transformer-xl", ["model.frozen=true", "training.weight_dropout=0.1"], "training.weight_dropout=0.1"),
        ("transformer-xl", ["training.validate_tokens=9"], "training.validate_tokens=9"),
        ("transformer-xl", ["evaluation.streams=2"], "evaluation.streams=2"),
        ("transformer-xl", ["training.batch=[[0,8]]"], "training.batch=[[0, 8]]"),
        ("gpt", ["training.segment=16", "evaluation.segment=64"], "training.segment=16"),
        ("gpt", ["training.segment=[[0,16],[3,64]]"], "training.segment=16"),
    ],
)
def test_settings_without_a_meaning_are_refused(
    family: str, settings: list[str], named: str, folder: Path, tmp_path: Path
) -> None:
    base = small(family, tmp_path / "base")
    with pytest.raises(ConfigError, match=re.escape(named)):
        check_settings(resolve(base, open_task(folder), overrides=settings))


def test_short_runs_are_not_compiled(base: Path, folder: Path) -> None:
    loaded, data = load_model(base), open_task(folder)
    settings = [resolve(loaded, data, overrides=[f"training.steps={n}"]).training.compile for n in (499, 500)]
    assert settings == [False, None]
    assert resolve(loaded, data, overrides=["training.steps=9", "training.compile=true"]).training.compile


PARTS: dict[str, tuple[str, ...]] = {
    "classes": ("model.lm_weight=0.5",),
    "tags": (),
    "crf": ("model.crf=4",),
    "mix": ("model.features=mix", "training.unfreeze_every=1", "training.accumulate=2"),
    "clusters": (),
}


def test_runs_do_not_depend_on_the_number_of_processes(base: Path, folder: Path, tmp_path: Path) -> None:
    """With rows of different lengths and dropout. The first process scores test."""
    words = [row["text"].split() for row in sentences(40, seed=3)]
    tagged = [{"words": row, "tags": ["B-X" if word in GOOD + BAD else "O" for word in row]} for row in words]
    write(tmp_path / "tagged" / "train.jsonl", tagged)
    write(tmp_path / "tagged" / "dev.jsonl", tagged[:4])
    write(tmp_path / "tagged" / "test.jsonl", tagged[:4])
    few = ["training.steps=2", "training.batch=4", "training.lr=8e-3", "model.dropout=0.5", "model.base.dropout=0.2"]
    shape: dict[str, Any] = {"layers": 2, "width": 24, "heads": 2, "cutoffs": [64, 128]}
    longspan.init("transformer-xl", device="cpu", **shape).save(tmp_path / "clusters")

    def tune(processes: Processes) -> None:
        def counted(out: Path, data: TaskData, device: torch.device | str) -> dict[str, Any]:
            with (tmp_path / "scored").open("a") as file:
                file.write(f"{processes.size} {processes.rank} {out.name}\n")
            return write_result(out, data, device)

        sys.modules[finetune.__module__].write_result = counted  # type: ignore[attr-defined]  # in a child process
        for name, settings in PARTS.items():
            task = tmp_path / "tagged" if name in ("tags", "crf") else folder
            own = tmp_path / "clusters" if name == "clusters" else base
            out = tmp_path / str(processes.size) / name
            finetune(own, task, out, overrides=[*few, *settings], device="cpu")
            if processes.size > 1:
                sharded = tmp_path / "sharded" / name
                finetune(own, task, sharded, overrides=[*few, *settings, "training.parallel=fsdp"], device="cpu")

    assert on_processes(0, tune) == [0]
    assert on_processes(2, tune) == [0, 0]
    for name in PARTS:
        runs = [tmp_path / kind / name / "metrics.jsonl" for kind in ("1", "2", "sharded")]
        losses = [[json.loads(line)["bits"] for line in path.read_text().splitlines()] for path in runs]
        np.testing.assert_allclose(losses[1:], [losses[0]] * 2, rtol=1e-6)
        assert len(losses[0]) == 2
    scored = (tmp_path / "scored").read_text().splitlines()
    assert scored == [f"{size} 0 {name}" for size, count in ((1, 1), (2, 2)) for name in PARTS for _ in range(count)]


def test_dropout_of_documents_and_matrices_of_a_wrapped_model() -> None:
    """A locked dropout draws a mask per document. Muon and weight dropout use the matrices of the language model."""
    for family, more in (("bert", {"positions": 8, "separator": 1}), ("elmo", {"filters": [[1, 8]]})):
        shape = {"layers": 2, "width": 16, "heads": 2} if family == "bert" else {"width": 16}
        made = create("task", TaskConfig(base_family=family, base=shape | more, dropout=0.5))
        assert isinstance(made, TaskModel)
        assert hidden_matrices(made) == {f"base.{name}" for name in hidden_matrices(made.base)}
        assert not {"base.next_sentence.weight", "classifier.1.weight"} & hidden_matrices(made)
        optimizer = Optimizer(made, TrainingConfig(steps=1, optimizer="muon", weight_decay=0.1))
        decayed = {optimizer.names[p] for p in optimizer.parts[1].param_groups[0]["params"]}
        assert "classifier.1.weight" in decayed
        lock_dropout(made)
        dropped = made.train().classifier[0](torch.ones(64, 1, 16))
        scores = made.classifier(torch.ones(64, made.classifier[-1].in_features))
        assert (dropped[0] != dropped[1:]).any()
        assert len(scores[:, 0].unique()) > 32


def test_few_lengths() -> None:
    lengths = np.arange(1, 4097)
    found = np.array([rounded(int(length)) for length in lengths])
    assert ((found >= lengths) & (found - lengths < np.maximum(16, lengths / 4))).all()
    assert len(set(found.tolist())) == 28  # 8 up to 128, then four per power of 2
    assert all(rounded(int(length)) == length for length in set(found.tolist()))


def test_batches_of_similar_length() -> None:
    assert list(by_length([3, 9, 2, 3, 4], 8)) == [[2, 0], [3, 4], [1]]  # 9 tokens are a batch alone
    assert list(by_length([], 8)) == []


def best_examples(out: Path) -> list[Any]:
    task = load_predictor(out).task
    texts = ("it was a lovely film", "it was a dull film")
    return [task.example({"text": text}, "here", labelled=False) for text in texts]


def test_test_is_read_once(
    finished: tuple[Path, dict[str, Any]], base: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, summary = finished
    monkeypatch.setattr(TaskData, "test", lambda self: pytest.fail("read twice"))
    again = finetune(base, folder, out, overrides=FAST, epochs=7, resume="auto", device="cpu")
    assert again.summary() == summary


def test_the_result_is_that_of_the_final_state(base: Path, folder: Path, tmp_path: Path) -> None:
    """Of the last best/ if a finished run continues, and of the current test file."""
    task, out = tmp_path / "moods", tmp_path / "run"
    shutil.copytree(folder, task)
    sets = [setting for setting in FAST if "validate" not in setting]
    for epochs in (0.1, 3):
        result = finetune(base, task, out, overrides=sets, epochs=epochs, resume="auto", device="cpu").summary()
    assert result["test"] == load_predictor(out / "best").evaluate(open_task(task).test())["accuracy"]
    scores = [json.loads(line)["metrics"]["accuracy"] for line in (out / "validation.jsonl").read_text().splitlines()]
    assert result["dev"] == max(scores) > scores[0]
    swapped = [row | {"label": "bad" if row["label"] == "good" else "good"} for row in sentences(16, seed=2)]
    write(task / "test.jsonl", swapped)
    again = finetune(base, task, out, overrides=sets, epochs=3, resume="auto", device="cpu").summary()
    assert again["test"] == pytest.approx(1 - result["test"])


def test_test_rows_without_labels_get_predictions(base: Path, folder: Path, tmp_path: Path) -> None:
    task, out = tmp_path / "moods", tmp_path / "run"
    shutil.copytree(folder, task)
    write(task / "test.jsonl", [{"text": row["text"]} for row in sentences(5, seed=2)])
    sets = [*FAST, "training.steps=2"]
    result = finetune(base, task, out, overrides=sets, device="cpu").summary()
    assert (result["test"], result["predictions"]) == (None, [str(out / "predictions.jsonl")])
    found = [json.loads(line) for line in (out / "predictions.jsonl").read_text().splitlines()]
    best = load_predictor(out / "best")
    assert [row["label"] for row in found] == [one.label for one in best.predict(open_task(task).test())]
    for labels, words in (([-1] * 3, ["-1", "predictions"]), (["good", None, "bad"], ["row 2", "label"])):
        rows = [{"text": "a", "label": label} for label in labels]
        write(task / "test.jsonl", [{k: v for k, v in row.items() if v is not None} for row in rows])
        with pytest.raises(DataError) as caught:
            finetune(base, task, tmp_path / "other", overrides=sets, device="cpu")
        assert all(word in str(caught.value) for word in words)
        assert not (tmp_path / "other").exists()


def test_probabilities_of_dev_and_test_are_kept(finished: tuple[Path, dict[str, Any]], folder: Path) -> None:
    """In the order of the rows, for ensembles and for scores of some of the rows."""
    out, summary = finished
    data, best = open_task(folder), load_predictor(out / "best")
    with np.load(out / "probabilities.npz") as kept:
        for split, examples in (("dev", data.dev), ("test", data.test())):
            wanted = [prediction.probabilities for prediction in best.predict(examples)]
            np.testing.assert_array_equal(kept[split], wanted)
            right = [best.config.labels[k] == e.label for k, e in zip(kept[split].argmax(1), examples, strict=True)]
            assert summary[split] == np.mean(right)


def test_rates_of_the_wrapped_model_can_change(base: Path, folder: Path) -> None:
    loaded, data = load_model(base), open_task(folder)
    made = resolve(loaded, data, overrides=["model.base.dropout=0.25"])
    assert made.model.base == {**made.model.base, "dropout": 0.25, "layers": 2, "width": 32}
    assert loaded.model.config.dropout == 0.0
    for setting, word in (("model.base.width=64", "width"), ("model.base=3", "table"), ("model.base.drop=0.1", "drop")):
        with pytest.raises(ConfigError, match=word):
            resolve(loaded, data, overrides=[setting])


class StopAt(Observer):
    def __init__(self, step: int) -> None:
        self.step = step

    def after_step(self, trainer: Any) -> None:
        if trainer.step == self.step:
            raise InterruptedError


def test_a_killed_run_resumes_exactly(base: Path, folder: Path, tmp_path: Path) -> None:
    """With dropout, batch norm, gradual unfreezing and discriminative rates: the weights are equal to the last bit."""
    loaded, data = load_model(base), open_task(folder)
    sets = [
        *FAST,
        "training.save_every=6",
        "model.hidden=6",
        "model.dropout=0.3",
        "training.layer_decay=0.5",
        "training.unfreeze_every=4",
    ]
    recipe = resolve(loaded, data, overrides=[*sets, "training.steps=14"], task=str(folder))
    finetune_once(recipe, data, tmp_path / "a", loaded.tokenizer)
    stopping = [StopAt(9), *watchers(recipe, data, tmp_path / "b", ALONE)]
    with pytest.raises(InterruptedError):
        finetune_once(recipe, data, tmp_path / "b", loaded.tokenizer, observers=stopping)
    finetune_once(recipe, data, tmp_path / "b", loaded.tokenizer, resume="auto")
    a, b = (load_model(tmp_path / run / "checkpoint-14").model.state_dict() for run in "ab")
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert any(name.endswith("running_mean") and a[name].abs().sum() > 0 for name in a)


def test_several_seeds_have_a_mean_and_a_deviation(base: Path, folder: Path, tmp_path: Path) -> None:
    sets = [*FAST, "training.steps=3"]
    summary = finetune(base, folder, tmp_path / "r", overrides=sets, seeds=2, device="cpu", from_scratch=True).summary()
    a, b = summary["dev_per_seed"]
    assert summary["dev"] == pytest.approx((a + b) / 2)
    assert summary["dev_std"] == pytest.approx(abs(a - b) / 2**0.5)
    assert {path.name for path in (tmp_path / "r").iterdir()} == {"seed-1", "seed-2", "result.json"}
    assert json.loads((tmp_path / "r" / "result.json").read_text())["dev_std"] == summary["dev_std"]
    with pytest.raises(ConfigError, match=r"seed-1 --with .*seed-2"):
        load_predictor(tmp_path / "r")
    with pytest.raises(ConfigError, match="seed=7"):  # equal runs would have a deviation of 0
        finetune(base, folder, tmp_path / "s", overrides=["training.seed=7"], seeds=2, device="cpu")
    once = finetune(base, folder, tmp_path / "s", overrides=[*sets, "training.seed=7"], device="cpu")
    assert once.seeds == (7,)
    with pytest.raises(ConfigError, match="one seed"):
        finetune(base, folder, tmp_path / "s", overrides=sets, seeds=2, resume="auto", device="cpu")


SEVERAL = {
    "choice": [{"premise": "it rains", "choice1": "wet", "choice2": "dry", "label": k % 2} for k in range(5)],
    "similarity": [{"text_a": "a film", "text_b": "a play", "score": float(k)} for k in range(5)],
    "symmetric": [{"text_a": "a film", "text_b": "a play", "label": k % 2} for k in range(5)],
}


@pytest.mark.parametrize("kind", SEVERAL)
def test_examples_of_several_sequences_with_any_segment(base: Path, tmp_path: Path, kind: str) -> None:
    """The preflight used a row of a segment, which could not be divided among the sequences if it was odd."""
    write(tmp_path / kind / "train.jsonl", SEVERAL[kind])
    if kind == "symmetric":
        (tmp_path / kind / "task.toml").write_text("symmetric = true\n")
    sets = ["training.steps=1", "training.batch=2", "training.segment=15"]
    result = finetune(base, tmp_path / kind, tmp_path / "r", overrides=sets, device="cpu")
    assert len(result.dev) == 1
    assert load_predictor(tmp_path / "r").model.rows == 2


def test_a_batch_may_have_more_rows_than_the_task_has_tokens(base: Path, tmp_path: Path) -> None:
    write(tmp_path / "t" / "train.jsonl", [{"text": word, "label": word} for word in "abab"])
    sets = ["training.steps=1", "training.batch=32"]
    assert len(finetune(base, tmp_path / "t", tmp_path / "r", overrides=sets, device="cpu").dev) == 1


def test_changed_examples_cannot_be_resumed(finished: tuple[Path, dict[str, Any]], base: Path, folder: Path) -> None:
    out, _ = finished
    with pytest.raises(ConfigError, match="seed"):
        finetune(base, folder, out, overrides=FAST, epochs=8, seeds=[7], resume="auto", device="cpu")
    with pytest.raises(ConfigError, match="seeds"):
        finetune(base, folder, out, seeds=0)
    with pytest.raises(ConfigError, match="epochs"):
        finetune(base, folder, out, overrides=["training.steps=3"], epochs=8)
    for epochs in (0, math.nan, math.inf):
        with pytest.raises(ConfigError, match="epochs"):
            finetune(base, folder, out, epochs=epochs)


def test_other_weights_cannot_be_resumed(
    finished: tuple[Path, dict[str, Any]], base: Path, folder: Path, tmp_path: Path
) -> None:
    """They would not be used, so a control could be a copy of the run that it controls."""
    same, other, changed = tmp_path / "moved", tmp_path / "other", longspan.load(base, device="cpu")
    shutil.copytree(base, same)
    changed.model.u.data += 1
    changed.save(other)
    more: dict[str, Any] = {"overrides": FAST, "epochs": 7, "resume": "auto", "device": "cpu"}
    with pytest.raises(ConfigError, match="from-scratch"):
        finetune(base, folder, finished[0], from_scratch=True, **more)
    with pytest.raises(ConfigError, match="other"):
        finetune(other, folder, finished[0], **more)
    assert finetune(same, folder, finished[0], **more).summary() == finished[1]


@pytest.mark.parametrize("limit", ["training.seconds=99", "training.tokens=999999"])
def test_tokens_and_seconds_do_not_replace_the_epochs(limit: str, base: Path, folder: Path) -> None:
    data = open_task(folder)
    made = resolve(load_model(base), data, overrides=[limit, "training.batch=6"])
    assert made.training.steps == 3 * 9  # 54 examples
    assert made.training.validate_every == 2


REFUSED = [
    ("bert", "model.lm_weight=0.5", "lm_weight"),
    ("elmo", "model.lm_weight=0.5", "lm_weight"),
    ("gpt", "model.lm_weight=0.5 model.frozen=true", "frozen"),
    ("gpt", "model.frozen=true training.unfreeze_every=3", "unfreeze_every"),
    ("gpt", "training.batch=[[0,4],[2,8]]", "batch"),
    ("gpt", "training.segment_jitter=2.0", "segment_jitter"),
    ("gpt", "data.reverse=true", "model.reverse"),
    ("gpt", "model.crf=4", "crf"),
    ("gpt", 'model.metrics=["f1"]', "task.toml"),
    ("gpt", "model.family=bert", "model.family"),
    ("gpt", "training.init_from=base", "first argument"),
    ("gpt", "training=3", "training"),
    ("awd-lstm", "model.features=mix", "one width"),
    ("awd-lstm", "model.features=sum-last-four", "one width"),
    ("gpt", "model.features=concat-last-four", "4 layers.*2 layers"),
]
BASES: dict[str, dict[str, Any]] = {"gpt": {"heads": 2}, "bert": {"heads": 2}, "elmo": {"filters": [[1, 8]]}}


@pytest.mark.parametrize(("family", "settings", "word"), REFUSED)
def test_what_cannot_work_is_refused_before_the_start(
    family: str, settings: str, word: str, folder: Path, tmp_path: Path
) -> None:
    shape = BASES.get(family, {"inner": 24})
    longspan.init(family, device="cpu", layers=2, width=16, **shape).save(tmp_path / "base")
    with pytest.raises(ConfigError, match=word):
        finetune(tmp_path / "base", folder, tmp_path / "r", overrides=settings.split(), device="cpu")
    assert not (tmp_path / "r").exists()


def test_equal_scores_are_refused(base: Path, tmp_path: Path) -> None:
    write(tmp_path / "t" / "train.jsonl", [{"text": "a", "score": 2}] * 4)
    with pytest.raises(DataError, match=r"2\.0"):
        finetune(base, tmp_path / "t", tmp_path / "r", device="cpu")


def labelled(labels: list[Any]) -> list[dict[str, Any]]:
    """Rows with these labels, or with these tags."""
    tags = isinstance(labels[0], list)
    return [{"words": ["a"] * len(each), "tags": each} if tags else {"text": "a", "label": each} for each in labels]


LABELS: list[tuple[list[Any], str, str]] = [
    (["x", "x"], "", "'x'"),
    (["x", "y", "z"], 'metrics = ["f1"]', "macro-f1"),
    (["x", "y"], 'metrics = ["pearson"]', "accuracy, f1"),
    ([["NN"], ["VB"]], "", "accuracy"),
    ([["O"], ["U-PER"]], "", "U-PER"),
]


@pytest.mark.parametrize(("labels", "given", "word"), LABELS)
def test_labels_that_do_not_fit_are_refused(
    labels: list[Any], given: str, word: str, base: Path, tmp_path: Path
) -> None:
    write(tmp_path / "t" / "train.jsonl", labelled(labels) * 8)
    (tmp_path / "t" / "task.toml").write_text(given)
    with pytest.raises((ConfigError, DataError), match=word):
        finetune(base, tmp_path / "t", tmp_path / "r", device="cpu")


UNSEEN: list[tuple[str, list[Any], str]] = [
    ("dev", [1], r"dev.jsonl, row 1 .*'1'.* 'x', 'y'"),
    ("dev", ["x", "X", "y"], r"dev.jsonl, row 2 .*'X'"),
    ("test", [["O"], ["B-X", "U-X"]], r"test.jsonl, row 2 .*'U-X'"),
]


@pytest.mark.parametrize(("split", "labels", "named"), UNSEEN)
def test_dev_and_test_labels_that_train_does_not_have_are_refused(
    split: str, labels: list[Any], named: str, base: Path, tmp_path: Path
) -> None:
    write(tmp_path / "t" / "train.jsonl", labelled([["O", "B-X"]] * 2 if split == "test" else ["x", "y"]))
    for name in ("dev", "test"):
        write(tmp_path / "t" / f"{name}.jsonl", labelled(labels if name == split else labels[:1]))
    with pytest.raises(DataError, match=named):
        finetune(base, tmp_path / "t", tmp_path / "r", device="cpu")


def test_held_out_labels_that_no_other_row_has_are_a_warning(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", [{"text": f"{row}", "label": "x"} for row in range(1, 7)])
    data = open_task(tmp_path)
    with pytest.warns(DataWarning, match=f"1 row .*train.jsonl .*'x' in row {data.dev[0].texts[0]};"):
        data.check_held_out(["y"])


def test_the_folders_of_all_seeds_are_checked_first(base: Path, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "seed-2").mkdir()
    (tmp_path / "seed-2" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="seed-2"):
        finetune(base, folder, tmp_path, overrides=FAST, seeds=2, device="cpu")
    assert not (tmp_path / "seed-1").exists()


@pytest.mark.parametrize("crf", [0, 4])
def test_sentences_without_room_for_a_tag_are_left_out(base: Path, tmp_path: Path, crf: int) -> None:
    """A causal tagger reads the words twice and tags the second copy, which may begin after the end."""
    rows = [{"words": ["ab"], "tags": ["B-X"]}, {"words": ["abcdefgh"] * 3, "tags": ["O", "O", "B-X"]}] * 6
    partly = {"words": ["ab"] * 3, "tags": ["B-X", "O", "O"]}
    for split, of_split in (("train", rows), ("dev", rows[:2]), ("test", [partly, rows[0]])):
        write(tmp_path / "t" / f"{split}.jsonl", of_split)
    sets = ["training.steps=2", "training.batch=2", "model.longest=16", f"model.crf={crf}"]
    with pytest.warns(DataWarning) as caught:
        result = finetune(base, tmp_path / "t", tmp_path / "r", overrides=sets, device="cpu").summary()
    assert 0 <= result["dev"] <= 1
    counts = {str(warning.message).split(" do not fit")[0] for warning in caught}
    dev_and_test = {"3 words in 1 sentence of dev", "1 word in 1 sentence of test"}
    assert counts == {"18 words in 6 sentences of train", *dev_and_test}
    predictor = load_predictor(tmp_path / "r")
    with pytest.warns(DataWarning, match="1 word in 1 sentence of the input"):
        (found,) = predictor.predict([predictor.task.example(partly, "here")])
    assert isinstance(found.label, tuple)
    assert found.label[2] == "O"
    write(tmp_path / "u" / "train.jsonl", rows[1::2])
    with pytest.warns(DataWarning), pytest.raises(DataError, match="longest"):
        finetune(base, tmp_path / "u", tmp_path / "s", overrides=sets, device="cpu")


def test_elmo_from_scratch_knows_how_tokens_are_spelled(folder: Path, tmp_path: Path) -> None:
    shape = {"layers": 1, "width": 16, "filters": [[1, 8]]}
    words = tmp_path / "words.txt"
    words.write_text("".join(f"{word}\n" for word in ["<unk>", "<eos>", *REST, *GOOD, *BAD]))
    base = longspan.init("elmo", words, device="cpu", **shape)
    base.save(tmp_path / "base")
    sets = ["training.steps=1", "training.batch=2"]
    finetune(tmp_path / "base", folder, tmp_path / "r", overrides=sets, from_scratch=True, device="cpu")
    finetune(tmp_path / "base", folder, tmp_path / "r", overrides=sets, from_scratch=True, resume="auto", device="cpu")
    assert load_predictor(tmp_path / "r").model.config.pooling == "concat"  # half of the last state has read nothing
    write(tmp_path / "t" / "train.jsonl", sentences(8, 1))
    write(tmp_path / "t" / "test.jsonl", [*sentences(2, 1), {"text": "a cake", "label": "good"}])
    (tmp_path / "few.txt").write_text("".join(f"{word}\n" for word in ["<eos>", *REST, *GOOD, *BAD]))
    longspan.init("elmo", tmp_path / "few.txt", device="cpu", **shape).save(tmp_path / "few")
    with pytest.raises(DataError, match=r"test, row 3: .*'cake'"):
        finetune(tmp_path / "few", tmp_path / "t", tmp_path / "u", overrides=sets, device="cpu")
    assert not (tmp_path / "u").exists()
    made, loaded = load_predictor(tmp_path / "r").model.base, longspan.load(tmp_path / "base", device="cpu").model
    assert torch.equal(made.embedding.spelling, loaded.embedding.spelling)
    assert not torch.equal(made.embedding.projection.weight, loaded.embedding.projection.weight)


def test_the_order_of_examples_depends_on_seed_and_pass_only() -> None:
    import numpy as np

    examples = [Sequences((np.arange(1 + k % 5),), np.empty(0, np.int64), (k % 2,)) for k in range(11)]

    def batches() -> ExampleBatches:
        return ExampleBatches(examples, 4, 3, "f", "x")

    first, second = batches(), batches()
    taken = [first.next(1) for _ in range(7)]
    for _ in range(4):
        second.next(1)
    third = batches()
    third.load_state_dict(second.state_dict())
    for k in range(4, 7):
        np.testing.assert_array_equal(third.next(1).tokens, taken[k].tokens)
    assert sorted(set(first.order().ravel().tolist())) == list(range(11))


def test_ulmfit_by_the_papers_formulas(base: Path) -> None:
    config = TrainingConfig(steps=1000, schedule="slanted-triangular")
    cut, ratio = 100, 32
    for t in (0, 1, 50, 99, 100, 101, 550, 999):
        p = t / cut if t < cut else 1 - (t - cut) / (cut * (1 / 0.1 - 1))
        assert lr_factor(config, t, t / 1000) == pytest.approx((1 + p * (ratio - 1)) / ratio)
    model = load_model(base).model
    factors = rate_factors(model, 1 / 2.6)
    assert factors["layers.1.query.weight"] == pytest.approx(factors["layers.0.query.weight"] * 2.6)
    assert factors["embedding.tables.0"] == pytest.approx(2.6**-3)
    for step, lowest in ((0, 3), (3, 3), (4, 2), (8, 1), (12, 0), (99, 0)):
        for every in (4, 0.04):
            unfreeze(model, every, step, step / 100)
            frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
            assert frozen == {name for name, depth in depths(model).items() if depth < lowest}


SHARES: list[tuple[str, dict[str, Any], dict[str, int]]] = [
    ("transformer-xl", {"heads": 2}, {"u": 1, "w": 1, "layers.1.up.weight": 2, "classifier.1.weight": 3}),
    ("bert", {"heads": 2}, {"segments": 0, "embedding_norm.weight": 0, "places.rows": 0, "pooler.weight": 3}),
    ("xlnet", {"heads": 2}, {"query_start": 0, "layers.0.segments": 1, "layers.1.u": 2, "head.biases.0": 3}),
    ("elmo", {"filters": [[1, 8]]}, {"embedding.projection.weight": 0, "backward_layers.0.input.weight": 1}),
    ("elmo", {"filters": [[1, 8]]}, {"backward_layers.1.input.weight": 2, "head.tables.0": 3}),
]


@pytest.mark.parametrize(("family", "shape", "expected"), SHARES)
def test_a_parameter_has_the_depth_of_the_lowest_layer_it_feeds(
    family: str, shape: dict[str, Any], expected: dict[str, int]
) -> None:
    base = {"layers": 2, "width": 16, "inner": None, **shape}
    found = depths(TaskModel(TaskConfig(base_family=family, base=base)))
    named = {name.removeprefix("base."): depth for name, depth in found.items()}
    assert {name: named[name] for name in expected} == expected


def test_an_ensemble_is_the_mean_of_its_members(finished: tuple[Path, dict[str, Any]], folder: Path) -> None:
    member, other = load_predictor(finished[0]), load_predictor(finished[0])
    with torch.no_grad():
        other.model.classifier[-1].bias.add_(torch.tensor([3.0, 0.0]))
    examples = open_task(folder).dev
    found = Ensemble([member, other]).predict(examples)
    for one, a, b in zip(found, member.predict(examples), other.predict(examples), strict=True):
        assert one.probabilities[1] == pytest.approx((a.probabilities[1] + b.probabilities[1]) / 2)
        assert one.label == ("good" if one.probabilities[1] > 0.5 else "bad")
    member.model.config = member.config = replace(member.config, task="tastes")
    with pytest.raises(ConfigError, match=r"'tastes'.* 'moods'"):
        Ensemble([member, other])
