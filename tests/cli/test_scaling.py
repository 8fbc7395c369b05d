"""`longspan scaling`: a table, a JSON object and a figure from points."""

import dataclasses
import json
from pathlib import Path

import pytest

from longspan.cli.main import run
from longspan.experiments.scaling.points import write_csv
from tests.experiments.scaling.test_study import points

pytest.importorskip("matplotlib")


@pytest.fixture
def table(tmp_path: Path) -> Path:
    write_csv(
        [*points(models=4, group="training.memory=0"), *points(models=4, seed=1, group="training.memory=512")],
        tmp_path / "points.csv",
    )
    return tmp_path / "points.csv"


@pytest.mark.usefixtures("undrawn")
def test_prints_writes_and_repeats(table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["scaling", str(table), "--resamples", "20", "--out", str(tmp_path / "found")]) == 0
    shown = capsys.readouterr().out
    assert "from smaller models" in shown
    assert "no clear difference" in shown
    assert "at equal size and tokens" in shown
    first = json.loads((tmp_path / "found" / "scaling.json").read_text())
    assert {path.name for path in (tmp_path / "found").iterdir()} >= {"scaling.png", "scaling.svg", "points.csv"}
    rows = (tmp_path / "found" / "points.csv").read_text().splitlines(keepends=True)
    half = tmp_path / "half.csv"
    half.write_text("".join(row for row in rows if "memory=512" not in row))
    assert run(["scaling", str(half), "--resamples", "20", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["fits"] == first["fits"][::2]  # the written points repeat the fit
    assert [one["count"] for one in again["fits"]] == ["non_embedding", "parameters"]


def test_small_models_can_be_left_out(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = sorted({point.non_embedding for point in points(models=4)})
    assert run(["scaling", str(table), "--resamples", "20", "--smallest", str(sizes[1]), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {point["non_embedding"] for point in found["points"]} == set(sizes[1:])
    assert len(found["notes"]) == 1
    assert run(["scaling", str(table), "--resamples", "20", "--smallest", str(sizes[2])]) == 2  # too few are left
    assert "--smallest" in capsys.readouterr().err


@pytest.mark.parametrize(
    "args", [["--resamples", "3"], ["--by"], ["--smallest", "1000000000000"], ["--smallest", "-1"]]
)
def test_wrong_options_are_one_sentence(args: list[str], table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["scaling", str(table), *args]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


WRONG = ({}, {"tokens": 0}, {"tokens": 10**400}, {"bits": float("nan")}, {"bits": -1.0}, {"flops": float("inf")})


@pytest.mark.parametrize("change", WRONG)
def test_a_wrong_table_is_one_sentence(
    change: dict[str, float], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without rows, and with one wrong run, which is named."""
    table, given = tmp_path / "points.csv", points(models=4)
    write_csv([*given[:-1], dataclasses.replace(given[-1], name="wrong run", **change)] if change else [], table)
    assert run(["scaling", str(table), "--json"]) == 2
    shown = capsys.readouterr()
    assert not shown.out
    assert len(shown.err.splitlines()) == 1
    assert ("wrong run" in shown.err) == bool(change)


def test_a_table_with_a_byte_order_mark(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table.write_text("\ufeff" + table.read_text(), encoding="utf-8")
    assert run(["scaling", str(table), "--resamples", "20", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["points"]
