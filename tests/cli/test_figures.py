"""`longspan figures`: every figure of a model, and wrong use."""

from pathlib import Path

import pytest

from .conftest import Cli

RELATIVE = {"figure3", "figure4", "figure5", "figure6-1", "figure6-2", "figure6-3", "figure7", "spans"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "sets", "expected"),
    [
        ("transformer-xl", ["reading.memory=40"], RELATIVE),
        ("longspan-xl", ["reading.memory=40", "model.position=shaw"], RELATIVE - {"figure7"}),
        ("vanilla", [], RELATIVE - {"figure7"}),
    ],
)
@pytest.mark.usefixtures("undrawn")
def test_figures_of_a_family(cli: Cli, text: Path, family: str, sets: list[str], expected: set[str]) -> None:
    small = ["model.layers=2", "model.width=32", "model.heads=2", "reading.segment=16", *sets]
    assert cli("init", "--family", family, *[part for value in small for part in ("--set", value)], "x").code == 0
    result = cli("figures", "x", "--data", text, "--out", "p")
    assert (result.code, result.err) == (0, "")
    assert {path.name for path in Path("p").iterdir()} == {
        f"{name}.{kind}" for name in expected for kind in ("png", "svg", "pdf")
    }
    assert result.out.splitlines() == [f"p/{name}.png" for name in sorted(expected)]


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_part_of_a_text_with_another_memory(cli: Cli, model: Path, text: Path) -> None:
    result = cli("figures", model, "--data", text, "--split", "train", "--tokens", 100, "--memory", 8, "--out", "a/p")
    assert (result.code, result.err) == (0, "")


@pytest.mark.slow
def test_loss_against_memory(cli: Cli, model: Path, text: Path) -> None:
    """Every point is the score of `longspan eval` with that memory."""
    reading = ["--clamp", 12, "--discount", 2]
    result = cli("figures", model, "--data", text, "--memories", "40,8,0", "--tokens", 200, "--out", "p", *reading)
    assert (result.code, result.err, result.out) == (0, "", "p/memory.svg\n")
    Path("part.txt").write_bytes(text.read_bytes()[:200])
    shown = Path("p/memory.svg").read_text()
    for memory in (8, 40):
        bits = cli("eval", model, "--data", "part.txt", "--memory", memory, *reading, "--json").json["bits_per_byte"]
        assert f"<!-- {bits:.3f} -->" in shown


def test_wrong_use_is_one_sentence(cli: Cli, model: Path, text: Path) -> None:
    cli("figures", model, "--data", text).refused("--out")
    cli("figures", model, "--out", "p").refused("--data")
    cli("figures", "nowhere", "--data", text, "--out", "p").refused("nowhere")
    cli("figures", model, "--data", "nowhere.txt", "--out", "p").refused("nowhere.txt")
    cli("figures", model, "--data", text, "--out", text).refused("text.txt")
    cli("figures", model, "--data", text, "--out", "p", "--tokens", 0).refused("--tokens 0")
    cli("figures", model, "--data", text, "--out", "p", "--memories", "8,-1").refused("--memories 8,-1")
    Path("one.txt").write_bytes(b"a")
    cli("figures", model, "--data", "one.txt", "--out", "p").refused("at least 2")
    Path("two.txt").write_bytes(b"ab")
    cli("figures", model, "--data", "two.txt", "--out", "p").refused("at least 3")
