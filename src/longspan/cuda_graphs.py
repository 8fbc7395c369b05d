"""CUDA graphs: work that is captured once and replayed with one launch.

The step of a small model is launch-bound: launching its kernels takes longer than running them. A graph replaces
hundreds of launches by one.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from longspan.contract import Decoder, State
from longspan.shapes import Float, Int, Tensor

Work = Callable[..., tuple[Tensor, list[State]]]
"""From states and further tensors (or None) to a tensor of results and the next states."""


_warming_up = False


def warm_up(work: Callable[[], Any]) -> None:
    """Run the work once on a side stream before its capture, which must not include compilation or autotuning."""
    global _warming_up
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    _warming_up = True
    try:
        with torch.cuda.stream(side):
            work()
    finally:
        _warming_up = False
    torch.cuda.current_stream().wait_stream(side)


def capture(
    work: Callable[[], Any], generator: torch.Generator | None = None, pool: Any = None
) -> torch.cuda.CUDAGraph:
    """The work as a graph, without running it. Every replay draws new random numbers from `generator`. Graphs of one
    `pool` share their memory: nothing in it may be used after another graph of the pool runs."""
    graph = torch.cuda.CUDAGraph()
    if generator is not None:
        graph.register_generator_state(generator)
    # Other threads may use the device meanwhile: a server scores texts while it decodes.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        work()
    return graph


def is_capturing(like: Tensor) -> bool:
    """Whether work on the device of this tensor is being captured. Some of torch's optimizers need to know."""
    return like.is_cuda and torch.cuda.is_current_stream_capturing()


def is_for_graph(like: Tensor) -> bool:
    """Whether work on the device of this tensor is being captured, or is the warm-up of a capture, which has to compile
    the same kernels. Not per thread, because autograd runs a backward pass in a thread of its own."""
    return is_capturing(like) or (like.is_cuda and _warming_up)


class CapturedStep:
    """Steps of one shape: the first is run normally, the second captured, and later ones are replayed.

    A graph reads and writes fixed addresses. So inputs are copied into buffers, and the next step overwrites the states
    that a step returns. On a CPU the work runs normally every time. `pool` makes the memory for a graph of several
    shapes, which take turns; inputs, states and results are outside of it.
    """

    def __init__(self, work: Work, pool: Callable[[], Any] | None = None) -> None:
        self.work, self.pool = work, pool
        self.states: list[State] = []
        self.inputs: list[Any] = []
        self.graph: Any = None

    def __call__(self, states: list[State], *inputs: Any) -> tuple[Tensor, list[State]]:
        first = not self.states
        if first:
            self.states = [state.map(torch.clone) for state in states]
            self.inputs = [None if given is None else given.clone() for given in inputs]
        else:
            for buffer, given in zip(self.inputs, inputs, strict=True):
                if buffer is not None:
                    buffer.copy_(given)
            _copy(states, self.states)
        if not self.states[0].length.is_cuda:
            self._run()
        elif first:
            warm_up(self._run)
        else:
            self.graph = self.graph or capture(self._run, pool=self.pool and self.pool())
            self.graph.replay()
        return self.results.clone(), self.states

    def _run(self) -> None:
        self.results, states = self.work(self.states, *self.inputs)
        _copy(states, self.states)


def _copy(states: list[State], buffers: list[State]) -> None:
    """One kernel per dtype where torch has one, which is for equal strides: hence flat."""
    flat: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for state, buffer in zip(states, buffers, strict=True):
        for value, fixed in zip(state.tensors().values(), buffer.tensors().values(), strict=True):
            if fixed is value:
                continue
            if value.is_contiguous() and fixed.is_contiguous() and value.dtype == fixed.dtype:
                fixed_of, value_of = flat.setdefault(value.dtype, ([], []))
                fixed_of.append(fixed.view(-1))
                value_of.append(value.view(-1))
            else:
                fixed.copy_(value)
    for fixed_of, value_of in flat.values():
        torch._foreach_copy_(fixed_of, value_of)


class GraphDecoder(Decoder):
    """Wraps any decoder and captures its step once it is static. The next step overwrites the result of `step`."""

    static = False

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.tokens: Tensor | None = None
        self.graphs: dict[Any, Any] = {}
        self.samplers: dict[Any, Any] = {}
        """Samplers with buffers that the graphs use, by their settings."""

    def prefill(self, tokens: Int[Tensor, "B T"]) -> None:
        self.decoder.prefill(tokens)
        if not self.decoder.static:
            self.graphs.clear()

    def state(self) -> State:
        return self.decoder.state()

    def launch(self, tokens: Int[Tensor, "B"]) -> Float[Tensor, "B V"]:
        return self._run(tokens, lambda logits: logits, None, "step")

    def advance(self) -> None:
        self.decoder.advance()

    @property
    def can_undo(self) -> bool:  # type: ignore[override]
        return self.decoder.can_undo

    def undo(self) -> None:
        self.decoder.undo()

    def sampler(
        self,
        choose: Callable[[Float[Tensor, "B V"]], Int[Tensor, "B"]],
        generator: torch.Generator | None,
        key: Any,
        buffers: Sequence[Tensor] = (),
    ) -> Callable[[Int[Tensor, "B"]], Int[Tensor, "B"]]:
        """From a token to the next: fuses the step and sampling in one graph. Samplers with equal keys share a graph.
        Passing the returned tensor back as `tokens` saves a copy. `choose` updates `buffers` in place."""

        def next_tokens(logits: Float[Tensor, "B V"]) -> Int[Tensor, "B"]:
            chosen = choose(logits)
            return chosen if self.tokens is None or chosen is self.tokens else self.tokens.copy_(chosen)

        def sample(tokens: Int[Tensor, "B"]) -> Int[Tensor, "B"]:
            chosen = self._run(tokens, next_tokens, generator, key, buffers)
            self.decoder.advance()
            return chosen

        return sample

    def _run(
        self,
        tokens: Int[Tensor, "B"],
        then: Callable[[Float[Tensor, "B V"]], Tensor],
        generator: torch.Generator | None,
        key: Any,
        buffers: Sequence[Tensor] = (),
    ) -> Tensor:
        """`then(launch(tokens))`, captured if the decoder is static."""
        if not self.decoder.static:
            return then(self.decoder.launch(tokens))
        if tokens is not self.tokens:
            if self.tokens is None:
                self.tokens = tokens.clone()
            else:
                self.tokens.copy_(tokens)
        captured = self.graphs.get(key)
        if captured is None:
            captured = self.graphs[key] = self._capture(then, generator, buffers)
        graph, results = captured
        graph.replay()
        return results[0]

    def _capture(
        self, then: Callable[[Tensor], Tensor], generator: torch.Generator | None, buffers: Sequence[Tensor]
    ) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
        assert self.tokens is not None
        tokens = self.tokens
        results: list[Tensor] = []

        def work() -> None:
            results[:] = [then(self.decoder.launch(tokens))]

        # The warm-up reads the same token as the first replay, so its changes are undone.
        saved = [(buffer, buffer.clone()) for buffer in (tokens, *self.decoder.buffers(), *buffers)]
        random = None if generator is None else generator.get_state()
        warm_up(work)
        for buffer, before in saved:
            buffer.copy_(before)
        if generator is not None and random is not None:
            generator.set_state(random)
        return capture(work, generator), results
