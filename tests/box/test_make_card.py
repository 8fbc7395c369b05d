"""The maker of cards on a run of a few steps: every command of the card prints its figure."""

import importlib
import json
import re
from pathlib import Path

import pytest

from longspan.cli.main import run
from longspan.data import open_corpus

ROOT = Path(__file__).resolve().parents[2]
ROW = re.compile(r"^\| ([^|]+) \| (\d+) \| (\d+) \| (\d+\.\d{4}) \| `longspan eval MODEL ([^`]+)` \|$", re.MULTILINE)


def test_every_command_of_the_card_prints_its_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.chdir(tmp_path)
    text, other = tmp_path / "text.txt", tmp_path / "other.txt"
    text.write_bytes(b"It was the year one, and the sun rose.\n" * 60)
    other.write_bytes(b"The moon did not.\n" * 20)
    joined = tmp_path / "joined.txt"
    joined.write_bytes(text.read_bytes().replace(b"\n", b""))
    small = ["layers=1", "width=16", "heads=2", "inner=16", "segment=16", "memory=16"]
    keys = [f"model.{key}" for key in small] + ["training.batch=2", "training.steps=5"]
    sets = [part for key in keys for part in ("--set", key)]
    flags = ["--data", str(text), "--out", str(tmp_path / "run"), "--device", "cpu"]
    assert run(["train", "--recipe", "tiny", *flags, *sets]) == 0
    card, commit = tmp_path / "cards" / "tiny.md", "c" * 40
    asked = ["--memories", "8,64", "--dynamic", "1e-5,1e-3", "--also", str(other), "--flags", "--segment 16 --lanes 2"]
    asked += ["--shorter", str(joined)]
    maker = importlib.import_module("make_card")
    maker.main([str(tmp_path / "run"), "--out", str(card), "--commit", commit, "--device", "cpu", *asked])
    found = ROW.findall(card.read_text())
    # valid with 8, with 64 free and clamped, at two rates; test and the other text, static and dynamic
    assert len(found) == 3 + 2 + 2 * 2
    assert [(int(memory), int(clamp)) for _, memory, clamp, *_ in found[:3]] == [(8, 0), (64, 0), (64, 31)]
    assert commit in card.read_text()
    capsys.readouterr()
    for name, _, _, score, words in found:
        assert run(["eval", str(tmp_path / "run"), *words.split(), "--device", "cpu", "--json"]) == 0
        facts = json.loads(capsys.readouterr().out)
        assert facts["bits_per_byte"] == pytest.approx(float(score), abs=1e-4), name
        assert ("dynamic" in name) == bool(facts.get("dynamic"))
    best = min(found[:3], key=lambda row: float(row[3]))
    assert all(row[1:3] == best[1:3] for row in found[3:])
    (test,) = (float(row[3]) for row in found if row[0].endswith("--split test"))
    whole, kept = (len(open_corpus(str(path), "test").ids) for path in (text, joined))
    (bound,) = re.findall(rf"{whole} / {kept} x {test:.4f} = (\d+\.\d{{4}}) on it", card.read_text())
    assert float(bound) == pytest.approx(test * whole / kept, abs=2e-4)
