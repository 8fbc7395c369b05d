"""What a compiler, CUDA graphs and sharding need to know about a model family."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Hints:
    compile: bool = True
    """torch.compile makes training faster. False where most of the work is an opaque kernel (cuDNN's LSTM)."""
    compile_layers: bool = False
    """Segments have many lengths, and compiling a step for each would take too long. Instead, layers are compiled one
    by one, for any length."""
    shard_layers: bool = True
    """Only `layer.forward` uses the weights of a layer, except those of its position keys, so layers can be sharded one
    by one. False: all weights are gathered for a step."""
    graph_safe: bool = False
    """A training step has static shapes and no host sync, so that a CUDA graph can capture it."""
