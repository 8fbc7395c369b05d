"""`longspan serve`: what is refused before a model is loaded."""

import socket
import sys
from pathlib import Path

import pytest

from .conftest import Cli


def test_without_the_extra(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "fastapi" or "longspan.serving" in name]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "fastapi", None)
    cli("serve").refused("fastapi", "longspan[serve]")


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("serve --host 0.0.0.0", ("0.0.0.0", "API key")),
        ("serve --port 70000", ("70000",)),
        ("serve --rows 0", ("rows=0",)),
        ("serve --api-key-file none.txt", ("none.txt",)),
        ("serve nowhere", ("nowhere",)),
    ],
)
def test_refused(cli: Cli, tmp_path: Path, line: str, named: tuple[str, ...]) -> None:
    pytest.importorskip("fastapi")
    cli(*line.split(), "--sessions", "s").refused(*named)


def test_a_port_in_use(cli: Cli) -> None:
    pytest.importorskip("fastapi")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        cli("serve", "--sessions", "s", "--port", port).refused(str(port))
