"""benchmarks/compare_at_41m.py: its commands, its tiny recipes and its table."""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from longspan.models.families import outline
from longspan.training.recipe import load_recipe

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.chdir(tmp_path)
    return importlib.import_module("compare_at_41m")


def command(program: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: Any, *words: str) -> list[str]:
    monkeypatch.setattr(sys, "argv", ["compare_at_41m.py", *words, "--out", "out", "--print"])
    assert program.main() == 0
    return str(capsys.readouterr().out).split()


def test_tiny_recipes_have_all_parts_and_few_parameters(program: ModuleType, tmp_path: Path) -> None:
    for name in {*program.FAMILIES, *program.ORDER}:
        big, tiny = load_recipe(name), load_recipe(program.tiny_recipe(name, tmp_path))
        assert tiny.family == big.family
        assert outline(tiny.family, tiny.with_vocabulary(256).model).parameter_count < 100_000
        for key in ("norm", "qk_norm", "activation", "convolution", "position", "compression"):
            assert getattr(tiny.model, key, None) == getattr(big.model, key, None)
        tiny.evaluation_reading()


def test_parts_share_a_folder_and_can_be_split(program: ModuleType, monkeypatch: Any, capsys: Any) -> None:
    whole = command(program, monkeypatch, capsys, "families")
    assert whole[4:12] == program.FAMILIES
    assert whole[whole.index("--budget") + 1] == "params=41M,seconds=240"
    assert whole[whole.index("--targets") + 1] == "10000"
    some = command(program, monkeypatch, capsys, "families", "--some", "3:4", "--set", "training.seed=5")
    assert some[4:6] == program.FAMILIES[2:4]
    assert some[6] == "--data"
    assert some[some.index("--targets") + 1] == "0"  # RECL needs all of them
    assert some[-2:] == ["--set", "training.seed=5"]
    half = command(program, monkeypatch, capsys, "families", "--some", "1:4", "--recl")
    assert half[half.index("--contexts") + 1] == whole[whole.index("--contexts") + 1]
    assert half[half.index("--targets") + 1] == whole[whole.index("--targets") + 1]  # so that tables can be joined
    parts = command(program, monkeypatch, capsys, "ablations", "--some", ":2")
    assert [parts[k + 1] for k, word in enumerate(parts) if word == "--each"] == program.CHANGES[:2]
    seeds = command(program, monkeypatch, capsys, "seeds", "--best", "enwik8-12l-sprint,enwik8-sprint-lstm")
    assert seeds[4:6] == ["enwik8-12l-sprint", "enwik8-sprint-lstm"]
    assert {line[line.index("--out") + 1] for line in (whole, some, parts, seeds)} == {"out/runs"}


def test_the_table_is_written_also_after_an_interrupt(
    program: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def entry(bits: float, seed: int) -> dict[str, Any]:
        return {"score": {"bits": bits, "memory": 2048}, "peak_memory": 7, "run": {"seed": seed, "steps": 10}}

    members = {"a": entry(1.5, 1111), "b": entry(2.0, 1111), "a--seed-2": entry(1.7, 2)}
    members |= {"c": {"failed": "out of memory"}, "d": {"run": None}}
    contexts = {"x": {"members": ["a", "b"], "differences": {"0.1": []}}}

    def stopped(*_: Any, **__: Any) -> int:
        Path("out/runs").mkdir()
        Path("out/runs/compare.json").write_text(json.dumps({"members": members, "contexts": contexts}))
        raise KeyboardInterrupt

    monkeypatch.setattr(program, "run_command", stopped)
    monkeypatch.setattr(sys, "argv", ["compare_at_41m.py", "families", "--out", "out"])
    assert program.main() == 130
    table = json.loads(Path("out/table.json").read_text())
    assert [(row["name"], row["bits"], row["failed"]) for row in table["rows"]] == [
        ("a", 1.5, None),
        ("b", 2.0, None),
        ("a--seed-2", 1.7, None),
        ("c", None, "out of memory"),
        ("d", None, None),
    ]
    (seeds,) = table["seeds"]
    assert (seeds["name"], seeds["seeds"], seeds["bits"]) == ("a", [1111, 2], pytest.approx(1.6))
    assert table["contexts"] == [contexts["x"]]
    assert "c, out of memory" in capsys.readouterr().out
