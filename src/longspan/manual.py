"""The pages of the manual, in the installed package or in the source tree."""

import re
from pathlib import Path

from longspan.errors import UnknownNameError


def pages() -> dict[str, str]:
    """The text of every page by name, for example `training`."""
    package = Path(__file__).parent
    folder = next((f for f in (package / "docs", package.parents[1] / "docs") if f.is_dir()), None)
    return {} if folder is None else {path.stem: _text(path) for path in sorted(folder.glob("*.md"))}


def _text(path: Path) -> str:
    """The text of a page. In the source tree, a few pages only include another file."""
    text = path.read_text(encoding="utf-8")
    included = re.match(r"```{include} (\S+)", text)
    return (path.parent / included[1]).read_text(encoding="utf-8") if included else text


def title(text: str) -> str:
    """The first heading of a page."""
    heading = re.search(r"^# (.*)$", text, re.MULTILINE)
    return heading[1] if heading else ""


def page(name: str) -> str:
    """The text of a page by its name or by a link to it, such as `docs/data.md#splits`."""
    known, name = pages(), name.partition("#")[0].removeprefix("docs/").removesuffix(".md")
    if name.lower() not in {key.lower() for key in known}:
        raise UnknownNameError("page", name, known)
    return next(text for key, text in known.items() if key.lower() == name.lower())
