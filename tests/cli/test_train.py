"""`longspan train`: refused arguments, output, and runs that are interrupted, resumed, scored and used."""

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.programs import PYTHON

from .conftest import Cli

SHAPE = ["layers=1", "width=16", "heads=2", "inner=16"]
RUN = [
    "segment=8",
    "memory=8",
    "batch=2",
    "steps=12",
    "save_every=3",
    "validate_every=6",
    "validate_tokens=100",
    "keep=2",
]
SMALL = [f"model.{key}" for key in SHAPE] + [f"training.{key}" for key in RUN]


def sets(*pairs: str) -> list[str]:
    return [part for pair in pairs for part in ("--set", pair)]


@pytest.fixture
def novel(tmp_path: Path) -> Path:
    path = tmp_path / "novel.txt"
    path.write_bytes(b"It was a dark and stormy night; the rain fell in torrents.\n" * 60)
    return path


def test_train_resume_score_generate_extend(cli: Cli, novel: Path) -> None:
    result = cli("train", "--recipe", "tiny", "--data", novel, "--out", "run", *sets(*SMALL))
    assert result.code == 0, result.err
    assert result.out == "finished after step 12: run\n"
    assert "validation: " in result.err
    names = {path.name for path in Path("run").iterdir()}
    assert {"recipe.toml", "run.json", "metrics.jsonl", "best", "checkpoint-9", "checkpoint-12", "tensorboard"} <= names
    again = cli("train", "--out", "run", "--resume", "auto")
    assert (again.code, again.out) == (0, "run is already finished (step 12)\n")
    assert cli("eval", "run", "--data", novel, "--split", "test", "--json").json["scored"] > 0
    assert cli("generate", "run", "-p", "It was", "-n", 5).code == 0
    longer = cli("train", "--out", "run", "--resume", "auto", "--set", "training.steps=15")
    assert (longer.code, longer.out) == (0, "finished after step 15: run\n")
    steps = [json.loads(line)["step"] for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 16))


def test_budgets(cli: Cli, novel: Path) -> None:
    line = ["train", "--recipe", "tiny", "--data", novel, "--out", "runs", *sets(*SMALL, "training.warmup=2")]
    cli(*line, "--budgets", "4,x").refused("--budgets 4,x")
    cli(*line, "--budgets", "8", "--track", "wandb").refused("--track")
    cli(*line, "--budgets", "8", "--decay", "2").refused("decay 2")
    cli(*line, "--budgets", "8", "--print-config").refused("--print-config")
    cli(*line, "--decay", "0.5").refused("--decay 0.5", "--budgets")
    cli(*line, "--budgets", "8", "--decay", "2", "--dry-run").refused("decay 2")
    assert re.search(r"time +[1-9]\d* min", cli(*line, "--budgets", "4,10000000", "--dry-run").out)
    result = cli(*line, "--budgets", "4,8", "--decay", "0.5")
    assert result.out == "finished after step 4: runs/steps-4\nfinished after step 8: runs/steps-8\n", result.err
    again = cli(*line, "--budgets", "4,8", "--decay", "0.5")
    assert again.out.count("already finished") == 2


def test_errors_name_the_cause_and_leave_no_files(cli: Cli, novel: Path) -> None:
    small = ["train", "--recipe", "tiny", *sets(*SMALL)]
    Path("empty.txt").write_bytes(b"")
    Path("short.txt").write_bytes(b"short")
    cli("train", "--recipe", "tinny", "--out", "run").refused("did you mean 'tiny'")
    cli(*small, "--data", "nowhere.txt", "--out", "run").refused("nowhere.txt")
    cli(*small, "--data", "empty.txt", "--out", "run").refused("empty.txt")
    cli(*small, "--data", "short.txt", "--out", "run").refused("short.txt")
    cli(*small, "--data", novel, "--out", "run", "--set", "training.bach=3").refused("did you mean 'training.batch'")
    cli(*small, "--data", novel, "--out", "run", "--set", "training.batch=5000").refused("novel.txt", "batch of 5000")
    cli(*small, "--data", novel, "--out", "run", "--set", "data.tokenizer=byts").refused("did you mean 'bytes'")
    cli(*small, "--data", novel, "--out", "run", "--resume", "nowhere").refused("nowhere")
    cli(*small, "--data", novel, "--out", "run", "--seed", -1).refused("training.seed=-1")
    cli(*small, "--data", novel, "--out", "run", "--seed", 2**70).refused("training.seed")
    cli(*small, "--data", novel, "--out", "run", "--set", "model.width=1000000").refused("GiB")
    cli(*small, "--data", novel, "--out", novel).refused(f"{novel} is a file")
    Path("n\udcffame.txt").write_bytes(novel.read_bytes())
    cli(*small, "--data", "n\udcffame.txt", "--out", "run").refused("data.corpus", "UTF-8")
    cli(*small, "--data", novel, "--out", "run", "--set", "name=n\udcff").refused("name=", "UTF-8")
    cli(*small, "--data", ".", "--out", "run").refused("run is inside", "data")
    cli(*small, "--data", novel).refused("--out")
    cli("train", "--out", "run", "--resume", "auto").refused("no run in run", "recipe")
    cli("train", "--out", "run").refused("no recipe")
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("pairs", "words"),
    [
        (["training.batch=[[0,2],[7,50000]]"], ["novel.txt", "batch of 50000"]),
        (["training.same_length=true", "training.memory=[[0,8],[7,0]]"], ["same_length=true", "memory"]),
        (["evaluation.memory=0"], ["same_length=true", "memory"]),
        (["training.memory=1000000", "training.batch=2000", "model.layers=100"], ["GiB", "training.memory"]),
        (["training.memory=2000000000"], ["training.memory=2000000000", "1048576"]),
    ],
)
def test_errors_of_later_steps_are_found_before_the_run_starts(
    pairs: list[str], words: list[str], cli: Cli, novel: Path
) -> None:
    cli("train", "--recipe", "tiny", "--data", novel, "--out", "run", *sets(*SMALL, *pairs)).refused(*words)
    assert not Path("run").exists()


def test_a_family_without_memory_refuses_settings_it_cannot_use(cli: Cli, novel: Path) -> None:
    shape = sets(*(pair for pair in SMALL if "memory" not in pair))
    run = ["train", "--recipe", "demo-vanilla", "--data", novel, "--out", "run", *shape]
    cli(*run, *sets("training.memory=64")).refused("training.memory", "vanilla")
    cli(*run, *sets("evaluation.memory=64")).refused("evaluation.memory", "vanilla")
    learned = ["model.position=learned", "model.max_distance=7"]
    cli(*run, *sets(*learned, "training.segment=[[0,4],[9,20]]")).refused("20", "8 learned positions")
    cli(*run, *sets(*learned, "evaluation.segment=20")).refused("20", "8 learned positions")
    assert not Path("run").exists()


def test_a_changed_recipe_or_text_is_refused(cli: Cli, novel: Path) -> None:
    small = ["train", "--recipe", "tiny", "--data", novel, "--out", "run", *sets(*SMALL)]
    assert cli(*small).code == 0
    cli(*small).refused("run already", "--resume auto")
    cli(*small, "--resume", "auto", "--set", "model.layers=2").refused("run has model.layers=1", " 2;")
    novel.write_bytes(novel.read_bytes() + b"The end.\n" * 50)
    cli(*small, "--resume", "auto", "--set", "training.steps=15").refused("novel.txt", "fingerprint")


def test_print_config_is_a_recipe(cli: Cli, novel: Path) -> None:
    result = cli("train", "--recipe", "tiny", "--set", "training.memory=32", "--print-config")
    assert "memory = 32" in result.out
    Path("mine.toml").write_text(result.out)
    assert cli("train", "--recipe", "mine.toml", "--print-config").out == result.out


def test_dry_run_prints_the_cost_and_writes_nothing(cli: Cli, novel: Path) -> None:
    result = cli("train", "--recipe", "tiny", "--data", novel, "--dry-run", *sets(*SMALL))
    assert result.code == 0, result.err
    for line in ("parameters", "tokens per step", "steps per pass", "memory", "tokens per second", "time"):
        assert line in result.out
    assert {path.name for path in Path().iterdir()} == {"novel.txt", "cache"}


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_process_prints_how_to_continue(number: signal.Signals, code: int, cli: Cli, novel: Path) -> None:
    command = [PYTHON, "-c", "from longspan.cli.main import main; main()", "train", "--recipe", "tiny"]
    command += ["--data", str(novel), "--out", "run", *sets(*SMALL, "training.steps=100000")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ)
    deadline = time.monotonic() + 60
    while not list(Path("run").glob("checkpoint-*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert "longspan train --out run --resume auto" in err
    assert "Traceback" not in err
    step = max(int(path.name.partition("-")[2]) for path in Path("run").glob("checkpoint-*"))
    resumed = cli("train", "--out", "run", "--resume", "auto", "--set", f"training.steps={step + 2}")
    assert resumed.out == f"finished after step {step + 2}: run\n"


def test_a_checkpoint_alone_can_be_resumed(cli: Cli, novel: Path) -> None:
    assert cli("train", "--recipe", "tiny", "--data", novel, "--out", "run", *sets(*SMALL)).code == 0
    Path("run/checkpoint-9").rename("mine")
    again = cli("train", "--resume", "mine", "--out", "branch")
    assert (again.code, again.out) == (0, "finished after step 12: branch\n")
    cli("train", "--resume", "run/best", "--recipe", "run/recipe.toml", "--out", "c").refused("run/best")
    cli("train", "--out", "mine", "--resume", "auto").refused("mine is not empty")
    assert not Path("c").exists()


def test_the_fix_for_a_loss_that_is_not_finite_works(cli: Cli, novel: Path) -> None:
    small = ["train", "--recipe", "tiny", "--data", novel, *sets(*SMALL)]
    early = cli(*small, "--out", "a", "--set", "training.lr=1e38")
    assert early.code == 2
    assert early.err.endswith("another folder with a lower training.lr\n")
    late = cli(*small, "--out", "b b", *sets("training.lr=1e20", "training.clip=0", "training.save_every=1"))
    assert "--resume 'b b' --out ANOTHER --set training.lr=..." in late.err
    assert cli(*small, "--out", "c", "--set", "training.steps=6").code == 0
    lower = cli("train", "--resume", "c", "--out", "d", *sets("training.steps=8", "training.lr=1e-4"))
    assert (lower.code, lower.out) == (0, "finished after step 8: d\n")


def test_a_broken_best_is_skipped_with_one_warning_and_kept(cli: Cli, novel: Path) -> None:
    small = ["--out", "run", *sets("training.validate_every=3", "training.save_every=6")]
    assert cli("train", "--recipe", "tiny", "--data", novel, *sets(*SMALL, "training.steps=6"), *small).code == 0
    Path("run/best/manifest.json").unlink()
    result = cli("eval", "run", "--data", novel, "--split", "test")
    assert result.code == 0
    assert result.err.startswith("longspan: warning: skipped best: ")
    assert result.err.count("warning") == 1
    longer = cli("train", "--resume", "auto", *small, *sets("training.steps=12"))
    assert longer.code == 0, longer.err
    assert Path("run/broken-best").is_dir()
    assert "warning" not in cli("eval", "run", "--data", novel, "--split", "test").err


def test_more_patience_continues_a_run_that_stopped_early(cli: Cli, novel: Path) -> None:
    # A repeated text is memorised at once. After that a high learning rate makes the score worse.
    watched = sets(*SMALL, "training.validate_every=1", "training.lr=0.2", "training.warmup=0", "training.steps=60")
    run = ["train", "--recipe", "tiny", "--data", novel, "--out", "run", *watched]
    result = cli(*run, "--set", "training.patience=1")
    assert result.code == 0
    assert result.out.startswith("stopped early after step ")
    step = int(result.out.split()[4].rstrip(","))
    assert step < 60
    again = cli("train", "--out", "run", "--resume", "auto")
    assert (again.code, again.out) == (0, f"run is already finished (step {step})\n")
    longer = cli("train", "--out", "run", "--resume", "auto", "--set", "training.patience=60")
    assert longer.out == "finished after step 60: run\n"


@pytest.fixture
def flat(tmp_path: Path) -> Path:
    """A folder with a file for each split. Each has another byte, and test is first in alphabetical order."""
    (tmp_path / "flat").mkdir()
    for name, byte in (("train.txt", b"a"), ("valid.txt", b"b"), ("test.txt", b"c")):
        (tmp_path / "flat" / name).write_bytes(byte * 400)
    return tmp_path / "flat"


def test_files_named_after_splits_are_listed_and_not_mixed(cli: Cli, flat: Path) -> None:
    run = ["train", "--recipe", "tiny", "--data", flat, *sets(*SMALL, "training.steps=3")]
    result = cli(*run, "--out", "run")
    assert result.code == 0, result.err
    assert [line for line in result.err.splitlines() if line.endswith(".txt")] == [
        "train: 400 tokens in train.txt",
        "valid: 400 tokens in valid.txt",
        "test: 400 tokens in test.txt",
    ]
    assert cli(*run, "--dry-run").err.splitlines()[0] == "longspan: train: 400 tokens in train.txt"
    scored = cli("eval", "run", "--data", flat, "--split", "test", "--json")
    assert (scored.json["split"], scored.json["files"]) == ("test", ["test.txt"])
    assert scored.err == "longspan: test: 400 tokens in test.txt\n"
    alone = cli("eval", "run", "--data", flat / "train.txt", "--json").json["nats"]
    assert cli("eval", "run", "--data", flat, "--split", "train", "--json").json["nats"] == alone
    (flat / "train.txt").rename(flat / "a.txt")
    (flat / "a.txt").write_bytes(b"d" * 400)
    cli("train", "--out", "run", "--resume", "auto", *sets("training.steps=5")).refused("flat", "fingerprint")


def test_the_splits_of_a_recipe_are_used_for_scoring(cli: Cli, flat: Path) -> None:
    """Alone, train.txt has a test split of its own, but this run is trained on that part too."""
    given = sets(*SMALL, "training.steps=6", "data.valid=flat/valid.txt", "data.test=flat/test.txt")
    result = cli(
        "train",
        "--recipe",
        "tiny",
        "--data",
        "flat/train.txt",
        "--out",
        "run",
        *sets(*SMALL, "training.steps=6"),
        *given,
    )
    assert result.code == 0, result.err
    assert "train: 400 tokens in train.txt" in result.err.splitlines()
    assert json.loads(Path("run/run.json").read_text())["data"]["tokens"] == 400
    assert f'test = "{flat / "test.txt"}"' in Path("run/recipe.toml").read_text()
    for model in ("run", "run/best", "run/checkpoint-6"):
        scored = cli("eval", model, "--data", "flat/train.txt", "--split", "test", "--json").json
        assert (scored["tokens"], scored["files"]) == (400, [str(flat / "test.txt")])
    assert cli("eval", "run", "--data", "flat/test.txt", "--split", "test", "--json").json["tokens"] == 20
    assert cli("eval", "run", "--data", "flat/train.txt", "--json").json["tokens"] == 400
    assert f"--data {flat / 'test.txt'}" in Path("run/best/README.md").read_text()
    Path("moved").mkdir()
    flat.rename("moved/flat")
    moved = sets("data.valid=moved/flat/valid.txt", "data.test=moved/flat/test.txt", "training.steps=7")
    again = cli("train", "--data", "moved/flat/train.txt", "--out", "run", "--resume", "auto", *moved)
    assert (again.code, again.out) == (0, "finished after step 7: run\n")


def test_files_that_cannot_be_a_split_are_refused(cli: Cli, flat: Path) -> None:
    small = ["train", "--recipe", "tiny", "--out", "run", *sets(*SMALL)]
    cli(*small, "--data", flat, *sets("data.valid=nowhere")).refused("nowhere")
    cli(*small, "--data", flat, *sets("data.valid=")).refused("data.valid")
    cli(*small, "--data", flat, *sets("data.valid=[1]")).refused("data.valid")
    cli(*small, "--data", flat, *sets("data.test=flat/valid.txt")).refused("valid.txt", "data.test")
    cli(*small, "--data", "stdlib", *sets("data.test=flat/test.txt")).refused("stdlib", "data.test")
    Path("other").mkdir()
    cli(*small[:3], "--out", "other/run", *sets(*SMALL), "--data", flat, *sets("data.test=other")).refused("other/run")
    assert not Path("run").exists()


def test_json_lines_give_one_warning(cli: Cli, novel: Path) -> None:
    lines = "".join(json.dumps({"text": line}) + "\n" for line in novel.read_text().splitlines())
    Path("rows.txt").write_text(lines)
    result = cli("train", "--recipe", "tiny", "--data", "rows.txt", "--out", "run", *sets(*SMALL, "training.steps=6"))
    assert result.code == 0, result.err
    assert [line.startswith("longspan: warning: ") for line in result.err.splitlines()].count(True) == 1
    assert "rows.txt" in result.err.splitlines()[0]
    assert "rows.txt" in cli("eval", "run", "--data", "rows.txt", "--split", "test").err


def test_rare_words_become_unk(cli: Cli, novel: Path) -> None:
    text = b"the rain fell and the wind fell and the night\n" * 40 + b"once only, these: zephyr\n" + b"the end\n" * 9
    novel.write_bytes(text + b"the rain fell\n" * 20)
    words = ["train", "--recipe", "tiny", "--data", novel, *sets(*SMALL, "training.validate_every=0")]
    assert cli(*words, "--out", "all", *sets("data.tokenizer=words")).code == 0
    assert cli(*words, "--out", "few", *sets("data.tokenizer=words", "data.minimum=2")).code == 0
    common = {"<eos>", "<unk>", "the", "rain", "fell", "and", "wind", "night", "end"}
    assert cli("info", "few", "--json").json["vocabulary"] == len(common)
    assert cli("info", "all", "--json").json["vocabulary"] == len(common | {"once", "only,", "these:", "zephyr"})
    cli(*words, "--out", "run", *sets("data.minimum=2")).refused("data.minimum=2", "words")
    cli(*words, "--out", "run", *sets("data.tokenizer=words", "data.minimum=0")).refused("data.minimum=0", "1")
