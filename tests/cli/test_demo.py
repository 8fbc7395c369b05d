"""`longspan demo`: what can be told without the minutes it takes."""

from .conftest import Cli


def test_a_report_that_cannot_be_written_is_told_at_once(cli: Cli) -> None:
    cli("demo", "--report", "nowhere/page.html").refused("there is no folder nowhere")
    cli("demo", "--report", ".").refused("--report .: it is a folder")
