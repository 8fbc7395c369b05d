"""`longspan generate` with several prompts, several samples, stop strings and penalties."""

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Cli


def test_samples_are_those_of_consecutive_seeds(cli: Cli, model: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "one\\ntwo"}\n\n"three"\n')
    found = cli("generate", model, "--prompts", prompts, "--n", 2, "--seed", 5, "-n", 12, "--json")
    rows = [json.loads(line) for line in found.out.splitlines()]
    assert [(row["prompt"], row["sample"]) for row in rows] == [
        ("one\ntwo", 1), ("one\ntwo", 2), ("three", 1), ("three", 2)
    ]  # fmt: skip
    for row in rows:
        alone = cli("generate", model, "-p", row["prompt"], "--seed", 4 + row["sample"], "-n", 12)
        assert alone.out == row["prompt"] + row["text"] + "\n"


def test_lines_of_a_file_are_prompts(cli: Cli, model: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "p.txt"
    prompts.write_bytes(b'first "one"\r\n\n second\n')
    found = cli("generate", model, "--prompts", prompts, "-n", 0)
    assert found.out == '--- prompt 1, sample 1 ---\nfirst "one"\n--- prompt 2, sample 1 ---\n second\n'


def test_text_ends_before_a_stop_string(cli: Cli, model: Path) -> None:
    full = json.loads(cli("generate", model, "-p", "x", "-n", 60, "--json").out)["text"]
    stop = full[20:23]
    found = json.loads(cli("generate", model, "-p", "x", "-n", 60, "--json", "--stop", "@@@", "--stop", stop).out)
    assert found["text"] == full[: full.index(stop)]
    assert cli("generate", model, "-p", "x", "-n", 60, "--stop", stop).out == f"x{found['text']}\n"


def test_a_strong_penalty_forbids_repetition(cli: Cli, model: Path) -> None:
    flags = ["-p", "x", "-n", 90, "--temp", 0, "--json"]
    plain, presence = (
        json.loads(cli("generate", model, *flags, *more).out)["text"] for more in ([], ["--presence-penalty", 100])
    )
    assert len(set(plain.encode())) < 60
    # 90 different bytes: those of an untrained model are seldom characters, which are then U+FFFD.
    readable = [character for character in presence if character != "\ufffd"]
    assert len(readable) == len(set(readable))


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["-p", "x", "--n", 0], ["--n 0"]),
        (["-p", "x", "--n", 2, "--save-state", "s"], ["--save-state s"]),
        (["-p", "x", "--stop", ""], ["stop"]),
        (["-p", "x", "--prompts", "p.txt"], ["-p", "--prompts"]),
        (["--prompts", "missing.txt"], ["missing.txt"]),
        (["--prompts", "bad.jsonl"], ["line 2", "bad.jsonl"]),
        (["--prompts", "empty.txt"], ["empty.txt", "no prompts"]),
        (["-p", "x", "--repetition-penalty", 0], ["repetition_penalty=0"]),
    ],
)
def test_errors_name_the_value(cli: Cli, model: Path, args: list[object], words: list[str]) -> None:
    Path("bad.jsonl").write_text('"a"\n{"text": "b"}\n')
    Path("empty.txt").write_text("\n\n")
    cli("generate", model, *args).refused(*words)
