"""What a compiler must call as it is."""

from collections.abc import Callable
from typing import TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., object])


def untraced(function: Function) -> Function:
    """The function, hidden from a compiler that traces the caller.

    Asked for at the call: `torch.compiler.disable` as a decorator would load the compiler with the module, and that
    takes as long as torch itself, for every command.
    """
    return torch.compiler.disable(function) if torch.compiler.is_compiling() else function
