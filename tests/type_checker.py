"""How annotations are checked in tests: as mypy reads them, an int is welcome where a float is asked for.

A check costs more than most functions, so each test checks only the first calls of every function. `make torture`
checks all.
"""

import contextlib
import functools
import inspect
import os
import sys
from collections import Counter
from collections.abc import Iterator
from types import CodeType
from typing import Any

import jaxtyping
import torch
from beartype import BeartypeConf, beartype

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))

CALLS = sys.maxsize if os.environ.get("LONGSPAN_TORTURE") else 3
"""The calls of one function that a test checks."""
calls: Counter[CodeType] = Counter()
"""The checked calls in this test."""
active = True
_jaxtyped = jaxtyping.jaxtyped


def first_calls(function: Any = None, *, typechecker: Any) -> Any:
    """`jaxtyping.jaxtyped` for the first calls of a function."""
    if function is None:
        return functools.partial(first_calls, typechecker=typechecker)
    if inspect.isclass(function):
        return _jaxtyped(function, typechecker=typechecker)
    code, with_checks = function.__code__, None

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal with_checks
        if torch.compiler.is_compiling() or not active or calls[code] >= CALLS:
            return function(*args, **kwargs)
        calls[code] += 1
        if with_checks is None:
            with_checks = _jaxtyped(function, typechecker=typechecker)
        return with_checks(*args, **kwargs)

    return call


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """No checks: the first one of a function compiles code."""
    global active
    active = False
    try:
        yield
    finally:
        active = True


def install() -> None:
    """Check longspan from now on. It must not be imported yet."""
    jaxtyping.jaxtyped = first_calls
    jaxtyping.install_import_hook("longspan", "tests.type_checker.checked")
