"""Features of texts: hidden states of any layer, pooled over the text or one vector per token."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import save

from longspan.contract import LanguageModel
from longspan.data.cache import write_atomic
from longspan.errors import ConfigError, DataError
from longspan.text_model import TextModel
from longspan.transfer.features import combine
from longspan.transfer.heads import Pool
from longspan.transfer.model import TaskModel

Pooling = Literal["last", "mean", "concat", "none"]
SUFFIXES = (".npy", ".safetensors")


def embed(
    model: TextModel, texts: Sequence[str], layer: str = "last", pooling: str = "mean"
) -> list[NDArray[np.float32]]:
    """A vector per text, or with pooling "none" an array [tokens, width] per text.

    `layer` is a number (0: the embedding, -1: the last layer), or one of `transfer.features`: last, second-to-last,
    sum, sum-last-four, concat-last-four, or mix with the weights that a fine-tuned model has learned. A text of any
    length is read through the model's memory.
    """
    if pooling not in ("last", "mean", "concat", "none"):
        raise ConfigError(f"pooling={pooling!r:.40} must be last, mean, concat or none")
    return [_embed(model, text, layer, pooling) for text in texts]


def _embed(model: TextModel, text: str, layer: str, pooling: str) -> NDArray[np.float32]:
    ids = model.tokenizer.encode_prompt(text)
    if not len(ids):
        raise DataError("a text has 0 tokens; features need at least 1, so remove empty texts")
    language_model = model.model
    tokens = torch.from_numpy(ids.astype(np.int64)).to(model.device)[None]
    pieces = []
    with torch.inference_mode():
        state = language_model.initial_state(1, trainable=False)
        for part in tokens.split(state.reading.segment, dim=1):
            hidden, state = language_model.encode(part, state)
            pieces.append(_choose(language_model, hidden, layer).float())
        found = torch.cat(pieces, dim=1)
        if pooling != "none":
            pool = Pool.empty(1, found.shape[-1], found)
            found = pool.add(found, torch.ones_like(tokens, dtype=torch.bool), first=False).vector(pooling)
    return found[0].cpu().numpy()


def _choose(model: LanguageModel, hidden: tuple[torch.Tensor, ...], layer: str) -> torch.Tensor:
    if layer == "mix":
        if not isinstance(model, TaskModel) or model.mix is None:
            raise ConfigError("layer='mix' needs the weights of a run with finetune --set model.features=mix")
        return model.mix(hidden)
    try:
        number = int(layer)
    except ValueError:
        return combine(hidden, layer)
    if not -len(hidden) <= number < len(hidden):
        raise ConfigError(f"layer={layer} does not exist; this model has layers 0 (the embedding) to {len(hidden) - 1}")
    return hidden[number]


def check_suffix(path: Path) -> None:
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"{path} must end in {' or '.join(SUFFIXES)}")


def save_features(path: Path, features: Sequence[NDArray[np.float32]]) -> None:
    """Write features as .npy, or as .safetensors. With one vector per token, a .safetensors file has an array per text,
    named by its number, because their lengths differ."""
    pooled = all(one.ndim == 1 for one in features)
    check_suffix(path)
    if not pooled and path.suffix == ".npy" and len({one.shape for one in features}) > 1:
        raise ConfigError(f"{path} cannot store texts of different lengths; use .safetensors, or pool the tokens")
    if path.suffix == ".npy":
        array = np.stack(features)
        write_atomic(path, lambda file: np.save(file, array))
    else:
        named = {"features": np.stack(features)} if pooled else {str(k): one for k, one in enumerate(features)}
        write_atomic(path, lambda file: file.write(save(named)))
