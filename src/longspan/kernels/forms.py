"""The implementation of a function that is used in a block of code instead of the fastest one."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from longspan.errors import UnknownNameError


class ForcedForm:
    def __init__(self, what: str, forms: Collection[str]) -> None:
        self.what, self.forms = what, forms
        self._stack: list[str] = []

    @contextmanager
    def forced(self, form: str) -> Iterator[None]:
        """Use one implementation for every call in this block: for tests, benchmarks and debugging."""
        if form not in self.forms:
            raise UnknownNameError(f"implementation of {self.what}", form, self.forms)
        self._stack.append(form)
        try:
            yield
        finally:
            self._stack.pop()

    @property
    def name(self) -> str | None:
        """The implementation of the innermost block; None outside."""
        return self._stack[-1] if self._stack else None
