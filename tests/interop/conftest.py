"""Uses the `trials` fixture of tests/checkpoints."""

from tests.checkpoints.conftest import trials

__all__ = ["trials"]
