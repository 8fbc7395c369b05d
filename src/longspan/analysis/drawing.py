"""How every picture is drawn: PNG and SVG, axes and units named, told apart without colour."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longspan.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Line and marker differ from one to the next, and the greys do too: a black and white print tells them apart.
LINES: tuple[dict[str, Any], ...] = (
    {"color": "#000000", "linestyle": "-", "marker": "o"},
    {"color": "#c2570c", "linestyle": "--", "marker": "s"},
    {"color": "#1f6fb2", "linestyle": "-.", "marker": "^"},
    {"color": "#6a3d9a", "linestyle": ":", "marker": "D"},
    {"color": "#4d7c0f", "linestyle": (0, (5, 1)), "marker": "v"},
    {"color": "#666666", "linestyle": (0, (1, 1)), "marker": "P"},
    {"color": "#9f1239", "linestyle": (0, (3, 1, 1, 1)), "marker": "X"},
)
_SETTINGS: Any = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "legend.frameon": False,
    "lines.linewidth": 1.4,
    "lines.markersize": 4.5,
    "savefig.dpi": 150,
    "text.hinting": "none",
    "figure.constrained_layout.use": True,
    # The same picture is the same file.
    "svg.hashsalt": "longspan",
}


def line(index: int) -> dict[str, Any]:
    return dict(LINES[index % len(LINES)])


def make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {folder} cannot be a folder: {error.strerror}; choose another name") from None


@contextmanager
def picture(folder: Path, name: str, width: float = 6.4, height: float = 4.0) -> Iterator["Figure"]:
    """A figure to draw on, `width` by `height` inches, saved as NAME.png and NAME.svg when the block ends."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("pictures are drawn with matplotlib, which is not installed; install longspan[plots]") from (
            None
        )
    with rc_context(_SETTINGS):
        figure = Figure(figsize=(width, height))
        yield figure
        figure.savefig(folder / f"{name}.png")
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
