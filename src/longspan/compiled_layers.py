"""Layers that are compiled one by one, where compiling a whole step would take too long or depend on its length."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from longspan.contract import LanguageModel


class CompiledLayers:
    """The layers of a model with compiled forms of their `forward`.

    Layers have the same code, so one compilation serves all of them. With `any_length` it also serves segments of any
    length; else every shape is compiled.
    """

    def __init__(self, model: LanguageModel, *, any_length: bool) -> None:
        # A layer with a `forward` of its own already is a wrapped one, for example with activation checkpointing.
        layers: list[Any] = [layer for layer in getattr(model, "layers", ()) if "forward" not in vars(layer)]
        self.forms = [(layer, torch.compile(layer.forward, dynamic=any_length)) for layer in layers]

    def around(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """The same work with the compiled forms."""

        def compiled(*inputs: Any) -> Any:
            with self.in_place():
                return work(*inputs)

        return compiled

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Uses the compiled forms in this block."""
        with contextlib.ExitStack() as stack:
            for layer, forward in self.forms:
                layer.forward = forward
                stack.callback(delattr, layer, "forward")
            yield
