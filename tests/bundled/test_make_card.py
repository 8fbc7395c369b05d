"""benchmarks/make_card.py on runs of a few steps: every command of the card prints its result."""

import importlib
import json
import re
import shlex
from pathlib import Path

import pytest

from longspan.cli.main import run
from longspan.data import open_corpus

from .cards import ROOT, recipe_rows, value

SMALL = ["model.layers=1", "model.width=16", "training.segment=16", "training.batch=2", "training.steps=5"]
HEADS = ["model.heads=2", "model.inner=16"]
MEMORY = [*HEADS, "training.memory=16"]
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


def make_card(*options: str) -> str:
    importlib.import_module("make_card").main(["run", "--out", "cards/c.md", "--device", "cpu", *options])
    return Path("cards/c.md").read_text()


def check_commands(card: str, capsys: pytest.CaptureFixture[str], unit: str = "bits_per_byte") -> None:
    """Run every command of the card, and check that comparable and best results are in their own columns."""
    capsys.readouterr()
    rows = recipe_rows(card)
    comparable = {(row.text, row.context): row.score for row in rows if row.is_comparable}
    for row in rows:
        assert run(["eval", "run", *shlex.split(row.command), "--device", "cpu", "--json"]) == 0
        facts = json.loads(capsys.readouterr().out)
        assert facts[unit] == pytest.approx(row.score, abs=1e-4), row
        assert facts.get("discount", 0) == row.discount
        assert row.is_dynamic == bool(facts.get("dynamic"))
        assert row.is_comparable == (not facts.get("pointer") and facts["temperature"] == 1 and not row.is_dynamic)
        assert (row.best is None) == row.is_comparable
        assert row.comparable == comparable.get((row.text, row.context))
        if row.is_dynamic:
            assert f"dynamic {facts['dynamic_rate']:g} (static {facts[f'static_{unit}']:.4f})" in row.uses


def test_every_command_of_the_card_prints_its_result(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("other.txt").write_bytes(b"The moon did not.\n" * 20)
    Path("joined.txt").write_bytes(text.read_bytes().replace(b"\n", b""))
    train("tiny", text, *MEMORY, "evaluation.clamp=20")
    options = ["--memories", "8,64", "--dynamic", "1e-5,1e-3", "--also", "other.txt", "--temps", "1,0.5,1.5"]
    options += ["--flags", "--segment 16 --streams 2", "--shorter", "joined.txt", "--note", "A word more."]
    card = make_card("--commit", COMMIT, *options)
    rows = recipe_rows(card)
    # valid: memory 8, then 64 without a clamp, with that of training and of the recipe; two temperatures; two rates
    valid, others = rows[:8], rows[8:]
    assert {row.split for row in valid} == {"valid"}
    assert [(row.memory, row.clamp) for row in valid[:4]] == [(8, 0), (64, 0), (64, 31), (64, 20)]
    check_commands(card, capsys)
    # As rounded: several rows may share the lowest score.
    lowest = min(row.score for row in valid[:4])
    (chosen,) = {(row.memory, row.clamp) for row in rows[4:]}
    assert chosen in {(row.memory, row.clamp) for row in valid[:4] if row.score == lowest}
    by_temperature = {1.0: lowest} | {row.temperature: row.score for row in valid[4:6]}
    temperature = min(by_temperature, key=lambda value: by_temperature[value])
    # test and the other text: comparable where the temperature is not 1, then static and dynamic
    ways = [1.0, temperature, temperature] if temperature != 1 else [1.0, 1.0]
    assert [row.temperature for row in others] == 2 * ways
    assert {row.temperature for row in valid[6:]} == {temperature}
    (test,) = (row.score for row in others if row.split == "test" and row.is_comparable)
    total, kept = (len(open_corpus(path, "test").ids) for path in (str(text), "joined.txt"))
    (bound,) = re.findall(rf"{total} / {kept} x {test:.4f} = (\d+\.\d{{4}})", card)
    assert float(bound) == pytest.approx(test * total / kept, abs=2e-4)
    for words in (COMMIT, "listed: memory, clamp, temperature, rate. ", "\nA word more.\n", ", float32.\n"):
        assert words in card


@pytest.mark.parametrize(
    ("recipe", "keys", "unit"),
    [
        ("demo-vanilla", HEADS, "bits_per_byte"),
        ("demo-lstm", [], "bits_per_byte"),
        ("demo-compressive", [*MEMORY, "model.compressed=4", "model.rate=2"], "bits_per_byte"),
        ("tiny", [*MEMORY, "data.tokenizer=words"], "perplexity"),
        ("tiny", [*MEMORY, "data.tokenizer=characters"], "bits_per_character"),
    ],
)
def test_cards_of_other_families_and_units(
    recipe: str, keys: list[str], unit: str, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(recipe, text, *keys, "training.validate_every=2", "training.steps=5")
    options = ["--flags", "--segment 16", "--dynamic-flags", "--segment 16", "--dynamic", "1e-4"]
    card = make_card("--commit", COMMIT, *options)
    static, dynamic = (sum(row.is_dynamic == learns for row in recipe_rows(card)) for learns in (False, True))
    assert (static, dynamic) == (3 if "--clamp" in card else 2, 1)
    check_commands(card, capsys, unit)
    chosen = "clamp" if "--clamp" in card else "nothing"  # there is one memory and one rate
    assert f"listed: {chosen}. " in card
    notes = Path("run/best/README.md").read_text()  # the best weights, which may be older than the last
    assert value(card, r"\n[^\n]*, ([\d,]+) steps, ") == value(notes, r", seed \d+, ([\d,]+) steps,")


def test_a_row_with_pointer_and_temperature_has_the_comparable_result(
    text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = ["model.family=longspan-xl", "model.pointer_width=4", "training.pointer=20", "evaluation.pointer=40"]
    train("tiny", text, *MEMORY, *keys)
    options = ["--memories", "16", "--pointers", "5,40", "--temps", "1.5", "--dynamic", "1e-4"]
    card = make_card("--commit", COMMIT, "--flags", "--segment 16", "--dynamic-flags", "--segment 16", *options)
    check_commands(card, capsys)
    assert "listed: pointer, temperature. " in card
    # valid: the recipe's reach, another reach, another temperature, comparable; test: comparable, best, dynamic
    *valid, comparable, best, dynamic = recipe_rows(card)
    assert [row.flag("pointer") for row in valid[:2]] == ["40", "5"]
    assert [row.is_comparable for row in valid] == [False, False, False, True]
    lines = re.findall(r"^\| (without|with)([^|]*) \| ([^|]+) \| ([\d.]+) \|$", card, re.MULTILINE)
    assert [line[2:] for line in lines[:2]] == [
        (f"{valid[-1].score:.4f}", f"{comparable.score:.4f}"),
        (f"{min(row.score for row in valid[:-1]):.4f}", f"{best.score:.4f}"),
    ]
    assert lines[2][1:] == (
        f"{lines[1][1]} and dynamic evaluation at rate 0.0001",
        "not scored",
        f"{dynamic.score:.4f}",
    )
    assert [row.is_comparable for row in (comparable, best, dynamic)] == [True, False, False]
    assert comparable.flag("pointer") == "0"
    assert best.comparable == dynamic.comparable == comparable.score
    assert best.uses.startswith(f"pointer {best.flag('pointer')}")
    without = re.sub(r" --(pointer|temp) \S+", "", best.command)
    assert without == re.sub(r" --(pointer|temp) \S+", "", comparable.command)


def test_a_recipe_with_discount_and_temperature(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reading = ["memory=64", "clamp=31", "same_length=true", "discount=2.0", "temperature=1.5", "segment=64"]
    train("tiny", text, *MEMORY, *(f"evaluation.{key}" for key in reading))
    options = ["--dynamic", "1e-4", "--dynamic-memory", "48"]
    card = make_card("--commit", COMMIT, "--memories", "8,64,128", "--discounts", "0,2", "--temps", "1,1.5", *options)
    check_commands(card, capsys)
    rows = recipe_rows(card)
    tried = [row.context for row in rows[:5]]
    assert tried == [(8, 0, 0), (64, 31, 0), (64, 31, 2), (128, 31, 0), (128, 31, 2)]
    assert {row.temperature for row in rows[:5]} == {1.5}
    *rows, learning = rows
    assert (learning.context[:2], learning.flag("segment"), learning.is_dynamic) == ((48, 31), "16", True)
    assert {row.flag("segment") for row in rows} == {"64"}
    assert "listed: memory, clamp, discount, temperature. " in card
    tests = [row for row in rows if row.split == "test"]
    assert tests[0].is_comparable
    lowest = min(row.score for row in rows[:5])  # as rounded: several rows may share it
    (chosen,) = {row.context for row in tests}
    assert chosen in {row.context for row in rows[:5] if row.score == lowest}
    assert learning.context[2] == chosen[2]


def test_a_run_without_memory_is_read_without(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train("tiny", text, *HEADS, "training.memory=0", "evaluation.memory=0", "evaluation.same_length=false")
    card = make_card("--commit", COMMIT, "--dynamic", "1e-4")
    check_commands(card, capsys)
    assert [row.memory for row in recipe_rows(card)] == [0, 0, 0]
    assert "| bits per byte, no memory | valid | test |" in card


def test_a_second_call_scores_only_what_is_missing(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train("tiny", text, *MEMORY)
    module = importlib.import_module("cards")
    taken, commands = module.evaluate, []

    def count(command: str, *rest: object) -> object:
        commands.append(command)
        if len(commands) == 3:
            raise KeyboardInterrupt
        return taken(command, *rest)

    monkeypatch.setattr(module, "evaluate", count)
    options = ["--commit", COMMIT, "--memories", "8,16", "--temps", "1.5", "--flags", "--segment 16"]
    with pytest.raises(KeyboardInterrupt):
        make_card(*options)
    assert len(json.loads(Path("run/card.json").read_text())["scores"]) == 2
    card = make_card(*options)
    rows = recipe_rows(card)
    assert len(commands) == 1 + len(rows)  # the third was tried twice
    found = json.loads(Path("run/card.json").read_text())
    assert [row["command"].removeprefix("longspan eval MODEL ") for row in found["rows"]] == [r.command for r in rows]
    assert found["run"]["seed"] == 1111
    assert found["run"]["steps"] == 5
    assert all(facts["tokens_per_second"] > 0 for facts in found["scores"].values())
    # Other weights are scored again.
    Path("run/card.json").write_text(json.dumps(found | {"model": "another"}))
    make_card(*options)
    assert len(commands) == 1 + 2 * len(rows)


@pytest.mark.parametrize(
    ("options", "chosen"),
    [
        (["--memories", "8"], "nothing"),
        (["--memories", "8,16"], "memory"),
        (["--memories", "32", "--discounts", "0,2"], "nothing"),  # 32 keys are distances 0 to 31, those of training
        (["--memories", "64", "--temps", "1.5"], "clamp, temperature"),
        (["--memories", "8", "--temps", "1", "--dynamic", "1e-4"], "nothing"),
    ],
)
def test_only_settings_with_several_values_are_called_chosen(options: list[str], chosen: str, text: Path) -> None:
    train("tiny", text, *MEMORY)
    assert f"listed: {chosen}. " in make_card("--commit", COMMIT, "--flags", "--segment 16", *options)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--memories", "abc"], "abc"),
        (["--dynamic", "1e-4,abc"], "abc"),
        (["--dynamic", "5"], "5"),
        (["--temps", "1,0"], "temperature=0"),
        (["--pointers", "5"], "--pointers [5]"),
        (["--shorter", "no-such-corpus"], "no-such-corpus"),
        (["--shorter", "longer.txt"], "longer.txt"),
        (["--out", "a text.txt/c.md"], "a text.txt"),
    ],
)
def test_bad_options_are_refused_before_anything_is_scored(
    options: list[str], named: str, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("longer.txt").write_bytes(text.read_bytes() * 2)
    train("tiny", text, *MEMORY)
    with pytest.raises(SystemExit) as end:
        make_card("--commit", COMMIT, *options)
    assert end.value.code == 2
    printed = capsys.readouterr().err
    assert named in printed.splitlines()[-1]
    assert "longspan eval" not in printed
    assert not Path("cards/c.md").exists()


def test_a_folder_that_is_not_a_run_is_refused(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        importlib.import_module("make_card").main([str(text.parent), "--out", "c.md"])
    assert "run.json" in capsys.readouterr().err
