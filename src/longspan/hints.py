"""Compiler hints of a model family. Ignoring a hint costs speed, never correctness."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Hints:
    compile: bool = True
    """torch.compile makes training faster. False where most of the work is an opaque kernel (cuDNN's LSTM)."""
    graph_safe: bool = False
    """A training step has static shapes and no host sync, so that a CUDA graph can capture it."""
