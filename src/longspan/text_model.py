"""A model with its tokenizer: what `longspan.load` gives, and what works on text instead of tokens."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from longspan.checkpoints.model_folder import load_model
from longspan.checkpoints.states import load_state, save_state
from longspan.contract import LanguageModel, State
from longspan.errors import DataError, StateError
from longspan.evaluation.likelihood import Tally, stream_losses
from longspan.generation.sampling import Sampling
from longspan.generation.session import Session, TextStream
from longspan.shapes import Float, Int, Tensor
from longspan.tokens import Tokenizer


@dataclass(frozen=True)
class Score:
    """What a model thinks of a text. `losses[k]` is token k+1 given the tokens up to k, in nats."""

    tokens: int
    losses: NDArray[np.float32]

    @property
    def nats(self) -> float:
        return float(self.losses.mean(dtype=np.float64))

    @property
    def bits(self) -> float:
        return self.nats / math.log(2)

    @property
    def perplexity(self) -> float:
        return math.exp(self.nats)


class TextModel:
    """`score`, `generate`, `hidden_states` on text; below them the contract, on tokens.

    `model(tokens, state)`, `model.losses(...)` and `model.initial_state(...)` are those of the model inside.
    """

    def __init__(self, model: LanguageModel, tokenizer: Tokenizer, hash: str = "") -> None:
        self.model, self.tokenizer, self.hash = model.eval(), tokenizer, hash

    def __call__(self, tokens: Int[Tensor, "B T"], state: State | None = None) -> tuple[Tensor, State]:
        return self.model(tokens, state)

    def __getattr__(self, name: str) -> Any:
        if name == "model":
            raise AttributeError(name)
        return getattr(self.model, name)

    def score(self, text: str | bytes) -> Score:
        """The loss of every token of a text but the first."""
        ids = self.tokenizer.encode(text)
        losses = np.empty(max(len(ids) - 1, 0), np.float32)
        tally = Tally(losses)
        for stretch in stream_losses(self.model, ids, segment=self.model.config.segment):
            tally.add(stretch)
        return Score(len(ids), losses)

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

    def session(self, prompt: str | bytes = "", *, seed: int = 0, state: Path | None = None) -> Session:
        """A stream to go on with: from a saved state, from a prompt, or both."""
        session = Session(self.model, seed=seed, known=self.tokenizer.size)
        if state is not None:
            carried, extra = load_state(state, model_hash=self.hash)
            if "pending" not in extra:
                raise StateError(f"{state} holds no waiting token; it was not saved by a session")
            session.restore(carried, int(extra["pending"].flatten()[0]))
        ids = self.tokenizer.encode_prompt(prompt)
        if not len(ids) and session.pending is None:
            # A stream has to begin with something: a line's end is where texts begin.
            ids = self.tokenizer.encode("\n")[:1]
        session.read(ids.tolist())
        return session

    def save_session(self, session: Session, path: Path) -> None:
        pending = torch.tensor([-1 if session.pending is None else session.pending])
        save_state(path, session.decoder.state(), model_hash=self.hash, extra={"pending": pending})

    def stream(self, session: Session, count: int, sampling: Sampling) -> Iterator[str]:
        """Text as it is written; every piece is whole characters."""
        text = TextStream()
        for token in session.write(count, sampling):
            if piece := text.push(self.tokenizer.decode_bytes([token])):
                yield piece
        if rest := text.close():
            yield rest

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
        sampling = Sampling(temperature, top_k, top_p, min_p)
        return "".join(self.stream(self.session(prompt, seed=seed), max_new_tokens, sampling))


def load(
    path: str | Path, *, device: str | torch.device = "cpu", dtype: torch.dtype | None = None, **settings: Any
) -> TextModel:
    """The model in a folder, ready to use. Settings that do not change its weights may be given anew:
    `longspan.load(PATH, memory=3800, clamp=1000, same_length=True)`."""
    loaded = load_model(Path(path), overrides=settings, device=device, dtype=dtype)
    return TextModel(loaded.model, loaded.tokenizer, loaded.hash)
