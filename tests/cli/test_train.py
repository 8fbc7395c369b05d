"""`longspan train`: what it refuses, what it tells, and a run that is interrupted, resumed, scored and used."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from .conftest import Cli

SHAPE = ["layers=1", "width=16", "heads=2", "segment=8", "memory=8", "inner=16"]
RUN = ["batch=2", "steps=12", "save_every=3", "validate_every=6", "validate_tokens=100", "keep=2"]
SMALL = [f"model.{key}" for key in SHAPE] + [f"training.{key}" for key in RUN]


def sets(*pairs: str) -> list[str]:
    return [part for pair in pairs for part in ("--set", pair)]


@pytest.fixture
def novel(tmp_path: Path) -> Path:
    path = tmp_path / "novel.txt"
    path.write_bytes(b"It was a dark and stormy night; the rain fell in torrents.\n" * 60)
    return path


def test_a_run_from_text_to_score(cli: Cli, novel: Path) -> None:
    told = cli("train", "--recipe", "tiny", "--data", novel, "--out", "run", *sets(*SMALL))
    assert told.code == 0, told.err
    assert told.out == "finished after step 12: run\n"
    assert "held-out text" in told.err
    names = {path.name for path in Path("run").iterdir()}
    assert {"recipe.toml", "run.json", "metrics.jsonl", "best", "checkpoint-9", "checkpoint-12", "tensorboard"} <= names
    again = cli("train", "--out", "run", "--resume", "auto")
    assert (again.code, again.out) == (0, "run was finished already, after step 12\n")
    assert cli("eval", "run", "--data", novel, "--split", "test", "--json").json["scored"] > 0
    assert cli("generate", "run", "-p", "It was", "-n", 5).code == 0
    longer = cli("train", "--out", "run", "--resume", "auto", "--set", "training.steps=15")
    assert (longer.code, longer.out) == (0, "finished after step 15: run\n")
    steps = [json.loads(line)["step"] for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 16))


def test_what_is_wrong_is_told_and_nothing_is_left(cli: Cli, novel: Path) -> None:
    small = ["train", "--recipe", "tiny", *sets(*SMALL)]
    Path("empty.txt").write_bytes(b"")
    Path("short.txt").write_bytes(b"short")
    cli("train", "--recipe", "tinny", "--out", "run").refused("did you mean 'tiny'")
    cli(*small, "--data", "nowhere.txt", "--out", "run").refused("there is no file or folder nowhere.txt")
    cli(*small, "--data", "empty.txt", "--out", "run").refused("empty.txt")
    cli(*small, "--data", "short.txt", "--out", "run").refused("short.txt")
    cli(*small, "--data", novel, "--out", "run", "--set", "training.bach=3").refused("did you mean 'training.batch'")
    cli(*small, "--data", novel, "--out", "run", "--set", "training.batch=5000").refused("too few for a batch of 5000")
    cli(*small, "--data", novel, "--out", "run", "--set", "data.tokens=byts").refused("did you mean 'bytes'")
    cli(*small, "--data", novel, "--out", "run", "--resume", "nowhere").refused("nowhere")
    cli(*small, "--data", novel, "--out", "run", "--seed", -1).refused("training.seed=-1")
    cli(*small, "--data", novel, "--out", "run", "--seed", 2**70).refused("training.seed")
    cli(*small, "--data", novel, "--out", "run", "--set", "model.width=1000000").refused("make it smaller")
    cli(*small, "--data", novel, "--out", novel).refused("is a file")
    Path("n\udcffame.txt").write_bytes(novel.read_bytes())
    cli(*small, "--data", "n\udcffame.txt", "--out", "run").refused("--data", "is not UTF-8")
    cli(*small, "--data", novel, "--out", "run", "--set", "name=n\udcff").refused("name=", "is not UTF-8")
    cli(*small, "--data", ".", "--out", "run").refused("--out run lies inside the data")
    cli(*small, "--data", novel).refused("--out is missing")
    cli("train", "--out", "run", "--resume", "auto").refused("--recipe")
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("pairs", "words"),
    [
        (["training.batch=[[0,2],[7,50000]]"], ["too few for a batch of 50000"]),
        (["model.same_length=true", "training.memory=[[0,8],[7,0]]"], ["model.memory=0 leaves it none"]),
        (["evaluation.memory=0"], ["model.memory=0 leaves it none"]),
        (["training.memory=1000000", "training.batch=2000", "model.layers=100"], ["GiB", "lower model.memory"]),
        (["training.memory=2000000000"], ["training.memory=2000000000", "1048576"]),
    ],
)
def test_what_a_run_would_meet_later_is_refused_before_it_begins(
    pairs: list[str], words: list[str], cli: Cli, novel: Path
) -> None:
    cli("train", "--recipe", "tiny", "--data", novel, "--out", "run", *sets(*SMALL, *pairs)).refused(*words)
    assert not Path("run").exists()


def test_a_family_takes_the_schedules_it_can_go_through_with(cli: Cli, novel: Path) -> None:
    shape = sets(*(f"model.{key}" for key in SHAPE if "memory" not in key), *SMALL[len(SHAPE) :])
    run = ["train", "--recipe", "demo-vanilla", "--data", novel, "--out", "run", *shape]
    cli(*run, *sets("training.memory=64")).refused("training.memory is not for a vanilla")
    cli(*run, *sets("evaluation.memory=64")).refused("evaluation.memory is not for a vanilla")
    learned = ["model.position=learned"]
    cli(*run, *sets(*learned, "training.segment=[[0,4],[9,20]]")).refused("learned 8 positions")
    cli(*run, *sets(*learned, "evaluation.segment=20")).refused("learned 8 positions")
    assert not Path("run").exists()


def test_another_run_and_another_text_are_refused(cli: Cli, novel: Path) -> None:
    small = ["train", "--recipe", "tiny", "--data", novel, "--out", "run", *sets(*SMALL)]
    assert cli(*small).code == 0
    cli(*small).refused("holds a run", "--resume auto")
    cli(*small, "--resume", "auto", "--set", "model.layers=2").refused("model.layers=1", "choose another --out")
    novel.write_bytes(novel.read_bytes() + b"The end.\n" * 50)
    cli(*small, "--resume", "auto", "--set", "training.steps=15").refused("not the text this run was trained on")


def test_print_config_is_a_recipe(cli: Cli, novel: Path) -> None:
    told = cli("train", "--recipe", "tiny", "--set", "model.memory=32", "--print-config")
    assert "memory = 32" in told.out
    Path("mine.toml").write_text(told.out)
    assert cli("train", "--recipe", "mine.toml", "--print-config").out == told.out


def test_dry_run_tells_the_cost_and_writes_nothing(cli: Cli, novel: Path) -> None:
    told = cli("train", "--recipe", "tiny", "--data", novel, "--dry-run", *sets(*SMALL))
    assert told.code == 0, told.err
    for line in ("parameters", "tokens per step", "steps per pass", "memory", "tokens per second", "time"):
        assert line in told.out
    assert {path.name for path in Path().iterdir()} == {"novel.txt", "cache"}


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_process_says_how_to_go_on(number: signal.Signals, code: int, cli: Cli, novel: Path) -> None:
    command = [sys.executable, "-c", "from longspan.cli.main import main; main()", "train", "--recipe", "tiny"]
    command += ["--data", str(novel), "--out", "run", *sets(*SMALL, "training.steps=100000")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ)
    deadline = time.monotonic() + 60
    while not list(Path("run").glob("checkpoint-*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    _, told = process.communicate(timeout=60)
    assert process.returncode == code, told
    assert "go on with: longspan train --out run --resume auto" in told
    assert "Traceback" not in told
    step = max(int(path.name.partition("-")[2]) for path in Path("run").glob("checkpoint-*"))
    going_on = cli("train", "--out", "run", "--resume", "auto", "--set", f"training.steps={step + 2}")
    assert going_on.out == f"finished after step {step + 2}: run\n"


def test_a_checkpoint_is_enough_to_go_on_from(cli: Cli, novel: Path) -> None:
    assert cli("train", "--recipe", "tiny", "--data", novel, "--out", "run", *sets(*SMALL)).code == 0
    Path("run/checkpoint-9").rename("mine")
    again = cli("train", "--resume", "mine", "--out", "branch")
    assert (again.code, again.out) == (0, "finished after step 12: branch\n")
    cli("train", "--resume", "run/best", "--recipe", "run/recipe.toml", "--out", "c").refused("is a model alone")
    cli("train", "--out", "mine", "--resume", "auto").refused("holds no run")
    assert not Path("c").exists()


def test_the_way_out_of_a_loss_that_is_not_finite_is_one(cli: Cli, novel: Path) -> None:
    small = ["train", "--recipe", "tiny", "--data", novel, *sets(*SMALL)]
    early = cli(*small, "--out", "a", "--set", "training.lr=1e38")
    assert early.code == 2
    assert early.err.endswith("begin in another --out with a lower training.lr\n")
    late = cli(*small, "--out", "b b", *sets("training.lr=1e20", "training.clip=0", "training.save_every=1"))
    assert "--resume 'b b' --out ANOTHER --set training.lr=..." in late.err
    assert cli(*small, "--out", "c", "--set", "training.steps=6").code == 0
    lower = cli("train", "--resume", "c", "--out", "d", *sets("training.steps=8", "training.lr=1e-4"))
    assert (lower.code, lower.out) == (0, "finished after step 8: d\n")


def test_what_is_broken_in_a_run_is_passed_over_in_a_line_and_kept(cli: Cli, novel: Path) -> None:
    small = ["--out", "run", *sets("training.validate_every=3", "training.save_every=6")]
    assert cli("train", "--recipe", "tiny", "--data", novel, *sets(*SMALL, "training.steps=6"), *small).code == 0
    Path("run/best/manifest.json").unlink()
    told = cli("eval", "run", "--data", novel, "--split", "test")
    assert told.code == 0
    assert told.err.startswith("longspan: warning: best is passed over: ")
    assert told.err.count("\n") == 1
    longer = cli("train", "--resume", "auto", *small, *sets("training.steps=12"))
    assert longer.code == 0, longer.err
    assert Path("run/broken-best").is_dir()
    assert cli("eval", "run", "--data", novel, "--split", "test").err == ""


def test_early_stopping_is_told_and_more_patience_goes_on(cli: Cli, novel: Path) -> None:
    # A constant text is learned by heart at once; after that a high rate makes it no better.
    watched = sets(*SMALL, "training.validate_every=1", "training.lr=0.2", "training.warmup=0", "training.steps=60")
    run = ["train", "--recipe", "tiny", "--data", novel, "--out", "run", *watched]
    told = cli(*run, "--set", "training.patience=1")
    assert told.code == 0
    assert "since held-out text was predicted no better: run\n" in told.out
    step = int(told.out.split()[3].rstrip(","))
    assert step < 60
    again = cli("train", "--out", "run", "--resume", "auto")
    assert (again.code, again.out) == (0, f"run was finished already, after step {step}\n")
    longer = cli("train", "--out", "run", "--resume", "auto", "--set", "training.patience=60")
    assert longer.out == "finished after step 60: run\n"


@pytest.fixture
def flat(tmp_path: Path) -> Path:
    """A folder with a file for each split; what each holds tells it apart, and test comes first in order."""
    (tmp_path / "flat").mkdir()
    for name, byte in (("train.txt", b"a"), ("valid.txt", b"b"), ("test.txt", b"c")):
        (tmp_path / "flat" / name).write_bytes(byte * 400)
    return tmp_path / "flat"


def test_files_named_for_splits_are_told_and_kept_apart(cli: Cli, flat: Path) -> None:
    run = ["train", "--recipe", "tiny", "--data", flat, *sets(*SMALL, "training.steps=3")]
    told = cli(*run, "--out", "run")
    assert told.code == 0, told.err
    assert [line for line in told.err.splitlines() if line.endswith(".txt")] == [
        "train: train.txt",
        "valid: valid.txt",
        "test: test.txt",
    ]
    assert cli(*run, "--dry-run").err.splitlines()[0] == "longspan: train: train.txt"
    scored = cli("eval", "run", "--data", flat, "--split", "test", "--json")
    assert (scored.json["split"], scored.json["files"]) == ("test", ["test.txt"])
    assert scored.err == "longspan: test: test.txt\n"
    alone = cli("eval", "run", "--data", flat / "train.txt", "--json").json["nats"]
    assert cli("eval", "run", "--data", flat, "--split", "train", "--json").json["nats"] == alone
    (flat / "train.txt").rename(flat / "a.txt")
    (flat / "a.txt").write_bytes(b"d" * 400)
    cli("train", "--out", "run", "--resume", "auto", *sets("training.steps=5")).refused("not the text", "flat")


def test_files_of_the_recipe_are_its_splits_wherever_it_is_scored(cli: Cli, flat: Path) -> None:
    """A train.txt that is the whole corpus has a test split of its own, which this run is trained on."""
    given = sets(*SMALL, "training.steps=6", "data.valid=flat/valid.txt", "data.test=flat/test.txt")
    told = cli(
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
    assert told.code == 0, told.err
    assert "train: train.txt" in told.err.splitlines()
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


def test_json_lines_are_warned_of_once(cli: Cli, novel: Path) -> None:
    lines = "".join(json.dumps({"text": line}) + "\n" for line in novel.read_text().splitlines())
    Path("novel.jsonl").write_text(lines)
    told = cli("train", "--recipe", "tiny", "--data", "novel.jsonl", "--out", "run", *sets(*SMALL, "training.steps=6"))
    assert told.code == 0, told.err
    assert [line.startswith("longspan: warning: ") for line in told.err.splitlines()].count(True) == 1
    assert "novel.jsonl" in told.err.splitlines()[0]
    assert "novel.jsonl" in cli("eval", "run", "--data", "novel.jsonl", "--split", "test").err


def test_rare_words_are_unknown(cli: Cli, novel: Path) -> None:
    text = b"the rain fell and the wind fell and the night\n" * 40 + b"once only, these: zephyr\n" + b"the end\n" * 9
    novel.write_bytes(text + b"the rain fell\n" * 20)
    words = ["train", "--recipe", "tiny", "--data", novel, *sets(*SMALL, "training.validate_every=0")]
    assert cli(*words, "--out", "all", *sets("data.tokens=words")).code == 0
    assert cli(*words, "--out", "few", *sets("data.tokens=words", "data.minimum=2")).code == 0
    common = {"<eos>", "<unk>", "the", "rain", "fell", "and", "wind", "night", "end"}
    assert cli("info", "few", "--json").json["vocabulary"] == len(common)
    assert cli("info", "all", "--json").json["vocabulary"] == len(common | {"once", "only,", "these:", "zephyr"})
    cli(*words, "--out", "run", *sets("data.minimum=2")).refused("data.minimum=2 counts words")
    cli(*words, "--out", "run", *sets("data.tokens=words", "data.minimum=0")).refused("must be at least 1")
