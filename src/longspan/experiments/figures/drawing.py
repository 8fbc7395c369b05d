"""How figures are drawn: PNG, SVG and PDF, axes with units, and lines that differ without colour."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longspan.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Line style, marker and grey level all differ, so the lines stay distinct in black and white.
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
    # Numbers as they are: an axis must not read `+2.39905e2` or `1e-5`.
    "axes.formatter.useoffset": False,
    "axes.formatter.limits": (-5, 7),
    # Text in a PDF stays text.
    "pdf.fonttype": 42,
    # The same figure gives the same file.
    "svg.hashsalt": "longspan",
}


# Signs for invisible characters; both are in matplotlib's own font.
_SIGNS = {"\n": "↵", "\t": "→"}
_LONGEST_NAME = 48  # characters of a name in a legend
LEGEND_ROW = 0.19  # inches


KINDS = ("png", "svg", "pdf")
_NO_DATE: dict[str, Any] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}  # the file stays the same


def keep_range(axes: "Axes", share: float = 0.02) -> None:
    """Let the y axis span at least this share of its values: otherwise it magnifies differences that mean nothing."""
    low, high = axes.get_ylim()
    middle, least = (low + high) / 2, share * abs(low + high) / 2
    if high - low < least:
        axes.set_ylim(middle - least / 2, middle + least / 2)


def line_style(index: int) -> dict[str, Any]:
    """The style of the index-th line. After the last style, markers are combined with other line styles."""
    style, other = LINES[index % len(LINES)], LINES[(index + index // len(LINES)) % len(LINES)]
    return style | {"linestyle": other["linestyle"]}


def printable(text: str) -> str:
    """Text on one line: signs for newlines and tabs, a dot for characters that the font does not have."""
    known = _glyphs()
    shown = (_SIGNS.get(character, character) for character in text)
    return "".join(character if character == " " or ord(character) in known else "·" for character in shown)


def literal(text: str) -> str:
    """Text with dollar signs escaped: matplotlib would start a formula there."""
    return text.replace("$", r"\$")


def legend_name(name: str) -> str:
    """A model's name for a legend. Long names are shortened; matplotlib hides names that start with _."""
    short = name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME // 2]}…{name[1 - _LONGEST_NAME // 2 :]}"
    shown = literal(printable(short))
    return f" {shown}" if shown.startswith("_") else shown


def legend_columns(labels: Sequence[str], width: float) -> int:
    """How many labels fit side by side in `width` inches."""
    return max(1, min(4, int(width / (0.6 + 0.08 * max(map(len, labels))))))


def legend_height(labels: Sequence[str], width: float) -> float:
    """The height in inches of a legend above a figure of `width` inches."""
    return LEGEND_ROW * -(-len(labels) // legend_columns(labels, width))


def legend(figure: "Figure", axes: "Axes") -> None:
    """The legend of `axes`, above the figure so that it covers nothing."""
    handles, labels = axes.get_legend_handles_labels()
    columns = legend_columns(labels, figure.get_figwidth())
    figure.legend(handles, labels, loc="outside upper left", ncols=columns, fontsize=8)


def require_matplotlib() -> None:
    """Called before anything is measured: a plain `pip install` does not include matplotlib."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"figures need matplotlib, which cannot be imported ({error}); install it with: pip install "
            "'longspan[plots]'"
        ) from None


def make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be created: {error.strerror}; choose another folder") from None


@contextmanager
def save_figure(
    folder: Path, name: str, width: float = 6.4, height: float = 4.0, kinds: Sequence[str] = KINDS
) -> Iterator["Figure"]:
    """A figure of `width` by `height` inches, saved as NAME.png, NAME.svg and NAME.pdf at the end of the block."""
    require_matplotlib()
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(_SETTINGS):
        figure = Figure(figsize=(width, height))
        yield figure
        for kind in kinds:
            figure.savefig(folder / f"{name}.{kind}", metadata=_NO_DATE.get(kind))


@cache
def _glyphs() -> frozenset[int]:
    """The characters of matplotlib's monospaced font."""
    from matplotlib.font_manager import findfont, get_font

    return frozenset(get_font(findfont("DejaVu Sans Mono")).get_charmap())
