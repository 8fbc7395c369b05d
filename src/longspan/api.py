"""The functions of the public API, `import longspan`."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Unpack, overload

import torch

from longspan import config
from longspan.checkpoints.model_folder import override, require_model_keys
from longspan.contract import LanguageModel
from longspan.device import find_device
from longspan.errors import ConfigError, counted
from longspan.interop.huggingface import KINDS, import_huggingface, kind_of
from longspan.interop.transfo_xl import import_transfo_xl
from longspan.interop.vocabulary import tokenizer_for
from longspan.models import families
from longspan.reading import Reading, ReadingSettings
from longspan.scoring.dynamic import Dynamics
from longspan.scoring.score import Method, Score
from longspan.text_model import GenerationOptions, Text, TextModel, load
from longspan.tokenizers import ByteTokenizer, Tokenizer, read_tokenizer
from longspan.training import run

__all__ = ["build", "generate", "import_model", "init", "load", "score", "train"]


def build(
    family: str,
    *,
    reading: ReadingSettings | Reading | None = None,
    device: str | torch.device = "auto",
    **values: Any,
) -> LanguageModel:
    """A model with newly initialised weights; `values` are keys of its config.

    `build("transformer-xl", layers=4, width=128, heads=4, reading={"memory": 256})`

    The weights are drawn on the CPU and then moved, so a seed gives the same weights on every device. For text, a model
    of bytes can be passed to `score` and `generate` directly; otherwise use `TextModel(model, tokenizer)`.
    """
    return _build(family, values, reading, device)


def init(
    family: str,
    tokenizer: str | Path | Tokenizer = "bytes",
    *,
    reading: ReadingSettings | Reading | None = None,
    seed: int = 0,
    device: str | torch.device = "auto",
    **values: Any,
) -> TextModel:
    """An untrained model with a tokenizer; `values` are keys of its config.

    `init("transformer-xl", "words.txt", layers=4, width=128, heads=4).save("models/new")`

    `tokenizer` is "bytes", "characters", or a file with one word per line. The vocabulary is that of the tokenizer.
    """
    return create(family, values, tokenizer, reading=reading, seed=seed, device=device)


def create(
    family: str,
    values: Mapping[str, Any],
    tokenizer: str | Path | Tokenizer = "bytes",
    *,
    reading: ReadingSettings | Reading | None = None,
    seed: int = 0,
    device: str | torch.device = "auto",
) -> TextModel:
    """`init` with the keys of the config as a mapping."""
    size = values.get("vocabulary")
    if not isinstance(tokenizer, Tokenizer):
        tokenizer = tokenizer_for(str(tokenizer), size if isinstance(size, int) else None)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(config.convert(int, seed, "seed") % 2**63)
        model = _build(family, {"vocabulary": tokenizer.size, **values}, reading, device)
    if model.spelled:
        model.spell([tokenizer.decode_bytes([token]) for token in range(tokenizer.size)])
    return TextModel(model, tokenizer)


def _build(
    family: str,
    values: Mapping[str, Any],
    reading: ReadingSettings | Reading | None,
    device: str | torch.device,
) -> LanguageModel:
    where, family = find_device(device), config.convert(str, family, "family")
    require_model_keys(family, values)
    if reading is not None and not isinstance(reading, Reading):
        if not isinstance(reading, Mapping):
            raise ConfigError(f"reading={config.shown(reading)} must be a Reading or a dict of its settings")
        reading = override(family, families.family(family).reading, reading)
    return families.build(family, values, reading).to(where)


def import_model(
    source: str | Path,
    tokenizer: str | Path | Tokenizer | None = None,
    *,
    config: str | Path | None = None,
    device: str | torch.device = "auto",
) -> TextModel:
    """A Transformer-XL saved by `transformers` 4.x or by the authors' code, or a GPT, GPT-2, BERT or XLNet saved by
    `transformers` as safetensors. Pickles are not executed.

    `import_model("transfo-xl-wt103", "transfo-xl-wt103/vocab.pkl").save("models/wt103")`

    `source` is a folder of `transformers`, or a state dict of the authors' code, whose arguments are in the JSON file
    `config`. `tokenizer` is "bytes", "characters", a file with one word per line, or a `vocab.pkl` of `transformers`.
    GPT, BERT and XLNet have the tokenizer.json of their folder; `tokenizer` may be another one, or its folder.
    """
    where = find_device(device)
    if kind_of(Path(source)) in KINDS:
        given = tokenizer if tokenizer is None or isinstance(tokenizer, Tokenizer) else read_tokenizer(Path(tokenizer))
        return TextModel(*import_huggingface(Path(source), given)).to(where)
    if tokenizer is None:
        raise ConfigError("the tokenizer is missing; use bytes, characters, a VOCAB.txt or a vocab.pkl")
    model = import_transfo_xl(Path(source), config_path=None if config is None else Path(config))
    size = model.config.vocabulary
    found = tokenizer if isinstance(tokenizer, Tokenizer) else tokenizer_for(str(tokenizer), size)
    if found.size != size:
        raise ConfigError(
            f"the tokenizer ({found.kind}) has {counted(found.size, 'token')}, but {source} has {size}; use "
            "the vocabulary that the model was trained with: the vocab.pkl of transformers or a VOCAB.txt"
        )
    return TextModel(model.to(where), found)


@overload
def score(  # type: ignore[overload-overlap]  # a str is a Sequence[str]; the first overload wins
    text: Text,
    model: TextModel | LanguageModel | str | Path | None = None,
    *,
    method: Method | None = None,
    streams: int = 1,
    dynamics: Dynamics | None = None,
    device: str | torch.device = "auto",
    **settings: Unpack[ReadingSettings],
) -> Score: ...
@overload
def score(
    text: Sequence[Text],
    model: TextModel | LanguageModel | str | Path | None = None,
    *,
    method: Method | None = None,
    streams: int = 1,
    dynamics: Dynamics | None = None,
    device: str | torch.device = "auto",
    **settings: Unpack[ReadingSettings],
) -> list[Score]: ...
def score(
    text: Text | Sequence[Text],
    model: TextModel | LanguageModel | str | Path | None = None,
    *,
    method: Method | None = None,
    streams: int = 1,
    dynamics: Dynamics | None = None,
    device: str | torch.device = "auto",
    **settings: Unpack[ReadingSettings],
) -> Score | list[Score]:
    """The score of a text, or a list of scores for a list of texts. Default model: the bundled one.

    The arguments are those of `TextModel.score`: `score("some text", "runs/tiny", streams=8, memory=3800)`. A path is
    loaded on `device`; a given model stays where it is.
    """
    with _opened(model, device) as opened:
        return opened.score(text, method=method, streams=streams, dynamics=dynamics, **settings)


@overload
def generate(  # type: ignore[overload-overlap]  # a str is a Sequence[str]; the first overload wins
    prompt: Text = "",
    max_new_tokens: int = 200,
    model: TextModel | LanguageModel | str | Path | None = None,
    *,
    device: str | torch.device = "auto",
    **options: Unpack[GenerationOptions],
) -> str: ...
@overload
def generate(
    prompt: Sequence[Text],
    max_new_tokens: int = 200,
    model: TextModel | LanguageModel | str | Path | None = None,
    *,
    device: str | torch.device = "auto",
    **options: Unpack[GenerationOptions],
) -> list[str]: ...
def generate(
    prompt: Text | Sequence[Text] = "",
    max_new_tokens: int = 200,
    model: TextModel | LanguageModel | str | Path | None = None,
    *,
    device: str | torch.device = "auto",
    **options: Unpack[GenerationOptions],
) -> str | list[str]:
    """The text that follows a prompt, or a list of texts for a list of prompts. Default model: the bundled one.

    `options` are those of `TextModel.generate`: temperature, top_k, top_p, min_p, penalties, seed, stop and reading
    settings. A path is loaded on `device`; a given model stays where it is.
    """
    with _opened(model, device) as opened:
        return opened.generate(prompt, max_new_tokens, **options)


def train(
    recipe: str | Path,
    out: str | Path,
    *,
    data: str | Path | None = None,
    overrides: Mapping[str, Any] | Sequence[str] = (),
    resume: str | Path | None = None,
    seed: int | None = None,
    init_from: str | Path | None = None,
    device: str | torch.device = "auto",
) -> TextModel:
    """Train a recipe on a text, write the run to the folder `out`, and load the resulting model.

    `train("tiny", "runs/tiny", data="my.txt", overrides={"training.steps": 100})`

    `init_from` is a model to train further: its weights, config and tokenizer are used.
    `overrides` are keys of the recipe with their values, or strings as in `--set`. After Ctrl-C or SIGTERM the run
    saves a checkpoint and this raises KeyboardInterrupt; `resume="auto"` continues the run.
    """
    if isinstance(overrides, Mapping):
        overrides = [_assignment(key, value) for key, value in overrides.items()]
    chosen = run.resolve(
        recipe,
        overrides,
        data=None if data is None else str(data),
        out=Path(out),
        resume=None if resume is None else str(resume),
        seed=seed,
        init_from=None if init_from is None else Path(init_from),
    )
    outcome = run.train(chosen, Path(out), resume=None if resume is None else str(resume), device=find_device(device))
    if outcome.interrupted is not None:
        raise KeyboardInterrupt(outcome.sentence)
    return load(outcome.out, device=device)


def _assignment(key: str, value: Any) -> str:
    """`key=value` as in `--set`."""
    if not isinstance(value, bool | int | float | str | Path | list | tuple):
        raise ConfigError(f"overrides[{key!r}]={value!r:.80} must be a number, a string, a bool or a list")
    return f"{key}={config.show(str(value) if isinstance(value, Path) else value)}"


@contextmanager
def _opened(model: TextModel | LanguageModel | str | Path | None, device: str | torch.device) -> Iterator[TextModel]:
    """A model with a tokenizer. A LanguageModel has none, so it must be one of bytes; it keeps its training mode."""
    if isinstance(model, TextModel):
        yield model
    elif isinstance(model, LanguageModel):
        tokenizer, training = ByteTokenizer(), model.training
        if model.config.vocabulary != tokenizer.size:
            raise ConfigError(
                f"a model without a tokenizer reads bytes and needs a vocabulary of {tokenizer.size}, but this one "
                f"has {model.config.vocabulary}; use longspan.TextModel(model, tokenizer)"
            )
        try:
            yield TextModel(model, tokenizer)
        finally:
            model.train(training)
    else:
        yield load(model, device=device)
