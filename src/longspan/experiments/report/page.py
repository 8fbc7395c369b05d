"""A self-contained HTML page: style and figures are inline, nothing is fetched, and there are no scripts."""

import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

_LEAST_SCALE = 1.18  # pixels per point: the smallest text, 8 points, is then over 9 pixels high
_STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 78rem; padding: 1rem; background: #fff; color: #1a1a1a;
       font: 1rem/1.55 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 1rem 0 0.25rem; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 0.5rem; border-top: 1px solid #bbb; padding-top: 1rem; }
nav ul { display: flex; flex-wrap: wrap; gap: 0.25rem 1rem; list-style: none; margin: 1rem 0 0; padding: 0; }
nav a { display: inline-block; padding: 0.35rem 0; color: #0b4f8a; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; min-width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 0.35rem 0.6rem; border-bottom: 1px solid #ddd; overflow-wrap: normal; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
thead th { border-bottom: 2px solid #1a1a1a; vertical-align: bottom; }
p, figure, pre { max-width: 62rem; }
th:first-child, td:first-child { position: sticky; left: 0; background: #fff; }
tr.ours td { font-weight: 600; }
figure { margin: 1.5rem 0; }
figure img { display: block; width: 100%; height: auto; }
figcaption, .note { color: #444; font-size: 0.9rem; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: #f4f4f2; padding: 0.9rem; border-radius: 4px;
      font-size: 0.85rem; line-height: 1.45; }
@media (max-width: 36rem) {
  th, td { padding: 0.35rem 0.5rem; font-size: 0.85rem; }
  td { white-space: nowrap; }
  td:first-child { white-space: normal; min-width: 4rem; max-width: 8rem; overflow-wrap: anywhere; }
  .wide:has(table) { background: linear-gradient(to left, #fff 1rem, transparent 3rem) local,
                                 linear-gradient(to left, #bbb, transparent 1rem); }
  figcaption::after { content: " Scroll sideways to see all of the figure."; }
}
"""


@dataclass(frozen=True)
class Section:
    """A heading and the HTML below it."""

    title: str
    body: str


def page(title: str, lead: str, sections: Sequence[Section]) -> str:
    """The complete file."""
    links = "".join(f'<li><a href="#part-{n}">{escape(part.title)}</a></li>' for n, part in enumerate(sections))
    parts = "".join(
        f'<section id="part-{n}"><h2>{escape(part.title)}</h2>{part.body}</section>\n'
        for n, part in enumerate(sections)
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<link rel="icon" href="data:,">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"<header><h1>{escape(title)}</h1><p>{escape(lead)}</p></header>\n"
        f'<nav aria-label="Contents"><ul>{links}</ul></nav>\n<main>\n{parts}</main>\n</body>\n</html>\n'
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]], ours: Sequence[int] = ()) -> str:
    """A table of text. Rows in `ours` are bold. It scrolls on its own on a narrow screen."""
    top = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    body = "".join(
        f"<tr{' class=ours' if n in ours else ''}>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>"
        for n, row in enumerate(rows)
    )
    return f'<div class="wide" tabindex="0"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def figure(svg: Path, caption: str) -> str:
    """A figure inside the page. As a separate image, its ids cannot clash with those of other figures.

    On a narrow screen it scrolls instead of shrinking, so that its text stays readable.
    """
    content = svg.read_bytes()
    data = base64.b64encode(content).decode("ascii")
    points = float(re.findall(rb'<svg[^>]* width="([\d.]+)pt"', content)[0])
    least = f"min-width: {points * _LEAST_SCALE / 16:.1f}rem"
    image = f'<img alt="{escape(caption)}" style="{least}" src="data:image/svg+xml;base64,{data}">'
    return f'<figure><div class="wide" tabindex="0">{image}</div><figcaption>{escape(caption)}</figcaption></figure>'


def note(sentence: str) -> str:
    return f'<p class="note">{escape(sentence)}</p>'


def text(content: str) -> str:
    return f"<pre>{escape(content)}</pre>"
