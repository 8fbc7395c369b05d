"""The maker of cards on runs of a few steps: every command of the card prints its figure."""

import importlib
import json
import re
import shlex
from pathlib import Path

import pytest

from longspan.cli.main import run
from longspan.data import open_corpus

from .card import FIGURE, value

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["model.layers=1", "model.width=16", "model.segment=16", "training.batch=2", "training.steps=5"]
MEMORY = ["model.heads=2", "model.inner=16", "model.memory=16"]
COMMIT = "c" * 40


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "a text.txt"
    file.write_bytes(b"It was the year one, and the sun rose.\n" * 60)
    return file


def train(recipe: str, text: Path, *keys: str) -> None:
    sets = [part for key in (*SMALL, *keys) for part in ("--set", key)]
    words = ["train", "--recipe", recipe, "--data", str(text), "--out", "run", "--device", "cpu"]
    assert run([*words, *sets]) == 0


def make_card(*asked: str) -> str:
    importlib.import_module("make_card").main(["run", "--out", "cards/c.md", "--device", "cpu", *asked])
    return Path("cards/c.md").read_text()


def check_commands(card: str, capsys: pytest.CaptureFixture[str], unit: str = "bits_per_byte") -> None:
    """Every one of its commands typed in."""
    capsys.readouterr()
    for name, _, _, score, words in FIGURE.findall(card):
        assert run(["eval", "run", *shlex.split(words), "--device", "cpu", "--json"]) == 0
        facts = json.loads(capsys.readouterr().out)
        assert facts[unit] == pytest.approx(float(score), abs=1e-4), name
        assert ("dynamic" in name) == bool(facts.get("dynamic"))
        if facts.get("dynamic"):
            assert f"{float(score):.4f} (static {facts[f'static_{unit}']:.4f})" in card


def test_every_command_of_the_card_prints_its_figure(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("other.txt").write_bytes(b"The moon did not.\n" * 20)
    Path("joined.txt").write_bytes(text.read_bytes().replace(b"\n", b""))
    train("tiny", text, *MEMORY)
    asked = ["--memories", "8,64", "--dynamic", "1e-5,1e-3", "--also", "other.txt", "--flags", "--segment 16 --lanes 2"]
    asked += ["--temps", "1,0.5,1.5"]
    card = make_card("--commit", COMMIT, *asked, "--shorter", "joined.txt", "--note", "A word more.")
    found = FIGURE.findall(card)
    # valid with 8, with 64 free and clamped, at two temperatures and two rates; test and the other text, both ways
    assert len(found) == 3 + 2 + 2 + 2 * 2
    assert [(int(memory), int(clamp)) for _, memory, clamp, *_ in found[:3]] == [(8, 0), (64, 0), (64, 31)]
    check_commands(card, capsys)
    best = min(found[:3], key=lambda row: float(row[3]))
    # As rounded: several may share the lowest.
    (chosen,) = {row[1:3] for row in found[3:]}
    assert chosen in {row[1:3] for row in found[:3] if row[3] == best[3]}
    temps = {re.search(r"--temp (\S+)", row[4]).group(1): float(row[3]) for row in found[3:5]}  # type: ignore[union-attr]
    cooler = min({**temps, "1": float(best[3])}.items(), key=lambda pair: pair[1])[0]
    assert all((f" --temp {cooler}" in row[4]) or ("--temp" not in row[4] and cooler == "1") for row in found[5:])
    (test,) = (float(row[3]) for row in found if row[0].endswith("--split test"))
    whole, kept = (len(open_corpus(path, "test").ids) for path in (str(text), "joined.txt"))
    (bound,) = re.findall(rf"{whole} / {kept} x {test:.4f} = (\d+\.\d{{4}}) on it", card)
    assert float(bound) == pytest.approx(test * whole / kept, abs=2e-4)
    for sentence in (COMMIT, "listed: memory, clamp, temperature, rate. The", "\nA word more.\n", ", float32.\n"):
        assert sentence in card


@pytest.mark.parametrize(
    ("recipe", "keys", "unit"),
    [
        ("demo-vanilla", ["model.heads=2", "model.inner=16"], "bits_per_byte"),
        ("demo-lstm", [], "bits_per_byte"),
        ("demo-compressive", [*MEMORY, "model.compressed=4", "model.rate=2"], "bits_per_byte"),
        ("tiny", [*MEMORY, "data.tokens=words"], "perplexity"),
        ("tiny", [*MEMORY, "data.tokens=characters"], "bits_per_character"),
    ],
)
def test_a_card_of_any_family_and_unit(
    recipe: str, keys: list[str], unit: str, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(recipe, text, *keys, "training.validate_every=2", "training.steps=5")
    card = make_card(
        "--commit", COMMIT, "--flags", "--segment 16", "--dynamic-flags", "--segment 16", "--dynamic", "1e-4"
    )
    static, dynamic = (sum(("dynamic" in row[0]) == learns for row in FIGURE.findall(card)) for learns in (False, True))
    assert (static, dynamic) == (3 if "--clamp" in card else 2, 1)
    check_commands(card, capsys, unit)
    chosen = "clamp" if "--clamp" in card else "nothing"  # there was but one memory and one rate
    assert f"listed: {chosen}. The" in card
    notes = Path("run/best/README.md").read_text()  # best, which need not be the last
    assert value(card, r"\n[^\n]*, ([\d,]+) steps, ") == value(notes, r", seed \d+, ([\d,]+) steps,")


def test_a_card_of_a_model_that_copies_says_what_it_comes_to_without(
    text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train("tiny", text, *MEMORY, "model.copy=20", "model.copy_width=4", "evaluation.copy=40")
    asked = ["--memories", "16", "--copies", "5,40", "--temps", "1.5", "--dynamic", "1e-4"]
    card = make_card("--commit", COMMIT, "--flags", "--segment 16", "--dynamic-flags", "--segment 16", *asked)
    check_commands(card, capsys)
    assert "listed: reach of copying, temperature. The test" in card
    # valid as the recipe has it, copying from another place, tempered; test, learning, and without copying
    *valid, test, learning, without = FIGURE.findall(card)
    assert ["--copy 40" in row[4] for row in valid[:2]] == [True, False]
    assert len(valid) == 3
    assert "dynamic" in learning[0]
    assert without[0].endswith("--split test, without copying")
    assert re.sub(r" --copy \d+", "", test[4]) == without[4].replace(" --copy 0", "")


@pytest.mark.parametrize(
    ("asked", "chosen"),
    [
        (["--memories", "8"], "nothing"),
        (["--memories", "8,16"], "memory"),
        (["--memories", "64", "--temps", "1.5"], "clamp, temperature"),
        (["--memories", "8", "--temps", "1", "--dynamic", "1e-4"], "nothing"),
    ],
)
def test_only_what_was_tried_in_several_ways_is_called_chosen(asked: list[str], chosen: str, text: Path) -> None:
    train("tiny", text, *MEMORY)
    assert f"listed: {chosen}. The test" in make_card("--commit", COMMIT, "--flags", "--segment 16", *asked)


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (["--memories", "abc"], "abc"),
        (["--dynamic", "1e-4,abc"], "abc"),
        (["--dynamic", "5"], "5"),
        (["--temps", "1,0"], "--temp 0"),
        (["--shorter", "no-such-corpus"], "no-such-corpus"),
        (["--shorter", "longer.txt"], "longer.txt"),
        (["--out", "a text.txt/c.md"], "a text.txt"),
    ],
)
def test_what_cannot_be_is_told_before_anything_is_scored(
    asked: list[str], told: str, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("longer.txt").write_bytes(text.read_bytes() * 2)
    train("tiny", text, *MEMORY)
    with pytest.raises(SystemExit) as end:
        make_card("--commit", COMMIT, *asked)
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert told in said.splitlines()[-1]
    assert "longspan eval" not in said
    assert not Path("cards/c.md").exists()


def test_a_folder_that_is_no_run_is_told(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        importlib.import_module("make_card").main([str(text.parent), "--out", "c.md"])
    assert "is not the folder of a run" in capsys.readouterr().err
