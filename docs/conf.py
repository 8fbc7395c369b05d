"""Sphinx: `make docs` builds the site in build/docs. Warnings are errors, so a broken internal link fails."""

from pathlib import Path
from typing import Any

import longspan

project = "longspan"
release = longspan.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 4
html_theme = "furo"
html_title = "longspan"
exclude_patterns = ["conf.py"]
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
ROOT = Path(__file__).parent.parent
# Pages outside of docs/ that pages here link to, and the page that includes each.
INCLUDED = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
INCLUDED["src/longspan/bundled/novels/README.md"] = "bundled_card.md"


def relink(text: str, folder: str) -> str:
    """Links between the repository's pages become links between the site's pages."""
    for path, page in INCLUDED.items():
        for link in {f"../{path}", f"{folder}{path}"}:
            text = text.replace(f"]({link})", f"]({page})").replace(f"]({link}#", f"]({page}#")
    return text.replace("](docs/", "](") if not folder else text


def setup(app: Any) -> None:
    def included(app: Any, path: Path, parent: str, content: list[str]) -> None:
        content[0] = relink(content[0], "")

    def source(app: Any, name: str, content: list[str]) -> None:
        content[0] = relink(content[0], "../")

    app.connect("include-read", included)
    app.connect("source-read", source)
