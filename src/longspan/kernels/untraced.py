"""Functions that torch.compile must not trace."""

from collections.abc import Callable
from typing import TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., object])


def untraced(function: Function) -> Function:
    """The function, hidden from torch.compile when it traces the caller.

    Applied at the call, because `torch.compiler.disable` as a decorator would import the compiler with the module. That
    takes as long as importing torch, in every command.
    """
    return torch.compiler.disable(function) if torch.compiler.is_compiling() else function
