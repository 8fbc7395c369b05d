"""The bundled model, used where no model is named: a small one trained on English books. docs/bundled_model.md"""

from pathlib import Path

from longspan.errors import CheckpointError

FOLDER = Path(__file__).parent / "novels"
PAGE = FOLDER.parent / "page.txt"
"""A page of English prose that was written for longspan, so no model has seen it."""
ABOUT = "the bundled model, trained on English novels and other books"


def is_installed() -> bool:
    return (FOLDER / "manifest.json").is_file()


def model_path(path: str | Path | None = None) -> Path:
    """The given path, or that of the bundled model where none is given."""
    if path is not None:
        if not isinstance(path, str | Path):
            raise CheckpointError(f"a {type(path).__name__} is not a model; use the path of a model folder or a run")
        return Path(path)
    if not is_installed():
        raise CheckpointError(
            "no model was given, and this installation has no bundled model; use a model folder or a run"
        )
    return FOLDER
