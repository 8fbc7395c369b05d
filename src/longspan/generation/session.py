"""A session: one stream, read and written a token at a time, in constant memory however long it grows."""

import codecs
from collections.abc import Callable, Iterator, Sequence

import torch

from longspan.contract import Choosing, LanguageModel, State
from longspan.errors import DataError, GenerationError, StateError
from longspan.generation.sampling import Sampling
from longspan.shapes import Tensor


class Session:
    """Reads prompts and writes tokens. The last token read or written waits in `pending` until it is stepped on."""

    def __init__(self, model: LanguageModel, *, seed: int = 0, known: int | None = None) -> None:
        """`known` is how many tokens can be written, where the model scores more than its tokenizer has."""
        self.model, self.known = model, known
        self.device = next(model.parameters()).device
        self.decoder = model.decoder()
        self.pending: int | None = None
        self.held = b""  # bytes written that do not make a character yet
        self.generator = torch.Generator(self.device).manual_seed(seed)

    def restore(self, state: State, pending: int) -> None:
        """Go on where a saved session stopped."""
        if state.batch != 1:
            raise StateError(f"this state has {state.batch} rows; a session reads one stream")
        if not 0 <= pending < self.model.config.vocabulary:
            raise StateError(
                f"this state waits at token {pending}; the model knows 0 to {self.model.config.vocabulary - 1}"
            )
        self.decoder, self.pending = self.model.decoder(self.model.admit(state)), pending

    def restore_random(self, state: Tensor) -> None:
        """Go on with the numbers of a saved generator. One of another kind of device has other numbers, and the seed's
        are drawn instead."""
        if state.shape != self.generator.get_state().shape:
            return
        try:
            self.generator.set_state(state)
        except RuntimeError as error:
            raise StateError(f"this state's generator is damaged ({error!s:.80}); give a seed to draw anew") from None

    def read(self, ids: Sequence[int]) -> None:
        """Take in a text of any length, a segment at a time."""
        if not len(ids):
            return
        waiting = [] if self.pending is None else [self.pending]
        tokens = torch.tensor([*waiting, *(int(i) for i in ids)], device=self.device)
        if int(tokens.max()) >= self.model.config.vocabulary:
            raise DataError(
                f"the text holds token {int(tokens.max())}; this model knows 0 to {self.model.config.vocabulary - 1}"
            )
        if len(tokens) > 1:
            self.decoder.read(tokens[None, :-1])
        self.pending = int(tokens[-1])

    def write(self, count: int, sampling: Sampling) -> Iterator[int]:
        """`count` tokens, each as soon as it is chosen."""
        if self.pending is None:
            raise StateError("nothing has been read yet; give a prompt or a saved state first")
        token, next_token = torch.tensor([self.pending], device=self.device), self._chooser(sampling)
        for written in range(count):
            token = next_token(token)
            chosen = int(token)
            if chosen < 0:
                raise GenerationError(
                    f"the logits of token {written + 1} are not finite; the weights or the state are damaged, or too "
                    f"large for {str(next(self.model.parameters()).dtype).removeprefix('torch.')}: try --dtype float32 "
                    "or another checkpoint"
                )
            self.pending = chosen
            yield chosen

    def _chooser(self, sampling: Sampling) -> Callable[[Tensor], Tensor]:
        """From a token to the next: in one go where the decoder can, else a step and then a choice."""

        def choose(logits: Tensor) -> Tensor:
            return sampling.choose(logits[:, : self.known], self.generator)

        if isinstance(self.decoder, Choosing):
            return self.decoder.chooser(choose, self.generator, (sampling, self.known))
        return lambda token: choose(self.decoder.step(token))


class TextStream:
    """Bytes in, text out: bytes that do not yet make a character are held back until they do."""

    def __init__(self, held: bytes = b"") -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoder.decode(held)

    @property
    def held(self) -> bytes:
        return self._decoder.getstate()[0]

    def push(self, data: bytes) -> str:
        return self._decoder.decode(data)

    def close(self) -> str:
        return self._decoder.decode(b"", final=True)
