"""The model that comes with longspan, used where none is named: a small one of English novels. docs/box.md"""

from pathlib import Path

from longspan.errors import CheckpointError

FOLDER = Path(__file__).parent / "novels"
ABOUT = "the one in the box, trained on English novels"


def is_filled() -> bool:
    return (FOLDER / "manifest.json").is_file()


def box(named: str | Path | None = None) -> Path:
    """The folder that was named or, where none was, that of the model in the box."""
    if named is not None:
        return Path(named)
    if not is_filled():
        raise CheckpointError("no model was named and this longspan came without one; name a model folder or a run")
    return FOLDER
