"""`longspan pictures`: every figure of a model, and what it refuses."""

from pathlib import Path

import pytest

from .conftest import Cli

RELATIVE = {"figure3", "figure4", "figure5", "figure6-1", "figure6-2", "figure6-3", "figure7", "spans"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "sets", "expected"),
    [
        ("transformer-xl", ["memory=40"], RELATIVE),
        ("transformer-xl", ["memory=40", "position=shaw"], RELATIVE - {"figure7"}),
        ("vanilla", [], RELATIVE - {"figure7"}),
    ],
)
def test_every_figure(cli: Cli, text: Path, family: str, sets: list[str], expected: set[str]) -> None:
    small = ["layers=2", "width=32", "heads=2", "segment=16", *sets]
    assert cli("init", "--family", family, *[x for s in small for x in ("--set", f"model.{s}")], "x").code == 0
    result = cli("pictures", "x", "--data", text, "--out", "p")
    assert (result.code, result.err) == (0, "")
    assert {path.name for path in Path("p").iterdir()} == {
        f"{name}.{kind}" for name in expected for kind in ("png", "svg")
    }
    assert result.out.splitlines() == [f"p/{name}.png" for name in sorted(expected)]


@pytest.mark.slow
def test_some_of_a_text_with_another_memory(cli: Cli, model: Path, text: Path) -> None:
    result = cli("pictures", model, "--data", text, "--split", "train", "--tokens", 100, "--memory", 8, "--out", "a/p")
    assert (result.code, result.err) == (0, "")


def test_wrong_use_is_one_sentence(cli: Cli, model: Path, text: Path) -> None:
    cli("pictures", model, "--data", text).refused("--out")
    cli("pictures", model, "--out", "p").refused("--data")
    cli("pictures", "nowhere", "--data", text, "--out", "p").refused("nowhere")
    cli("pictures", model, "--data", "nowhere.txt", "--out", "p").refused("nowhere.txt")
    cli("pictures", model, "--data", text, "--out", text).refused("text.txt")
    cli("pictures", model, "--data", text, "--out", "p", "--tokens", 0).refused("--tokens")
    Path("one.txt").write_bytes(b"a")
    cli("pictures", model, "--data", "one.txt", "--out", "p").refused("at least 2")
    Path("two.txt").write_bytes(b"ab")
    cli("pictures", model, "--data", "two.txt", "--out", "p").refused("at least 3")
