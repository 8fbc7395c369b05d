"""Texts on the command line: tokenizers, formats, splits, sentences and models to start from."""

import io
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from longspan.cli.main import app
from longspan.data.corpora import CORPORA
from longspan.text_model import load
from tests.cli.conftest import Cli
from tests.cli.test_train import SMALL, sets

LINES = [f"Line {k} of a text about rivers and {'towns' if k % 3 else 'naïve cats'}." for k in range(60)]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"body": line}) + "\n" for line in LINES))
    return path


def test_a_tokenizer_is_trained_used_and_compared(cli: Cli, rows: Path) -> None:
    made = cli("tokenizer", "train", "--data", rows, "--field", "body", "--vocabulary", 300, "--out", "bpe")
    assert (made.code, made.out.split()[:2]) == (0, ["tokens", "300"]), made.err
    cli("tokenizer", "train", "--data", rows, "--vocabulary", 300, "--out", "bpe").refused("bpe")
    few = cli("tokenizer", "train", "--data", rows, "--field", "body", "--vocabulary", 9999, "--out", "few")
    assert few.code == 0
    assert "9,999" in few.err  # the vocabulary is smaller, and a warning says so
    cli("tokenizer", "train", "--data", rows, "--vocabulary", 300, "--out", "x").refused("line 1", "'body'")
    cli("tokenizer", "train", "--data", rows, "--field", "body", "--vocabulary", 9, "--out", "x").refused("256")
    cli("tokenizer", "train", "--data", "enwik", "--vocabulary", 300, "--out", "x").refused(
        "longspan: no corpus", "'enwik8'?"
    )
    given = sets(*SMALL, "training.steps=2", "training.validate_every=1", "data.tokenizer=bpe")
    trained = cli("train", "--recipe", "tiny", "--data", rows, "--field", "body", *given, "--out", "run")
    assert trained.code == 0, trained.err
    assert "train: " in trained.err
    assert " per byte" in trained.err
    scored = cli("eval", "run", "--data", rows, "--split", "test", "--json").json
    text = "".join(LINES[-3:])
    total = scored["nats"] * scored["scored"]
    assert scored["bits_per_byte"] == pytest.approx(total / math.log(2) / len(text.encode()))
    assert scored["perplexity_per_word"] == pytest.approx(math.exp(total / sum(len(x.split()) for x in LINES[-3:])))
    assert json.loads(Path("run/validation.jsonl").read_text().splitlines()[0])["bits_per_byte"] > 0
    found = load("run").score(LINES[0])
    assert found.bits_per_byte == pytest.approx(found.bits * found.scored / len(LINES[0].encode()))
    assert cli("generate", "run", "-p", "Line", "-n", 5).code == 0


INTERRUPTED = """
import os, signal, sys, time
from longspan.cli.main import main
from longspan.data import encoded, sample

def find_source(*_, **__):
    exec("os.kill(os.getpid(), signal.SIGINT); time.sleep(20)")  # an import that makes a dataclass ends so

encoded.find_source = sample.find_source = find_source
main()
"""


@pytest.mark.parametrize("command", ["tokenizer train --vocabulary 300 --out bpe --data", "data info"])
def test_an_interrupt_is_one_line(command: str, rows: Path, tmp_path: Path) -> None:
    """Also while a library works in another thread."""
    (tmp_path / "interrupted.py").write_text(INTERRUPTED)
    words = [sys.executable, "-m", "interrupted", *command.split(), rows]  # as in `python -m longspan`
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, timeout=30, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "longspan: interrupted\n")
    assert not (tmp_path / "bpe").exists()


def test_info_lists_files_and_tokens_of_every_split(cli: Cli, rows: Path) -> None:
    result = cli("data", "info", rows, "--field", "body", "--tokenizer", "words")
    assert result.code == 0, result.err
    assert [line.partition(" tokens in rows.jsonl")[0] for line in result.out.splitlines()[:3]] == [
        f"train: {sum(len(line.split()) + 1 for line in LINES[:54])}",
        f"valid: {sum(len(line.split()) + 1 for line in LINES[54:57])}",
        f"test: {sum(len(line.split()) + 1 for line in LINES[57:])}",
    ]
    splits = cli("data", "info", rows, "--field", "body", "--json").json["splits"]
    assert {name: facts["documents"] for name, facts in splits.items()} == {"train": 54, "valid": 3, "test": 3}
    cli("data", "info", rows).refused("line 1", "'body'")


def test_info_fails_if_a_split_cannot_be_used(cli: Cli, tmp_path: Path) -> None:
    """The other splits are described. A split that nothing is named after is no error."""
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "train.txt").write_text("abc\n" * 9)
    (tmp_path / "c" / "test.txt").write_text("aé")
    assert cli("data", "info", "c").code == 0
    for json_flag in ([], ["--json"]):
        result = cli("data", "info", "c", "--tokenizer", "characters", *json_flag)
        result.refused("c/test.txt", "'é'")
    splits = result.json["splits"]
    assert (splits["train"]["tokens"], splits["test"]["files"]) == (35, ["test.txt"])  # by hand: 5% of 36 bytes is 1
    assert "'é'" in splits["test"]["error"]
    (tmp_path / "c" / "dev.txt").touch()
    result = cli("data", "info", "c", "--json")
    result.refused("valid split", "dev.txt has no text")
    assert result.json["splits"]["valid"]["files"] == ["dev.txt"]
    result = cli("data", "info", "c")
    result.refused("valid split")
    assert "valid: no text in dev.txt" in result.out
    (tmp_path / "c" / "test.txt").unlink()
    (tmp_path / "c" / "dev.txt").write_text("cab")
    assert set(cli("data", "info", "c", "--json").json["splits"]) == {"train", "valid"}


def test_info_describes_a_corpus_without_training_text(cli: Cli, tmp_path: Path) -> None:
    """By hand: seven sentences of two words, each after <S>, and one more <S> at the end of each file."""
    folder = CORPORA["lm1b"].folder(tmp_path / "cache")
    folder.mkdir(parents=True)
    for name, sentences in (("10", 3), ("11", 4)):
        (folder / f"news.en.heldout-000{name}-of-00050").write_text("a b\n" * sentences)
    splits = cli("data", "info", "lm1b", "--json").json["splits"]
    assert {name: facts["tokens"] for name, facts in splits.items()} == {"unused": 7 * 3 + 2}
    assert cli("data", "info", "lm1b").out.startswith("unused: 23 tokens in news.en.heldout-00010-of-00050, ")
    (folder / "news.en.heldout-00000-of-00050").write_text("b\n")
    splits = cli("data", "info", "lm1b", "--json").json["splits"]
    assert {name: facts["tokens"] for name, facts in splits.items()} == {"valid": 3, "test": 3}


def test_standard_input(cli: Cli, rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pipe() -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(rows.read_bytes())))

    pipe()
    train = cli("data", "info", "-", "--field", "body", "--json").json["splits"]["train"]
    assert train["documents"] == 54
    assert [name.partition(" (")[0] for name in train["files"]] == ["standard input"]
    pipe()
    given = sets(*SMALL, "training.steps=1")
    assert cli("train", "--recipe", "tiny", "--data", "-", "--field", "body", *given, "--out", "run").code == 0
    more = sets("training.steps=2")
    assert cli("train", "--out", "run", "--resume", "auto", *more).code == 0  # the text is in the cache


def test_fine_tuning_starts_from_a_model(cli: Cli, rows: Path, tmp_path: Path) -> None:
    text = tmp_path / "new.txt"
    text.write_text("rivers and rivers of cats. " * 40)
    given = sets(*SMALL, "training.steps=2", "data.tokenizer=characters")
    made = cli("train", "--recipe", "tiny", "--data", rows, "--field", "body", *given, "--out", "a")
    assert made.code == 0, made.err
    tuned = ["train", "--recipe", "tiny", "--data", text, "--init-from", "a"]
    assert cli(*tuned, "--out", "b", *sets("training.steps=1", "training.lr=1e-30")).code == 0
    first, second = (cli("eval", name, "--data", text, "--json").json["nats"] for name in "ab")
    assert second == pytest.approx(first, abs=1e-6)
    assert cli(*tuned, "--out", "c", *sets("training.steps=30", "training.lr=1e-2")).code == 0
    assert cli("eval", "c", "--data", text, "--json").json["nats"] < first - 0.3
    Path("a").rename("moved")
    assert cli("train", "--out", "c", "--resume", "auto", *sets("training.steps=31")).code == 0
    tuned[-1] = "moved"
    cli(*tuned, "--out", "d", *sets("data.tokenizer=bytes")).refused("bytes", "characters", "data.tokenizer")
    cli(*tuned, "--out", "d", *sets("model.width=48")).refused("moved", "model.width=48", "instead of 16")
    cli(*tuned, "--out", "d", *sets("model.layers=3", "model.dropout=0.3")).refused("model.layers=3 instead of 1;")
    cli(*tuned, "--out", "d", *sets("model.family=rotary")).refused("rotary", "transformer-xl", "moved")
    cli(*tuned[:-1], "none", "--out", "d").refused("none")


def test_sentences_are_scored_with_an_empty_memory(cli: Cli, tmp_path: Path) -> None:
    folder = CORPORA["lm1b"].folder(tmp_path / "cache")
    folder.mkdir(parents=True)
    (folder / "news.en-00001-of-00100").write_text("the cat sat on the mat .\nthe dog sat .\n" * 40)
    (folder / "news.en.heldout-00000-of-00050").write_text("the dog sat on the cat .\nthe mat .\na dog .\n")
    given = sets("model.layers=1", "model.width=16", "model.heads=2", "training.steps=30", "training.lr=0.01")
    given += sets("data.tokenizer=lm1b-authors", "data.sentences=true")
    made = cli("train", "--recipe", "tiny", "--data", "lm1b", *given, "--out", "run")
    assert made.code == 0, made.err
    held_out = folder / "news.en.heldout-00000-of-00050"
    test, file = ("--data", "lm1b", "--split", "test"), ("--data", held_out)
    given = [(*file, "--sentences"), test, (*test, "--sentences"), file, (*test, "--no-sentences")]
    scores = [cli("eval", "run", *options, "--json").json for options in given]
    apart, packed = scores[0], scores[-1]
    assert [score["nats"] for score in scores] == [apart["nats"]] * 3 + [packed["nats"]] * 2
    assert packed["scored"] == apart["scored"] == 7 + 3 + 3 + 3
    model = load("run")
    each = [model.score(line) for line in ("the dog sat on the cat .", "the mat .", "a dog .")]
    assert apart["nats"] == pytest.approx(sum(one.nats * one.scored for one in each) / 16, rel=1e-5)
    assert packed["nats"] != pytest.approx(apart["nats"], rel=1e-4)
    cli("eval", "--data", held_out, "--sentences").refused("--sentences", "data.sentences", "bytes", "lm1b-authors")


def test_every_command_reads_json_lines_and_encodings(
    cli: Cli, model: Path, rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same text as JSON lines, in another encoding and on standard input has the same losses."""
    text = "".join(LINES)
    Path("plain.txt").write_text(text)
    Path("latin.txt").write_text(text, encoding="latin1")
    fast = ("--contexts", "5:15:5", "--targets", 12, "--json")
    expected = cli("recl", model, "--data", "plain.txt", *fast).json
    assert cli("recl", model, "--data", rows, "--field", "body", *fast).json == expected
    assert cli("recl", model, "--data", "latin.txt", "--encoding", "latin1", *fast).json == expected
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    assert cli("recl", model, "--data", "-", *fast).json == expected
    cli("recl", model, "--data", rows, *fast).refused("line 1", "'body'", "--field")
    costs = [
        cli("export", model, f"int8-{k}", "--int8", "--data", *form).out.partition("cost:")[2]
        for k, form in enumerate((["plain.txt"], [rows, "--field", "body"], ["latin.txt", "--encoding", "latin1"]))
    ]
    assert costs[0]
    assert costs == [costs[0]] * 3
    cli("figures", model, "--data", rows, "--memories", "4", "--out", "p").refused("line 1", "'body'", "--field")


def test_the_options_of_a_text_are_the_same_everywhere() -> None:
    """Tasks have their own formats; `score` reads files as they are, because its offsets are those of the bytes."""
    texts = {name: options for name, options in commands(typer.main.get_command(app)) if "--data" in options}
    assert {"train", "eval", "recl", "figures", "compare", "export", "tokenizer train"} <= set(texts)
    for name, options in texts.items():
        if name not in ("finetune", "predict", "embed", "evaluate-tasks"):
            assert {"--field", "--encoding"} <= options, name


def commands(command: Any, name: str = "") -> Iterator[tuple[str, set[str]]]:
    """All commands with the names of their options."""
    for each, below in getattr(command, "commands", {}).items():
        yield from commands(below, f"{name} {each}".strip())
    yield name, {option for parameter in command.params for option in parameter.opts}
