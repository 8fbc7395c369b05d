"""How every picture is drawn: PNG and SVG, axes and units named, told apart without colour."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longspan.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
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


# Signs for what cannot be seen; both are in matplotlib's own typeface.
_SIGNS = {"\n": "↵", "\t": "→"}
_LONGEST = 48  # letters of a name that is drawn
LEGEND_ROW = 0.19  # inches


def line(index: int) -> dict[str, Any]:
    """How the index-th line is drawn; after the last style another line goes with each marker."""
    style, other = LINES[index % len(LINES)], LINES[(index + index // len(LINES)) % len(LINES)]
    return style | {"linestyle": other["linestyle"]}


def readable(text: str) -> str:
    """One line that shows what is there: signs for line ends and tabs, a dot for what has no sign."""
    known = _glyphs()
    shown = (_SIGNS.get(letter, letter) for letter in text)
    return "".join(letter if letter == " " or ord(letter) in known else "·" for letter in shown)


def literal(text: str) -> str:
    """A dollar sign begins a formula in matplotlib; here it is a dollar sign."""
    return text.replace("$", r"\$")


def name_of(name: str) -> str:
    """A model's name as it stands in a legend, which leaves out what begins with _; a long one loses its middle."""
    short = name if len(name) <= _LONGEST else f"{name[: _LONGEST // 2]}…{name[1 - _LONGEST // 2 :]}"
    shown = literal(readable(short))
    return f" {shown}" if shown.startswith("_") else shown


def legend_columns(labels: Sequence[str], width: float) -> int:
    """How many labels stand side by side in so many inches."""
    return max(1, min(4, int(width / (0.6 + 0.08 * max(map(len, labels))))))


def legend_height(labels: Sequence[str], width: float) -> float:
    """The inches a legend of these labels takes above a picture."""
    return LEGEND_ROW * -(-len(labels) // legend_columns(labels, width))


def legend(figure: "Figure", axes: "Axes") -> None:
    """What is labelled on `axes`, above the picture, where it hides nothing."""
    handles, labels = axes.get_legend_handles_labels()
    columns = legend_columns(labels, figure.get_figwidth())
    figure.legend(handles, labels, loc="outside upper left", ncols=columns, fontsize=8)


def require_matplotlib() -> None:
    """Called before anything is measured: a plain `pip install` leaves matplotlib out."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f'figures are drawn with matplotlib, which cannot be imported ({error}); run pip install "longspan[plots]"'
        ) from None


def make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {folder} cannot be a folder: {error.strerror}; choose another name") from None


@contextmanager
def picture(folder: Path, name: str, width: float = 6.4, height: float = 4.0) -> Iterator["Figure"]:
    """A figure to draw on, `width` by `height` inches, saved as NAME.png and NAME.svg when the block ends."""
    require_matplotlib()
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(_SETTINGS):
        figure = Figure(figsize=(width, height))
        yield figure
        figure.savefig(folder / f"{name}.png")
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None})


@cache
def _glyphs() -> frozenset[int]:
    """The characters matplotlib's monospaced typeface has."""
    from matplotlib.font_manager import findfont, get_font

    return frozenset(get_font(findfont("DejaVu Sans Mono")).get_charmap())
