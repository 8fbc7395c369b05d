"""From a token to the next: a step of a decoder, and sampling."""

from collections.abc import Callable
from dataclasses import asdict

import torch

from longspan.contract import Decoder
from longspan.cuda_graphs import GraphDecoder
from longspan.decoding.host_tokens import HostTokens
from longspan.decoding.sampling import Sampling
from longspan.kernels import sampling as kernel
from longspan.shapes import Float, Int, Tensor

DRAW = 4
"""A CUDA generator counts 32-bit words; a draw of one number per row takes four of them."""
ZERO_COPY = True
"""The kernel writes tokens to host memory itself. False: a copy after every step."""


class CapturedSampler:
    """A step and sampling in one CUDA graph, with random numbers and counts that stay on the device.

    The numbers are those that `torch.rand` would take from the generator, but the generator is not registered with the
    graph, which would cost three launches per step. The kernel counts draws itself. The host counts them as well, in
    the generator, so its state can be saved at any time and the next draw continues from there.
    """

    def __init__(
        self, decoder: GraphDecoder, sampling: Sampling, known: int | None, rows: int, *, ahead: bool = False
    ) -> None:
        """With `ahead`, tokens are also written to host memory, and the next step reads 0 instead of -1."""
        self.decoder, self.sampling, self.known = decoder, sampling, known
        model = decoder.decoder.model  # type: ignore[attr-defined]
        device = next(model.parameters()).device
        if decoder.tokens is None:
            decoder.tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self.tokens = decoder.tokens  # the graphs read this buffer
        random = torch.zeros(rows, 3, dtype=torch.int64, device=device)
        self.host = HostTokens(rows, device) if ahead else None
        found = None
        if self.host is not None:
            found = self.host.rows if ZERO_COPY else torch.zeros_like(self.host.rows, device=device)
        self.places = kernel.Places(self.tokens, random, found)
        width = known or model.config.vocabulary
        self.counts = torch.zeros(rows, width, device=device) if sampling.penalises else None
        self.position: tuple[int, int] | None = None
        """Seed and offset of the generator that the next step uses, as the device knows them."""
        self.launches = 0
        buffers = [random] if self.counts is None else [random, self.counts]
        self._sample = decoder.sampler(self._choose, None, ("sampler", sampling, known, ahead), buffers)

    def _choose(self, logits: Float[Tensor, "B V"]) -> Int[Tensor, "B"]:
        settings = asdict(self.sampling)
        return kernel.choose_tokens(logits[:, : self.known], places=self.places, counts=self.counts, **settings)

    def restart(self) -> None:
        """Penalties count tokens from here."""
        if self.counts is not None:
            self.counts.zero_()

    def __call__(self, tokens: Int[Tensor, "B"], generator: torch.Generator) -> Int[Tensor, "B"]:
        """Launch a step. The next one overwrites the result."""
        if not self.sampling.greedy:
            self._follow(generator)
        chosen = self._sample(tokens)
        if self.host is not None and self.places.found is not None:
            turn = self.launches % 2
            if self.places.found is not self.host.rows:
                self.host.rows[turn].copy_(self.places.found[turn], non_blocking=True)
            self.host.launched(turn)
        self.launches += 1
        return chosen

    def _follow(self, generator: torch.Generator) -> None:
        """Take a draw from the generator. It is copied to the device only if it is not where the last step left it."""
        seed, offset = generator.initial_seed(), generator.get_offset()
        if (seed, offset) != self.position:
            self.places.random[:, 0].fill_(seed - 2**64 if seed >= 2**63 else seed)
            self.places.random[:, 1].fill_(offset // DRAW)
        generator.set_offset(offset + DRAW)
        self.position = seed, offset + DRAW

    def undo(self, generator: torch.Generator) -> None:
        """Undo the last step: that of the decoder, its draw and its count."""
        self.decoder.undo()
        if not self.sampling.greedy:
            generator.set_offset(generator.get_offset() - DRAW)
        if self.counts is not None:
            self.counts.scatter_add_(1, self.tokens[:, None], -torch.ones_like(self.counts[:, :1]))


def sampler(
    decoder: Decoder, sampling: Sampling, generator: torch.Generator, known: int | None = None
) -> Callable[[Int[Tensor, "B"]], Int[Tensor, "B"]]:
    """A function from a token to the next. Only the first `known` tokens are sampled: the vocabulary of a model may be
    larger than that of its tokenizer. Penalties count the tokens that this function returned."""
    if isinstance(decoder, GraphDecoder) and kernel_samples(decoder, known):
        return _captured(decoder, sampling, generator, known)
    if sampling.penalises:
        return _penalising_sampler(decoder, sampling, generator, known)

    def choose(logits: Float[Tensor, "B V"]) -> Int[Tensor, "B"]:
        return sampling.choose(logits[:, :known], generator)

    if isinstance(decoder, GraphDecoder):
        return decoder.sampler(choose, generator, (sampling, known))
    return lambda tokens: choose(decoder.step(tokens))


def kernel_samples(decoder: GraphDecoder, known: int | None) -> bool:
    """Whether the sampling kernel supports the vocabulary of the decoder's model."""
    model = getattr(decoder.decoder, "model", None)
    if model is None:
        return False
    return kernel.supports_size(next(model.parameters()).device, known or model.config.vocabulary)


def captured_sampler(
    decoder: GraphDecoder, sampling: Sampling, known: int | None, rows: int, *, ahead: bool = False
) -> CapturedSampler:
    """The sampler of a decoder with these settings. It is kept, so that a graph is captured only once."""
    key = (sampling, known, ahead)
    if key not in decoder.samplers:
        decoder.samplers[key] = CapturedSampler(decoder, sampling, known, rows, ahead=ahead)
    found: CapturedSampler = decoder.samplers[key]
    found.restart()
    return found


def _captured(
    decoder: GraphDecoder, sampling: Sampling, generator: torch.Generator, known: int | None
) -> Callable[[Int[Tensor, "B"]], Int[Tensor, "B"]]:
    made: CapturedSampler | None = None

    def sample(tokens: Int[Tensor, "B"]) -> Int[Tensor, "B"]:
        nonlocal made
        if made is None:
            made = captured_sampler(decoder, sampling, known, len(tokens))
        return made(tokens, generator)

    return sample


def _penalising_sampler(
    decoder: Decoder, sampling: Sampling, generator: torch.Generator, known: int | None
) -> Callable[[Int[Tensor, "B"]], Int[Tensor, "B"]]:
    """A sampler with counts. They change at every step, so sampling is not part of a CUDA graph; the step is."""
    counts: Tensor | None = None

    def sample(tokens: Int[Tensor, "B"]) -> Int[Tensor, "B"]:
        nonlocal counts
        logits = decoder.step(tokens)[:, :known]
        counts = torch.zeros_like(logits, dtype=torch.float32) if counts is None else counts
        chosen = sampling.choose(logits, generator, counts)
        counts.scatter_add_(1, chosen.clamp(min=0)[:, None], torch.ones_like(counts[:, :1]))
        return chosen

    return sample
