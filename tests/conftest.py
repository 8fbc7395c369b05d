"""Shapes are checked in tests: every annotation `Float[Tensor, "B T D"]` of the package holds at run time."""

import os
import signal

import pytest
import torch
from hypothesis import settings

from tests import programs

# Tests run side by side, and the shapes are too small for threads to help, here and in the processes of tests.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)

# Commands that are started in the background ignore SIGINT, and so would the processes of tests.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

programs.start()  # before the checks are installed: commands run as they do for a user

try:
    from tests import type_checker
except ImportError:  # a machine that has a GPU may lack the checker; the tests themselves need neither
    type_checker = None  # type: ignore[assignment]
else:
    type_checker.install()

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# The suite tries a few cases of each property, `make torture` many.
TRIES = 50 if os.environ.get("LONGSPAN_TORTURE") else 4
settings.register_profile("longspan", deadline=None, max_examples=TRIES, derandomize=True)
settings.load_profile("longspan")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Files with slow tests first, so that none of them runs alone at the end.
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs CUDA"))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
    if type_checker is not None:
        type_checker.calls.clear()


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are made but not rendered, which takes most of their time. The files hold an empty picture."""
    figure = pytest.importorskip("matplotlib.figure")
    empty = '<svg width="72pt" height="72pt"></svg>'
    monkeypatch.setattr(figure.Figure, "savefig", lambda _, path, **__: path.write_text(empty))
