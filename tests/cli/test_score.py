"""`longspan score`."""

import csv
import io
from pathlib import Path

import pytest

from tests.cli.conftest import Cli


def test_sums_equal_those_of_eval(cli: Cli, model: Path, text: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("Another text.\nWith two lines.\n")
    found = cli("score", text, other, "--model", model, "--per", "line", "--memory", 20)
    rows = list(csv.DictReader(io.StringIO(found.out, newline="")))
    for path in (text, other):
        expected = cli("eval", model, "--data", path, "--memory", 20, "--json").json
        bits = sum(float(row["bits"]) for row in rows if row["file"] == str(path))
        assert bits == pytest.approx(expected["bits_per_byte"] * expected["scored"], rel=1e-6)
    assert [row["text"] for row in rows if row["file"] == str(other)] == other.read_text().splitlines()


def test_standard_input_and_out(cli: Cli, model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"two words")))
    out = tmp_path / "t.jsonl"
    assert cli("score", "-", "--model", model, "--per", "word", "--out", out).code == 0
    assert [line.split('"text": ')[1] for line in out.read_text().splitlines()] == ['"two"}', '"words"}']


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["missing.txt"], ["missing.txt"]),
        (["."], [".", "folder"]),
        (["text.txt", "--per", "sentence"], ["--per", "sentence"]),
        (["text.txt", "--format", "xml"], ["xml"]),
        (["text.txt", "--out", "x.txt"], ["x.txt", ".csv"]),
        (["text.txt", "--out", "text.txt", "--format", "csv"], ["text.txt"]),
    ],
)
def test_errors_name_the_value(cli: Cli, model: Path, text: Path, args: list[str], words: list[str]) -> None:
    cli("score", *args, "--model", model).refused(*words)
    assert text.read_bytes().startswith(b"So it was")
