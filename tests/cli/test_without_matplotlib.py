"""`pip install .` does not include matplotlib: commands that draw are refused in one sentence, before any work."""

import sys
from pathlib import Path

import numpy as np
import pytest

from .conftest import Cli


@pytest.fixture
def _no_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in {"matplotlib", *(name for name in sys.modules if name.startswith("matplotlib."))}:
        monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.usefixtures("_no_matplotlib")
@pytest.mark.parametrize(
    "line",
    [
        "report run --out r.html",
        "recl model --data text.txt --out figures",
        "recl --losses t.npz --out figures",
        "compare tiny --data text.txt --out group",
        "figures model --data text.txt --out figures",
        "demo --out runs --report r.html",
        "scaling runs --out figures",
    ],
)
def test_commands_that_draw_are_refused_at_once(cli: Cli, tmp_path: Path, line: str) -> None:
    """None of these runs, models and texts exist, so nothing was opened before."""
    cli(*line.split()).refused("matplotlib", "'longspan[plots]'")
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("_no_matplotlib")
def test_recl_without_figures_works(cli: Cli) -> None:
    np.savez("t.npz", names=np.array(["m"]), contexts=np.array([1, 2]), losses=np.ones((1, 2, 9)))
    assert cli("recl", "--losses", "t.npz").code == 0
