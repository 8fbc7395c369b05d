"""The functions of the public API, `import longspan`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack, overload

import torch

from longspan import config
from longspan.checkpoints.model_folder import override, require_model_keys
from longspan.contract import LanguageModel
from longspan.device import find_device
from longspan.errors import ConfigError
from longspan.models import families
from longspan.reading import Reading, ReadingSettings
from longspan.scoring.dynamic import Dynamics
from longspan.scoring.score import Method, Score
from longspan.text_model import GenerationOptions, Text, TextModel, load
from longspan.tokenizers import ByteTokenizer
from longspan.training import run

__all__ = ["build", "generate", "load", "score", "train"]


def build(
    family: str,
    *,
    reading: ReadingSettings | Reading | None = None,
    device: str | torch.device = "cpu",
    **values: Any,
) -> LanguageModel:
    """A model with newly initialised weights; `values` are keys of its config.

    `build("transformer-xl", layers=4, width=128, heads=4, reading={"memory": 256}, device="auto")`

    The weights are drawn on the CPU and then moved, so a seed gives the same weights on every device. For text, a model
    of bytes can be passed to `score` and `generate` directly; otherwise use `TextModel(model, tokenizer)`.
    """
    where = find_device(device)
    require_model_keys(family, values)
    if reading is not None and not isinstance(reading, Reading):
        reading = override(family, families.family(family).reading, reading)
    return families.build(family, values, reading).to(where)


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
    loaded = _loaded(model, device)
    return loaded.score(text, method=method, streams=streams, dynamics=dynamics, **settings)


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

    `options` are those of `TextModel.generate`: temperature, top_k, top_p, min_p, seed and reading settings. A
    path is loaded on `device`; a given model stays where it is.
    """
    return _loaded(model, device).generate(prompt, max_new_tokens, **options)


def train(
    recipe: str | Path,
    out: str | Path,
    *,
    data: str | Path | None = None,
    overrides: Mapping[str, Any] | Sequence[str] = (),
    resume: str | Path | None = None,
    seed: int | None = None,
    device: str | torch.device = "auto",
) -> TextModel:
    """Train a recipe on a text, write the run to the folder `out`, and load the resulting model.

    `train("tiny", "runs/tiny", data="my.txt", overrides={"training.steps": 100})`

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


def _loaded(model: TextModel | LanguageModel | str | Path | None, device: str | torch.device) -> TextModel:
    """A model with a tokenizer. A LanguageModel has none, so it must be one of bytes."""
    if isinstance(model, TextModel):
        return model
    if not isinstance(model, LanguageModel):
        return load(model, device=device)
    tokenizer = ByteTokenizer()
    if model.config.vocabulary != tokenizer.size:
        raise ConfigError(
            f"a model without a tokenizer must have the {tokenizer.size} tokens of bytes, and this one has "
            f"{model.config.vocabulary}; use longspan.TextModel(model, tokenizer)"
        )
    return TextModel(model, tokenizer)
