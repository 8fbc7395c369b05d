"""The tokens that a session writes, read by the host one by one.

A GPU is idle while the host reads a token, hands it to the caller and launches the next step. Where a step can be
undone, the next one is therefore launched before the token is read. If the caller stops there, or asks for the state,
the step too many is undone. Tokens and states are the same in both forms.
"""

from abc import ABC, abstractmethod

import torch

from longspan.contract import Decoder
from longspan.cuda_graphs import GraphDecoder
from longspan.decoding.samplers import CapturedSampler, captured_sampler, kernel_samples, sampler
from longspan.decoding.sampling import Sampling

READ_AHEAD = True


class WrittenTokens(ABC):
    """Samples one token after another, starting after a given token."""

    @abstractmethod
    def next(self, *, more: bool) -> int:
        """The next token, or -1 if its logits are not finite. `more`: another one will probably be asked for."""

    def settle(self) -> None:  # noqa: B027 (one form has nothing to do)
        """Undo what the host has not asked for yet."""


class PlainTokens(WrittenTokens):
    """One step at a time, for every decoder."""

    def __init__(
        self, decoder: Decoder, sampling: Sampling, generator: torch.Generator, known: int | None, token: int
    ) -> None:
        self.next_token = sampler(decoder, sampling, generator, known)
        self.token = torch.tensor([token], device=generator.device)

    def next(self, *, more: bool) -> int:  # noqa: ARG002
        self.token = self.next_token(self.token)
        return int(self.token)


class AheadTokens(WrittenTokens):
    """At most one step is launched that the host has not asked for."""

    def __init__(self, sampler: CapturedSampler, generator: torch.Generator, token: int) -> None:
        assert sampler.host is not None
        self.sampler, self.generator, self.last, self.host = sampler, generator, token, sampler.host
        self.launched: int | None = None
        """The turn of the step that was launched and not read."""

    def next(self, *, more: bool) -> int:
        if self.launched is None:
            self.sampler.tokens.fill_(self.last)
            self._launch()
        turn, self.launched = self.launched, None
        assert turn is not None
        if more:
            self._launch()
        self.last = self.host.read(turn)[0]
        return self.last

    def _launch(self) -> None:
        self.launched = self.sampler.launches % 2
        self.sampler(self.sampler.tokens, self.generator)

    def settle(self) -> None:
        if self.launched is not None:
            self.launched = None
            self.sampler.undo(self.generator)


def written_tokens(
    decoder: Decoder, sampling: Sampling, generator: torch.Generator, known: int | None, token: int
) -> WrittenTokens:
    """The fastest form that the decoder supports."""
    if (
        READ_AHEAD
        and isinstance(decoder, GraphDecoder)
        and decoder.decoder.static
        and decoder.can_undo
        and kernel_samples(decoder, known)
    ):
        return AheadTokens(captured_sampler(decoder, sampling, known, 1, ahead=True), generator, token)
    return PlainTokens(decoder, sampling, generator, known, token)
