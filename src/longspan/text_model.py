"""TextModel, a model with its tokenizer: the return type of `longspan.load`."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Unpack, overload

import numpy as np
import torch
from numpy.typing import NDArray

from longspan.bundled import model_path
from longspan.checkpoints.model_folder import load_model, override, save_model
from longspan.checkpoints.states import load_state, save_state
from longspan.config import convert
from longspan.contract import LanguageModel, State
from longspan.decoding.sampling import Sampling
from longspan.decoding.session import Session, TextStream
from longspan.decoding.stop import StopText
from longspan.device import find_device, find_dtype
from longspan.errors import ConfigError, DataError, StateError
from longspan.models.families import name_of
from longspan.reading import ContextSettings, Reading, ReadingSettings
from longspan.scoring.dynamic import Dynamics
from longspan.scoring.score import Method, Score, score
from longspan.scoring.surprisal import Per, Surprisal
from longspan.scoring.surprisal_files import surprisals
from longspan.segments import map_segments
from longspan.shapes import Bool, Float, Int, Tensor
from longspan.tokenizers import Tokenizer
from longspan.tokenizers.text import to_bytes

Text = str | bytes


class GenerationOptions(ContextSettings, total=False):
    """The options of `TextModel.generate`, and reading settings."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    seed: int
    stop: Sequence[str]


class TextModel:
    """A model with its tokenizer.

    `score`, `generate` and `hidden_states` take text. `model(tokens, state)`, `losses` and `initial_state` take tokens
    and are those of the LanguageModel in `model.model`, which has everything else. Apart from `to` and
    `method="dynamic"` nothing here modifies the model, so threads can share it.
    """

    def __init__(self, model: LanguageModel, tokenizer: Tokenizer, hash: str = "", *, int8: bool = False) -> None:
        """Puts the model into eval mode. `hash` identifies its weights: a saved session fits the same hash only. With
        `int8`, text is generated on a CPU with int8 weights and an int8 cache."""
        self.model, self.tokenizer, self.hash, self.int8 = model.eval(), tokenizer, hash, int8

    @property
    def config(self) -> Any:
        """The config of the model's family."""
        return self.model.config

    @property
    def reading(self) -> Reading:
        """The default reading."""
        return self.model.reading

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def parameter_count(self) -> int:
        """All parameters, frozen ones included; tied weights are counted once."""
        return self.model.parameter_count

    def save(self, path: str | Path, notes: Iterable[str] = ()) -> None:
        """Write a model folder, which `load` and the command line read. `notes` say where the model comes from."""
        self.hash = save_model(Path(path), self.model, self.tokenizer, notes=notes)

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        return self.model.parameters()

    def to(self, device: str | torch.device | None = None, dtype: str | torch.dtype | None = None) -> "TextModel":
        """Move the model to a device, or convert its weights, in place; the names are those of `load`."""
        where = self.device if device is None else find_device(device)
        self.model.to(device=where, dtype=None if dtype is None else find_dtype(dtype, where))
        return self

    def __call__(
        self, tokens: Int[Tensor, "B T"], state: State | None = None, starts: Bool[Tensor, "B T"] | None = None
    ) -> tuple[Float[Tensor, "B T V"], State]:
        """The logits of a segment and the state after it."""
        return self.model(tokens, state, starts)

    def initial_state(
        self, batch: int = 1, reading: Reading | None = None, *, trainable: bool | None = None, filled: bool = False
    ) -> State:
        """`LanguageModel.initial_state`: the state before the first token."""
        if convert(int, batch, "batch") < 1:
            raise ConfigError(f"batch={batch} must be at least 1")
        return self.model.initial_state(batch, reading, trainable=trainable, filled=filled)

    def losses(
        self,
        tokens: Int[Tensor, "B T"],
        targets: Int[Tensor, "B S"],
        state: State | None = None,
        starts: Bool[Tensor, "B T"] | None = None,
        *,
        last: int | None = None,
    ) -> tuple[Float[Tensor, "B S"], State]:
        """`LanguageModel.losses`: one loss per token in nats, and the state after the segment."""
        return self.model.losses(tokens, targets, state, starts, last=last)

    def reach(self, reading: Reading | None = None) -> int:
        """Distance from a prediction to the oldest token that can influence it."""
        return self.model.reach(reading)

    def has_memory(self, reading: Reading | None = None) -> bool:
        """Whether anything is carried across segments."""
        return self.model.has_memory(reading)

    def reading_with(self, **settings: Unpack[ReadingSettings]) -> Reading:
        """The model's reading with some settings changed, for example memory=3800."""
        return override(name_of(self.model), self.model.reading, settings) if settings else self.model.reading

    @overload
    def score(  # type: ignore[overload-overlap]  # a str is a Sequence[str]; the first overload wins
        self,
        text: Text,
        *,
        method: Method | None = None,
        streams: int = 1,
        dynamics: Dynamics | None = None,
        **settings: Unpack[ReadingSettings],
    ) -> Score: ...
    @overload
    def score(
        self,
        text: Sequence[Text],
        *,
        method: Method | None = None,
        streams: int = 1,
        dynamics: Dynamics | None = None,
        **settings: Unpack[ReadingSettings],
    ) -> list[Score]: ...
    def score(
        self,
        text: Text | Sequence[Text],
        *,
        method: Method | None = None,
        streams: int = 1,
        dynamics: Dynamics | None = None,
        **settings: Unpack[ReadingSettings],
    ) -> Score | list[Score]:
        """The losses of all tokens of a text but the first, and their mean; a list of scores for a list of texts.

        `method` is "stream", "sliding" or "dynamic". Default: "stream", or "sliding" if the model has no memory.
        `streams` cuts a text into parts that are read in parallel, which is faster for a long text; every part starts
        without context. `dynamics` are the settings of "dynamic". `settings` change the reading: memory, clamp,
        segment, ...
        """
        if dynamics is not None and method != "dynamic":
            raise ConfigError(
                f"{dynamics} needs method='dynamic', not {method!r}; change the method or leave out dynamics"
            )
        if not isinstance(text, str | bytes):
            each = _texts(text)
            return [self.score(one, method=method, streams=streams, dynamics=dynamics, **settings) for one in each]
        self.model.require_next_token()
        ids, reading = self.tokenizer.encode(text), self.reading_with(**settings)
        found = score(self.model, ids, reading, method=method, streams=streams, dynamics=dynamics, losses=True)
        data = to_bytes(text)
        size = found.scored if self.tokenizer.unit == "byte" else len(data)
        return dataclasses.replace(found, bytes=size, words=len(data.split()))

    @overload
    def surprisal(  # type: ignore[overload-overlap]  # a str is a Sequence[str]; the first overload wins
        self, text: Text, per: Per = "token", *, batch: int = 8, **settings: Unpack[ReadingSettings]
    ) -> Surprisal: ...
    @overload
    def surprisal(
        self, text: Sequence[Text], per: Per = "token", *, batch: int = 8, **settings: Unpack[ReadingSettings]
    ) -> list[Surprisal]: ...
    def surprisal(
        self, text: Text | Sequence[Text], per: Per = "token", *, batch: int = 8, **settings: Unpack[ReadingSettings]
    ) -> Surprisal | list[Surprisal]:
        """The surprisal of every "token", "word" or "line" of a text, or of the "document", with offsets in bytes and
        characters; a list for a list of texts.

        The losses are those of `score`, and their sums are equal. `batch` texts of a list are read in parallel.
        """
        each = [text] if isinstance(text, str | bytes) else _texts(text)
        named, reading = [("the text", to_bytes(one)) for one in each], self.reading_with(**settings)
        unit = convert(Per, per, "per")
        found = [one for _, one in surprisals(self.model, self.tokenizer, named, unit, reading, batch=batch)]
        return found[0] if isinstance(text, str | bytes) else found

    @overload
    def hidden_states(  # type: ignore[overload-overlap]  # a str is a Sequence[str]; the first overload wins
        self, text: Text
    ) -> tuple[Float[Tensor, "T D"], ...]: ...
    @overload
    def hidden_states(self, text: Sequence[Text]) -> list[tuple[Tensor, ...]]: ...
    def hidden_states(self, text: Text | Sequence[Text]) -> tuple[Tensor, ...] | list[tuple[Tensor, ...]]:
        """The embedding and every layer's output at every token of a text, [T, width] each; a list of such tuples for
        a list of texts."""
        if not isinstance(text, str | bytes):
            return [self.hidden_states(one) for one in _texts(text)]
        ids = self.tokenizer.encode(text)
        if not len(ids):
            raise DataError("the text has 0 tokens; hidden states need at least 1")
        tokens = torch.from_numpy(ids.astype(np.int64)).to(self.device)[None]
        with torch.inference_mode():
            state = self.model.initial_state(1, trainable=False)
            pieces = [hidden for hidden, _ in map_segments(self.model.hidden_states, state, tokens)]
        return tuple(torch.cat(layer, dim=1)[0] for layer in zip(*pieces, strict=True))

    def session(
        self,
        prompt: Text = "",
        *,
        seed: int | None = None,
        state: str | Path | None = None,
        **settings: Unpack[ReadingSettings],
    ) -> Session:
        """A stream to generate from, after a prompt, a saved state, or a saved state and then a prompt.

        Default of `seed`: 0, or the random generator of the saved state.
        """
        self.model.require_next_token()
        reading = self.reading_with(**settings)
        first = 0 if seed is None else convert(int, seed, "seed")
        session = Session(self.model, seed=first % 2**63, known=self.tokenizer.size, reading=reading, int8=self.int8)
        if state is not None:
            if settings:
                raise ConfigError(
                    f"{', '.join(settings)} cannot be changed for the saved state {state}, which has its own reading; "
                    "leave out one of them"
                )
            self._load_session(session, Path(state), keep_random=seed is None)
        ids = self.tokenizer.encode_prompt(prompt)
        if not len(ids) and session.pending is None:
            ids = self.first_token()
        session.read(ids.tolist())
        return session

    def first_token(self) -> NDArray[Any]:
        """The first token of a stream without a prompt: the end of a document, or else a newline."""
        if self.tokenizer.document_end_id is not None:
            return np.array([self.tokenizer.document_end_id], self.tokenizer.dtype)
        try:
            ids = self.tokenizer.encode("\n")[:1]
        except DataError:
            ids = np.array([], np.int64)
        if not len(ids) or int(ids[0]) >= self.model.config.vocabulary:
            raise DataError("this tokenizer has no newline to start a text with; pass a prompt")
        return ids

    def _load_session(self, session: Session, path: Path, *, keep_random: bool) -> None:
        state, extra = load_state(path, self.model, model_hash=self.hash)
        dtypes = {"pending": torch.int64, "held": torch.uint8, "random": torch.uint8}
        found = {name: tensor.dtype for name, tensor in extra.items() if tensor.dim() == 1}
        if found != dtypes or len(extra["pending"]) != 1:
            raise StateError(
                f"{path} was not saved by a session; use a file written by save_session or generate --save-state"
            )
        session.restore(state, int(extra["pending"]))
        session.held = bytes(extra["held"].tolist())
        if keep_random:
            session.restore_random(extra["random"])

    def save_session(self, session: Session, path: Path) -> None:
        extra = {
            "pending": torch.tensor([-1 if session.pending is None else session.pending]),
            "held": torch.tensor(list(session.held), dtype=torch.uint8),
            "random": session.generator.get_state().cpu(),
        }
        save_state(path, session.decoder.state(), model_hash=self.hash, extra=extra)

    def stream(
        self, session: Session, count: int, sampling: Sampling, *, last: bool = True, stop: Sequence[str] = ()
    ) -> Iterator[str]:
        """Generate `count` tokens and yield text as soon as its characters are complete.

        Generation ends at the first of the strings `stop`, which is not yielded; the session has read it. If this call
        is the `last`, an incomplete character at the end becomes a replacement character; otherwise the session keeps
        its bytes.
        """
        text, until = TextStream(session.held), StopText(stop)
        for token in session.write(count, sampling):
            piece = until.push(text.push(self.tokenizer.decode_bytes([token])))
            session.held = text.held
            if piece:
                yield piece
            if until.stopped:
                return
        if last:
            session.held = b""
        if rest := until.push(text.close() if last else "") + until.close():
            yield rest

    def echo(self, session: Session, prompt: Text) -> str:
        """The prompt as the tokenizer decodes it; the session keeps the bytes of an incomplete character."""
        text = TextStream()
        decoded = text.push(self.tokenizer.decode_bytes(self.tokenizer.encode_prompt(prompt)))
        session.held = text.held or session.held
        return decoded

    @overload
    def generate(  # type: ignore[overload-overlap]  # a str is a Sequence[str]; the first overload wins
        self, prompt: Text = "", max_new_tokens: int = 200, **options: Unpack[GenerationOptions]
    ) -> str: ...
    @overload
    def generate(
        self, prompt: Sequence[Text], max_new_tokens: int = 200, **options: Unpack[GenerationOptions]
    ) -> list[str]: ...
    def generate(
        self,
        prompt: Text | Sequence[Text] = "",
        max_new_tokens: int = 200,
        *,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        repetition_penalty: float = 1.0,
        seed: int = 0,
        stop: Sequence[str] = (),
        **settings: Unpack[ContextSettings],
    ) -> str | list[str]:
        """The text that follows the prompt; a list of texts for a list of prompts. `settings` change the reading.

        The text ends before the first of the strings `stop`. Penalties count generated tokens (`Sampling`).

        `temperature` is that of sampling; 0 is greedy. It divides logits that already include the temperature of the
        reading: `load(temperature=2).generate("a", temperature=0.5)` samples from the model's own distribution.
        """
        if convert(int, max_new_tokens, "max_new_tokens") < 0:
            raise ConfigError(f"max_new_tokens={max_new_tokens} must be at least 0")
        penalties = (presence_penalty, frequency_penalty, repetition_penalty)
        sampling = Sampling(temperature, top_k, top_p, min_p, *penalties)
        each = [prompt] if isinstance(prompt, str | bytes) else _texts(prompt)
        found = []
        for one in each:
            session = self.session(one, seed=seed, **settings)
            self.echo(session, one)
            found.append("".join(self.stream(session, max_new_tokens, sampling, stop=stop)))
        return found[0] if isinstance(prompt, str | bytes) else found


def _texts(texts: Sequence[Text]) -> Sequence[Text]:
    """The texts of a list, all of them checked before the first is used."""
    if not isinstance(texts, Sequence):
        raise DataError(f"the text is a {type(texts).__name__}; pass a string, bytes, or a list of them")
    for place, text in enumerate(texts):
        if not isinstance(text, str | bytes):
            raise DataError(f"text {place} of the list is a {type(text).__name__}; pass strings or bytes")
    return texts


def load(
    path: str | Path | None = None,
    *,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    int8: bool | None = None,
    **settings: Unpack[ReadingSettings],
) -> TextModel:
    """The model in a model folder or the folder of a training run. Default: the bundled model.

    `device` is "auto", "cpu", "cuda" or "cuda:N"; `dtype` is "auto" (float32 on a CPU, bfloat16 on CUDA) or the name of
    a dtype. `int8` generates on a CPU with int8 weights and an int8 cache; default: if the weights are stored as int8.
    Where that is not supported, it is ignored (`longspan.decoding.int8`). `settings` change the default reading:
    `longspan.load("runs/tiny", memory=3800, clamp=1000, same_length=True)`.
    """
    where = find_device(device)
    loaded = load_model(model_path(path), overrides=settings, device=where, dtype=find_dtype(dtype, where))
    return TextModel(loaded.model, loaded.tokenizer, loaded.hash, int8=loaded.int8 if int8 is None else int8)
