"""A model with its tokenizer: what `longspan.load` gives, and what works on text instead of tokens."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from longspan.box import box
from longspan.checkpoints.model_folder import load_model
from longspan.checkpoints.states import load_state, save_state
from longspan.contract import LanguageModel, State
from longspan.device import find_device, find_dtype
from longspan.errors import ConfigError, DataError, StateError
from longspan.evaluation.likelihood import Tally, slides, sliding_losses, stream_losses
from longspan.generation.sampling import Sampling
from longspan.generation.session import Session, TextStream
from longspan.shapes import Float, Tensor
from longspan.tokens import Tokenizer


@dataclass(frozen=True)
class Score:
    """What a model thinks of a text. `losses[k]` is token k+1 given the tokens up to k, in nats; `sliding` says that
    each had a fresh window of the tokens before it, and no memory."""

    tokens: int
    losses: NDArray[np.float32]
    sliding: bool = False

    @property
    def nats(self) -> float:
        return float(self.losses.mean(dtype=np.float64))

    @property
    def bits(self) -> float:
        return self.nats / math.log(2)

    @property
    def perplexity(self) -> float:
        return math.exp(self.nats) if self.nats < 700 else math.inf


class TextModel:
    """`score`, `generate`, `hidden_states` on text; below them the contract, on tokens.

    `model(tokens, state, starts)`, `model.losses(...)`, `model.initial_state(...)` and the rest are those of the model
    inside, `model.model`, whose own `hidden_states` takes tokens.
    """

    def __init__(self, model: LanguageModel, tokenizer: Tokenizer, hash: str = "") -> None:
        self.model, self.tokenizer, self.hash = model.eval(), tokenizer, hash

    def __call__(self, *args: Any, **keywords: Any) -> tuple[Tensor, State]:
        return self.model(*args, **keywords)

    def __getattr__(self, name: str) -> Any:
        if name == "model":
            raise AttributeError(name)
        return getattr(self.model, name)

    def score(self, text: str | bytes, *, sliding: bool | None = None) -> Score:
        """The loss of every token of a text but the first.

        A model without memory reads a fresh window of its config's segment for every token, which costs one window per
        token; `sliding` forces either way, and False reads it segment by segment.
        """
        ids = self.tokenizer.encode(text)
        losses = np.empty(max(len(ids) - 1, 0), np.float32)
        tally, slid = Tally(losses), slides(self.model, sliding)
        ways = sliding_losses if slid else stream_losses
        for stretch in ways(self.model, ids, segment=self.model.config.segment):
            tally.add(stretch)
        return Score(len(ids), losses, slid)

    def hidden_states(self, text: str | bytes) -> tuple[Float[Tensor, "T D"], ...]:
        """The embedding and every layer's output at every token of a text, read as one stream."""
        ids = self.tokenizer.encode(text)
        if not len(ids):
            raise DataError("the text is empty; there is nothing to read")
        tokens = torch.from_numpy(ids.astype(np.int64)).to(next(self.model.parameters()).device)[None]
        state, pieces = self.model.initial_state(1), []
        with torch.inference_mode():
            for piece in tokens.split(self.model.config.segment, dim=1):
                hidden, state = self.model.hidden_states(piece, state)
                pieces.append(hidden)
        return tuple(torch.cat(layer, dim=1)[0] for layer in zip(*pieces, strict=True))

    def session(self, prompt: str | bytes = "", *, seed: int | None = None, state: Path | None = None) -> Session:
        """A stream to go on with: from a saved state, from a prompt, or both. A seed draws anew; without one a saved
        state goes on as if nothing had happened."""
        session = Session(self.model, seed=(seed or 0) % 2**63, known=self.tokenizer.size)
        if state is not None:
            self._take_up(session, state, draw_anew=seed is not None)
        ids = self.tokenizer.encode_prompt(prompt)
        if not len(ids) and session.pending is None:
            # A stream has to begin with something: a line's end is where texts begin.
            ids = self._first_token()
        session.read(ids.tolist())
        return session

    def _first_token(self) -> NDArray[Any]:
        try:
            ids = self.tokenizer.encode("\n")[:1]
        except DataError:
            ids = np.array([], np.int64)
        if not len(ids) or int(ids[0]) >= self.model.config.vocabulary:
            raise DataError("there is no prompt, and this model knows no line's end to begin from; give a prompt")
        return ids

    def _take_up(self, session: Session, path: Path, draw_anew: bool) -> None:
        carried, extra = load_state(path, model_hash=self.hash)
        kinds = {"pending": torch.int64, "held": torch.uint8, "random": torch.uint8}
        found = {name: tensor.dtype for name, tensor in extra.items() if tensor.dim() == 1}
        if found != kinds or len(extra["pending"]) != 1:
            raise StateError(f"{path} holds no waiting token, text and generator; it was not saved by a session")
        session.restore(carried, int(extra["pending"]))
        session.held = bytes(extra["held"].tolist())
        if not draw_anew:
            session.restore_random(extra["random"])

    def save_session(self, session: Session, path: Path) -> None:
        extra = {
            "pending": torch.tensor([-1 if session.pending is None else session.pending]),
            "held": torch.tensor(list(session.held), dtype=torch.uint8),
            "random": session.generator.get_state().cpu(),
        }
        save_state(path, session.decoder.state(), model_hash=self.hash, extra=extra)

    def stream(self, session: Session, count: int, sampling: Sampling, *, last: bool = True) -> Iterator[str]:
        """Text as it is written; every piece is whole characters.

        Bytes that do not make one by the end are shown as a replacement where this is the `last` of the text, and
        stay with the session otherwise.
        """
        text = TextStream(session.held)
        for token in session.write(count, sampling):
            piece = text.push(self.tokenizer.decode_bytes([token]))
            session.held = text.held
            if piece:
                yield piece
        if last and (rest := text.close()):
            session.held = b""
            yield rest

    def spelled(self, session: Session, prompt: str | bytes) -> str:
        """A prompt as this tokenizer writes it, what makes no character yet left with the session."""
        text = TextStream()
        shown = text.push(self.tokenizer.decode_bytes(self.tokenizer.encode_prompt(prompt)))
        session.held = text.held or session.held
        return shown

    def generate(
        self,
        prompt: str | bytes = "",
        max_new_tokens: int = 200,
        *,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int = 0,
    ) -> str:
        """The tokens that follow the prompt, as text."""
        if max_new_tokens < 0:
            raise ConfigError(f"max_new_tokens={max_new_tokens} must not be negative")
        sampling = Sampling(temperature, top_k, top_p, min_p)
        session = self.session(prompt, seed=seed)
        self.spelled(session, prompt)
        return "".join(self.stream(session, max_new_tokens, sampling))


def load(
    path: str | Path | None = None,
    *,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype = "auto",
    **settings: Any,
) -> TextModel:
    """The model in a folder, or where none is named the one in the box, ready to use. Settings that do not change its
    weights may be given anew: `longspan.load(PATH, memory=3800, clamp=1000, same_length=True)`."""
    where = find_device(device)
    loaded = load_model(box(path), overrides=settings, device=where, dtype=find_dtype(dtype, where))
    return TextModel(loaded.model, loaded.tokenizer, loaded.hash)
