"""Work of a GPU recorded once and replayed (CUDA graphs): one launch where there were hundreds.

A small model's step is short for the device and long for the processor that tells it what to do. Recorded, the
processor says one thing a step.
"""

from collections.abc import Callable
from typing import Any

import torch

from longspan.contract import State
from longspan.shapes import Tensor

Work = Callable[..., tuple[Tensor, list[State]]]
"""From states, and tensors or None, to some figures and the states after it."""


def run_aside(work: Callable[[], Any]) -> None:
    """Do the work on a stream of its own, as it would be recorded: what it has to compile or to choose first must not
    happen in a recording."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        work()
    torch.cuda.current_stream().wait_stream(aside)


def record(work: Callable[[], Any], generator: torch.Generator | None = None) -> Any:
    """The work, which is not done now, as a graph; random numbers of `generator` are drawn anew at every replay."""
    graph = torch.cuda.CUDAGraph()
    if generator is not None:
        graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        work()
    return graph


def being_recorded(like: Tensor) -> bool:
    """Whether what is done with tensors like this one is being recorded just now: some of torch's optimisers ask."""
    return like.is_cuda and torch.cuda.is_current_stream_capturing()


class RecordedStep:
    """Steps of one shape, done aside the first time, recorded the second and replayed.

    What they read lies where it lay when they were recorded, so all that is handed over is copied there, and the states
    a step leaves are copied onto those it has read: the states it returns are overwritten by the next step. On a device
    that cannot record, the work is done there anew at every step.
    """

    def __init__(self, work: Work) -> None:
        self.work = work
        self.states: list[State] = []
        self.inputs: list[Any] = []
        self.graph: Any = None

    def __call__(self, states: list[State], *inputs: Any) -> tuple[Tensor, list[State]]:
        first = not self.states
        if first:
            self.states = [state.map(torch.clone) for state in states]
            self.inputs = [None if given is None else given.clone() for given in inputs]
        else:
            for mine, given in zip(self.inputs, inputs, strict=True):
                if mine is not None:
                    mine.copy_(given)
            _copy(states, self.states)
        if not self.states[0].length.is_cuda:
            self._go()
        elif first:
            run_aside(self._go)
        else:
            self.graph = self.graph or record(self._go)
            self.graph.replay()
        return self.figures.clone(), self.states

    def _go(self) -> None:
        self.figures, states = self.work(self.states, *self.inputs)
        _copy(states, self.states)


def _copy(states: list[State], places: list[State]) -> None:
    """Onto the tensors of others, where they do not lie there already."""
    for state, place in zip(states, places, strict=True):
        for value, there in zip(state.tensors().values(), place.tensors().values(), strict=True):
            if there is not value:
                there.copy_(value)
