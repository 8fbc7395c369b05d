"""benchmarks/transfer.py: its rows and their order, the time limit, results.json, and the tables of several files."""

import argparse
import importlib
import json
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import longspan
from longspan.checkpoints.model_folder import load_model
from longspan.transfer.checks import check_settings
from longspan.transfer.finetune import finetune, resolve
from longspan.transfer.predict import Ensemble, load_predictor
from longspan.transfer.tasks import TaskData, open_task
from longspan.transfer.tasks import opened as opened_tasks

from .conftest import sentences, write

SCRIPTS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def scripts() -> SimpleNamespace:
    sys.path.insert(0, str(SCRIPTS))
    names = ("transfer", "transfer_results", "transfer_systems", "transfer_tables", "transfer_cards")
    found = SimpleNamespace(**{name.removeprefix("transfer_"): importlib.import_module(name) for name in names})
    sys.path.remove(str(SCRIPTS))
    return found


def given(scripts: SimpleNamespace, models: Path, *words: str) -> argparse.Namespace:
    return scripts.transfer.parse(["--models", str(models), "--out", str(models / "out"), *words])


def make_runs(models: Path, *names: str) -> None:
    for name in names:
        (models / name).mkdir(parents=True)


def test_one_seed_of_everything_comes_before_the_second(scripts: SimpleNamespace, tmp_path: Path) -> None:
    make_runs(tmp_path, "bert", "xlnet")
    words = ("--systems", "bert,xlnet", "--tasks", "rte,imdb,conll2003", "--scratch", "imdb", "--seeds", "2")
    jobs = scripts.transfer.all_jobs(given(scripts, tmp_path, *words))
    assert [job.seed for job in jobs] == [1] * (len(jobs) // 2) + [2] * (len(jobs) // 2)
    first = [(job.row.task, job.row.title) for job in jobs if job.seed == 1]
    must = [(task, name) for task in ("imdb", "conll2003") for name in ("bert", "xlnet")]
    assert first[:6] == [*must, ("imdb", "bert-scratch"), ("imdb", "xlnet-scratch")]
    assert first[-2:] == [("rte", "bert"), ("rte", "xlnet")]
    layers = {f"bert-{name}" for name in scripts.systems.FEATURES}
    assert {name for task, name in first[6:-2]} == {"xlnet-512", "bert-crf", "xlnet-crf", *layers}
    assert len(set(first)) == len(first)


def test_rows_of_ulmfit(scripts: SimpleNamespace, tmp_path: Path) -> None:
    make_runs(tmp_path, "ulmfit", "ulmfit-backward", "ulmfit-no-wikipedia", "awd-lstm", "awd-lstm-backward")
    words = ("--systems", "ulmfit", "--tasks", "imdb,trec6,conll2003", "--scratch", "imdb", "--seeds", "1")
    jobs = {
        (job.row.task, job.row.title): job.command
        for job in scripts.transfer.all_jobs(given(scripts, tmp_path, *words))
    }
    without = ("from-scratch", "no-wikipedia", "no-lm-tuning", "no-unfreezing", "no-discriminative-rates")
    assert {title for task, title in jobs if task == "imdb"} == {
        *scripts.systems.DIRECTIONS,
        *(f"ulmfit-{w}" for w in without),
    }
    assert [title for task, title in jobs if task == "conll2003"] == ["ulmfit"]  # tags have no ensemble
    scratch = {title for (task, title), command in jobs.items() if "--from-scratch" in command}
    assert scratch == {"ulmfit-from-scratch"}
    models = {key: Path(command[1]).name for key, command in jobs.items()}
    assert models["imdb", "ulmfit"] == "ulmfit"
    assert models["trec6", "ulmfit-backward"] == "awd-lstm-backward"  # film reviews are not its text
    assert models["imdb", "ulmfit-no-lm-tuning"] == "awd-lstm"


def test_unknown_names_and_missing_runs(
    scripts: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (("--systems", "gtp"), ("--tasks", "imbd"), ("--groups", "system")):
        with pytest.raises(SystemExit):
            given(scripts, tmp_path, *words)
        assert words[1] in capsys.readouterr().err
    make_runs(tmp_path, "gpt")
    words = ("--systems", "gpt,bert", "--tasks", "imdb", "--seeds", "1", "--set", "training.steps=2", "--list")
    assert scripts.transfer.main(["--models", str(tmp_path), *words]) == 0
    shown = capsys.readouterr()
    assert "bert" in shown.err
    assert len(shown.out.splitlines()) == 1
    assert "--epochs" not in shown.out


def test_the_rate_that_was_best_on_dev_is_used(
    scripts: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first seed is not run again. Other tasks and systems keep their rate."""
    monkeypatch.setattr(scripts.systems, "SYSTEMS", dict(scripts.systems.SYSTEMS))
    make_runs(tmp_path, "bert")
    found = [
        ("bert-1e-4", 1, 0.8, 0.7),
        ("bert-3e-4", 1, 0.7, 0.9),
        ("bert-3e-4", 2, 0.9, 0.9),
        ("gpt-1e-4", 1, 0.5, 0.5),
    ]
    entries = [
        {
            "row": row,
            "task": "imdb",
            "seed": seed,
            "metric": "accuracy",
            "dev": {"accuracy": dev},
            "test": {"accuracy": test},
        }
        for row, seed, dev, test in found
    ]
    (tmp_path / "rates.json").write_text(json.dumps({"entries": entries}))
    words = [
        "--models",
        str(tmp_path),
        "--systems",
        "bert",
        "--groups",
        "systems",
        "--tasks",
        "imdb,sst2",
        "--seeds",
        "2",
    ]
    assert scripts.transfer.main([*words, "--rates", str(tmp_path / "rates.json"), "--scratch", "imdb", "--list"]) == 0
    commands = [line.split() for line in capsys.readouterr().out.splitlines()]
    found = [
        (Path(words[words.index("--out") + 1]).parts[-3:], [w for w in words if w.startswith("training.lr=")])
        for words in commands
    ]
    slow, usual = ["training.lr=1e-4"], ["training.lr=3e-4"]
    assert found == [
        (("sst2", "bert", "seed-1"), usual),
        (("imdb", "bert-scratch", "seed-1"), slow),
        (("imdb", "bert", "seed-2"), slow),
        (("sst2", "bert", "seed-2"), usual),
        (("imdb", "bert-scratch", "seed-2"), slow),
    ]
    adopted = [(entry["row"], entry["seed"], entry["test"]["accuracy"]) for entry in scripts.systems.tune(entries)]
    assert adopted == [("bert", 1, 0.7), ("gpt", 1, 0.5)]


KINDS: dict[str, list[dict[str, Any]]] = {
    "conll2003": [{"words": ["a", "b"], "tags": ["O", "B-X"]}] * 4,
    "imdb": [{"text": "a", "label": "neg"}, {"text": "b", "label": "pos"}] * 2,
    "sts-b": [{"text_a": "a", "text_b": "b", "score": float(k)} for k in range(4)],
    "copa": [{"premise": "a", "choice1": "b", "choice2": "c", "label": k % 2} for k in range(4)],
}


def test_the_results_that_the_plan_names_can_be_merged(scripts: SimpleNamespace) -> None:
    files = sorted((SCRIPTS / "results").glob("*-transfer-*.json"))
    entries = scripts.tables.merge(files)["entries"]
    assert {"gpt", "bert", "xlnet", "transformer-xl", "longspan-xl"} <= {entry["row"] for entry in entries}


def test_complete_jobs_of_other_machines_are_not_run_again(
    scripts: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_runs(tmp_path, "bert")
    entries = [
        {"row": "bert", "task": "imdb", "seed": 1, "steps": 9, "planned_steps": 9},
        {"row": "bert-scratch", "task": "imdb", "seed": 2, "steps": 9, "planned_steps": 9},
        {"row": "bert", "task": "sst2", "seed": 2, "steps": 5, "planned_steps": 9},
    ]
    results = {"version": 1, "models": {}, "baselines": {}, "failed": {}}
    for name, some in (("a", entries[:2]), ("b", entries[2:])):
        (tmp_path / f"{name}.json").write_text(json.dumps(results | {"entries": some}))
    words = ["--models", str(tmp_path), "--systems", "bert", "--groups", "systems", "--tasks", "imdb,sst2"]
    words += [
        "--scratch",
        "imdb",
        "--seeds",
        "2",
        "--list",
        "--have",
        str(tmp_path / "a.json"),
        str(tmp_path / "b.json"),
    ]
    assert scripts.transfer.main(words) == 0
    commands = [line.split() for line in capsys.readouterr().out.splitlines()]
    found = [Path(some[some.index("--out") + 1]).parts[-3:] for some in commands]
    assert found == [
        ("sst2", "bert", "seed-1"),
        ("imdb", "bert-scratch", "seed-1"),
        ("imdb", "bert", "seed-2"),
        ("sst2", "bert", "seed-2"),
    ]


@pytest.mark.parametrize("task", KINDS)
def test_every_row_can_be_resolved(scripts: SimpleNamespace, tmp_path: Path, task: str) -> None:
    """With the settings of its system and task, for a model of its family."""
    write(tmp_path / task / "train.jsonl", KINDS[task])
    data, loaded = open_task(tmp_path / task), dict[str, Any]()
    shapes: dict[str, Any] = {"elmo": {"filters": [[1, 8]]}, "gpt": {"positions": 512}, "bert": {"positions": 512}}
    for name in ("gpt", "bert", "xlnet", "transformer-xl", "longspan-xl", "elmo", "awd-lstm"):
        layers = {"layers": 4} if name not in ("elmo", "awd-lstm") else {}
        heads = {"heads": 2} if layers else {}
        shape = {"width": 16, **layers, **heads, **shapes.get(name, {})}
        longspan.init(name, device="cpu", **shape).save(tmp_path / name)
        loaded[name] = load_model(tmp_path / name)
    names = list(dict.fromkeys(system.of for system in scripts.systems.SYSTEMS.values()))
    rows = list(scripts.systems.rows(names, (*scripts.systems.GROUPS, "rates"), [task], [task]))
    assert len(rows) >= 12
    for row in rows:
        model = loaded["awd-lstm" if row.system.of == "ulmfit" else row.system.of]
        check_settings(resolve(model, data, row.system.recipe, row.system.all_settings, epochs=row.epochs))


class Written:
    """In place of Results: counts what is added and written."""

    def __init__(self) -> None:
        self.failed: dict[str, str] = {}
        self.added: list[str] = []
        self.writes = 0

    def add(self, row: Any, *_: Any) -> None:
        self.added.append(row.task)

    def write(self) -> None:
        self.writes += 1


def test_no_job_starts_that_cannot_finish(
    scripts: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And one that runs too long is stopped: the queue ends in time with the results so far."""
    script = scripts.transfer
    monkeypatch.setattr(script, "ESTIMATE", {"imdb": 1.0, "sst2": 1000.0, "trec6": 1.0})
    codes = {"imdb": "pass", "sst2": "pass", "trec6": "import time; time.sleep(60)"}
    jobs = [script.Job(script.Row("gpt", task), 1, [task], tmp_path / task / "seed-1") for task in codes]
    real = script.subprocess.Popen
    monkeypatch.setattr(script.subprocess, "Popen", lambda c, **o: real([sys.executable, "-c", codes[c[3]]], **o))
    results, began = Written(), time.monotonic()
    queue = script.Queue(jobs, results, script.Estimates([], []), 2, began + 3.0)
    queue.run()
    assert time.monotonic() - began < 10
    assert results.added == ["imdb"]
    assert [job.row.task for job in queue.waiting] == ["sst2"]
    assert jobs[1].process is None
    assert jobs[2].process.returncode
    assert [job.row.task for job in queue.running] == ["trec6"]
    assert capsys.readouterr().out.count("not finished") == 2


def test_a_failed_job_is_run_once_more(
    scripts: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, commands = scripts.transfer, list[list[str]]()
    real = script.subprocess.Popen

    def start(command: list[str], **options: Any) -> Any:
        commands.append(command)
        return real([sys.executable, "-c", "raise SystemExit('no memory')"], **options)

    monkeypatch.setattr(script.subprocess, "Popen", start)
    job = script.Job(script.Row("gpt", "imdb"), 1, ["finetune"], tmp_path / "imdb" / "seed-1")
    results = Written()
    script.Queue([job], results, script.Estimates([], []), 1, float("inf")).run()
    assert ["training.cuda_graph=false" in command for command in commands] == [False, True]
    assert results.failed == {"imdb gpt seed 1": "no memory"}
    assert results.writes == 1


def test_a_job_without_memory_beside_others_is_run_later(
    scripts: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And fewer run at a time. On its own it would be a failure."""
    script, commands, full = scripts.transfer, list[str](), "torch.OutOfMemoryError: CUDA out of memory"

    class Process:
        """imdb runs until the other one has failed, which fails only the first time."""

        def __init__(self, command: list[str], **options: Any) -> None:
            self.task = command[3]
            commands.append(self.task)
            self.returncode = int(commands.count("sst2") == 1 and self.task == "sst2")
            options["stderr"].write(full.encode() if self.returncode else b"")

        def poll(self) -> int | None:
            return None if self.task == "imdb" and queue.at_once > 1 else self.returncode

    monkeypatch.setattr(script.subprocess, "Popen", Process)
    jobs = [script.Job(script.Row("gpt", task), 1, [task], tmp_path / task / "seed-1") for task in ("imdb", "sst2")]
    queue = script.Queue(jobs, results := Written(), script.Estimates([], []), 2, float("inf"))
    queue.run()
    assert commands == ["imdb", "sst2", "sst2"]
    assert (sorted(results.added), results.failed, queue.at_once) == (["imdb", "sst2"], {}, 1)


def test_estimates(scripts: SimpleNamespace, tmp_path: Path) -> None:
    script = scripts.transfer
    job = script.Job(script.Row("gpt", "imdb"), 2, [], tmp_path)
    known = script.Estimates([], [{"row": "bert", "task": "imdb", "job_seconds": 50.0}])
    assert script.Estimates([], []).of(job) == scripts.systems.ESTIMATE["imdb"]
    assert known.of(job) == pytest.approx(55.0)
    known.add("gpt", "imdb", 20.0)
    assert known.of(job) == pytest.approx(22.0)
    known.add("gpt", "imdb", 200.0)
    assert known.of(job, 0.25) == pytest.approx(script.AROUND + (220.0 - script.AROUND) / 4)
    assert script.Estimates(["training.seconds=30"], []).of(job) == 30 + script.AROUND


@pytest.fixture
def moods(scripts: SimpleNamespace, folder: Path, monkeypatch: pytest.MonkeyPatch) -> TaskData:
    """A small task in place of IMDB."""
    data = open_task(folder)
    monkeypatch.setattr(scripts.results, "open_task", lambda *_: data)
    scripts.results._opened.cache_clear()
    yield data
    scripts.results._opened.cache_clear()


SETS = ["training.steps=1", "training.batch=2", "training.lr=0.1"]


def test_the_ensemble_of_ulmfit_and_lengths(
    scripts: SimpleNamespace, base: Path, folder: Path, tmp_path: Path, moods: TaskData
) -> None:
    """From both directions of the seeds that have both, with the mean of their probabilities by `predict --with`."""
    arguments = given(scripts, tmp_path)
    results, rows = scripts.results.Results(tmp_path, arguments), {}
    for name, reverse in (("ulmfit", "false"), ("ulmfit-backward", "true")):
        rows[name] = scripts.systems.Row(name, "imdb")
        out = rows[name].folder(arguments.out, 1)
        finetune(base, folder, out, overrides=[*SETS, f"model.reverse={reverse}"], device="cpu")
        results.add(rows[name], 1, out, ["finetune"], True, 2.0)
    shutil.copytree(out, other := rows["ulmfit-backward"].folder(arguments.out, 2))
    results.add(rows["ulmfit-backward"], 2, other, ["finetune"], True, 2.0)
    assert {key[:3] for key in results.entries if key[0] == "ulmfit-ensemble"} == {("ulmfit-ensemble", "imdb", 1)}
    both = Ensemble([load_predictor(row.folder(arguments.out, 1)) for row in rows.values()])
    found = results.entries["ulmfit-ensemble", "imdb", 1, True]
    for split, examples in (("dev", moods.dev), ("test", moods.test())):
        assert found[split] == both.evaluate(examples)
    for entry in results.entries.values():
        right = sum(part["right"] for part in entry["by_length"])
        texts = sum(part["texts"] for part in entry["by_length"])
        assert right / texts == pytest.approx(entry["test"]["accuracy"])
        assert texts == len(moods.test())
    results.write()
    again = scripts.results.Results(tmp_path, arguments)  # entries of an earlier call stay
    assert again.entries == results.entries
    again.add(rows["ulmfit"], 1, rows["ulmfit"].folder(arguments.out, 1), ["finetune"], True, None)
    assert again.entries["ulmfit", "imdb", 1, True]["job_seconds"] == 2.0


@pytest.mark.usefixtures("moods")
def test_a_few_rows_of_a_task(scripts: SimpleNamespace, tmp_path: Path) -> None:
    sample = scripts.results.sample_of("cb", given(scripts, tmp_path, "--rows", "11"))
    found = opened_tasks.open_task(sample)
    assert found.task.metrics == ("accuracy", "macro-f1")
    assert len(found.train) + len(found.dev) == len(found.test()) == 11
    assert {row.label for row in found.train} == {"good", "bad"}
    assert scripts.results.sample_of("cb", given(scripts, tmp_path)) is None


def test_the_most_frequent_label(scripts: SimpleNamespace, tmp_path: Path) -> None:
    rows = sentences(10, seed=1)
    write(tmp_path / "t" / "train.jsonl", [*rows, {"text": "a", "label": "good"}])
    write(tmp_path / "t" / "dev.jsonl", [*rows[:4], {"text": "a", "label": "bad"}])
    assert scripts.results.majority(open_task(tmp_path / "t")) == {"dev": {"accuracy": 0.4}}


def entry(row: str, task: str, seed: int, dev: float, test: float | None = None, **more: Any) -> dict[str, Any]:
    values = {"row": row, "task": task, "seed": seed, "metric": "m", "dev": {"m": dev}, "command": f"longspan {row}"}
    return values | ({"test": {"m": test}} if test is not None else {}) | more


def test_tables_of_several_machines(
    scripts: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = [{"from": 0, "to": 100, "texts": 4, "right": 3}, {"from": 100, "to": 10**9, "texts": 2, "right": 1}]
    first = [entry("bert", "imdb", seed, 0.8, value, by_length=lengths) for seed, value in ((1, 0.9), (2, 0.92))]
    first += [entry("bert-scratch", "imdb", 1, 0.8, 0.84, steps=10, planned_steps=20)]
    first += [entry("bert", "sst2", 1, 0.85, 0.5)]
    names = scripts.systems.FEATURES
    first += [entry(f"bert-{name}", "conll2003", 1, 0.5 + 0.01 * k, 0.4) for k, name in enumerate(names)]
    scores = {
        "blimp": {"accuracy": 0.7, "accuracy_at_start": 0.6},
        "lambada/test": {"accuracy": 0.04, "perplexity": 99.5},
    }
    zero = {"row": "longspan-xl", "task": "zero-shot", "seed": 1, "scores": scores, "command": "longspan e"}
    second = [entry("bert", "imdb", 3, 0.8, 0.94), entry("bert", "imdb", 2, 0.0, 0.0), zero, zero | {"pointer": False}]
    facts = {"parameters": 25_000_000, "step": 14_000, "tokens": 450_000_000, "seconds": 480.2, "bits": 3.97}
    for name, entries in (("a", first), ("b", second)):
        values = {"version": 1, "models": {name: facts}, "baselines": {"imdb": {"test": {"m": 0.5}}}, "failed": {}}
        (tmp_path / name).write_text(json.dumps(values | {"entries": entries}))
    scripts.tables.main([str(tmp_path / "a"), str(tmp_path / "b"), "--json", str(tmp_path / "merged.json")])
    pages = dict(page.split("\n\n", 1) for page in capsys.readouterr().out.strip("# ").split("\n\n### "))
    cells = {
        line.split(" | ")[0][2:]: line.strip("| ").split(" | ") for line in pages["Systems and tasks"].splitlines()
    }
    assert cells["bert"][1:4] == ["92.00 ± 2.00", "-", "85.00 (1)"]  # the first file decides on seed 2; SST-2 is of dev
    assert cells["bert-scratch"][1] == "84.00 (1)*"  # ended by a limit in seconds
    assert cells["gpt"][1] == "-"
    assert cells["most frequent label"][1] == "50.00"
    assert "| a | 25,000,000 | 14,000 | 450,000,000 | 480 |" in pages["Pre-training"]
    reached = {line.split(" | ")[0][2:]: line.rstrip(" |").split(" | ")[-1] for line in pages["Targets"].splitlines()}
    assert (
        reached["IMDB, bert"] == reached["CoNLL-2003 dev, BERT's layers"] == reached["BLiMP, Transformer-XL"] == "yes"
    )
    assert reached["SST-2 dev, best"] == "no"
    assert reached["IMDB, ULMFiT"] == "-"
    assert "| longspan-xl, pointer off | 70.00 | 60.00 | 4.00 | 99.5 |" in pages["Without training"]
    assert "| bert | 75.00 | 50.00 |" in pages["IMDB by the number of words"]
    scripts.tables.main([str(tmp_path / "merged.json")])
    again = capsys.readouterr().out
    assert "92.00 ± 2.00" in again
    assert again.count("longspan bert`") == 2


def test_files_that_are_not_results_are_named(scripts: SimpleNamespace, tmp_path: Path) -> None:
    (tmp_path / "text.json").write_text("no JSON")
    (tmp_path / "old.json").write_text("{}")
    (tmp_path / "list.json").write_text("[1]")
    reasons = {"missing": "cannot be read", "text": "cannot be read", "old": "version", "list": "version"}
    for name, said in reasons.items():
        for script in (scripts.tables, scripts.cards):
            more = ["--out", str(tmp_path / "cards")] if script is scripts.cards else []
            with pytest.raises(SystemExit, match=rf"{name}.json.*{said}"):
                script.main([str(tmp_path / f"{name}.json"), *more])


def test_cards_are_those_of_the_results(scripts: SimpleNamespace, tmp_path: Path) -> None:
    """Every card in docs is what the program writes from the committed results."""
    results = sorted((SCRIPTS / "results").glob("*-transfer-*.json"))
    files = [path for path in results if "version" in json.loads(path.read_text())]
    scripts.cards.main([*map(str, files), "--out", str(tmp_path)])
    folder = SCRIPTS.parent / "docs" / "cards" / "transfer"
    written, committed = ({path.name: path.read_text() for path in at.glob("*.md")} for at in (tmp_path, folder))
    assert written == committed
    card = written["bert.md"]
    assert "24,548,610 parameters" in card
    assert "| imdb | bert | accuracy | 90.27 ± 0.16 | 90.66 ± 0.34 | 3 |" in card  # by hand, from three accuracies
