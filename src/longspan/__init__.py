"""Language models that remember beyond their window.

import longspan
model = longspan.load()  # the one in the box, or that of a folder: longspan.load(PATH)
model.score("some text")
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["__version__", "load"]

if TYPE_CHECKING:
    from longspan.text_model import load


def __getattr__(name: str) -> Any:
    # torch is imported when it is needed: `longspan --help` answers within a second.
    if name == "load":
        from longspan.text_model import load

        return load
    raise AttributeError(f"module 'longspan' has no attribute {name!r}")
