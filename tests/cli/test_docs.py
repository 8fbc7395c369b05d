"""`longspan docs`: the manual in the terminal."""

import re
from pathlib import Path

from .conftest import Cli

ROOT = Path(__file__).parents[2]


def test_every_page_is_listed_and_printed(cli: Cli) -> None:
    listed = [line.split()[0] for line in cli("docs").out.splitlines()]
    assert listed == sorted(path.stem for path in (ROOT / "docs").glob("*.md"))
    assert cli("docs", "training").out == (ROOT / "docs/training.md").read_text()
    assert cli("docs", "docs/training.md").out == cli("docs", "training").out
    assert cli("docs", "docs/training.md#resume").out == cli("docs", "training").out  # as a link names it
    assert cli("docs", "contributing").out == (ROOT / "CONTRIBUTING.md").read_text()
    cli("docs", "trainin").refused("trainin", "training")


def test_messages_name_pages_that_exist() -> None:
    named = {
        name
        for path in (ROOT / "src").rglob("*.py")
        for name in re.findall(r"`longspan docs (\w+)`|docs/(\w+)\.md", path.read_text())
    }
    assert len(named) > 5
    missing = {first or second for first, second in named} - {path.stem for path in (ROOT / "docs").glob("*.md")}
    assert not missing
