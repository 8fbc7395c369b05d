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
from longspan.transfer.formats import Format
from longspan.transfer.heads import Pool
from longspan.transfer.model import TaskModel

Pooling = Literal["last", "mean", "concat", "none"]
SUFFIXES = (".npy", ".safetensors")


def embed(
    model: TextModel, texts: Sequence[str], layer: str = "last", pooling: str = "mean"
) -> list[NDArray[np.float32]]:
    """A vector per text, or with pooling "none" an array [tokens, width] per text.

    `layer` is a number (0: the embedding, -1: the last layer), or one of `transfer.features`: last, second-to-last,
    sum, sum-last-four, concat-last-four, or mix with the weights that a fine-tuned model has learned. Features with a
    name are normalised if the model was trained with model.normalised=true; a number gives a layer as it is. A text of
    any length is read through the model's memory, or in windows; a run with model.reverse=true reads it from its end.
    Bidirectional models read it between their special tokens, such as [CLS] and [SEP], whose own features are left out.
    """
    if pooling not in ("last", "mean", "concat", "none"):
        raise ConfigError(f"pooling={pooling!r:.40} must be last, mean, concat or none")
    return [_embed(model, text, layer, pooling) for text in texts]


def _embed(model: TextModel, text: str, layer: str, pooling: str) -> NDArray[np.float32]:
    ids = model.tokenizer.encode_prompt(text)
    if not len(ids):
        raise DataError("a text has 0 tokens; features need at least 1, so remove empty texts")
    language_model = model.model
    reverse = isinstance(language_model, TaskModel) and language_model.config.reverse
    ids = ids[::-1] if reverse else ids
    tokens = torch.from_numpy(ids.astype(np.int64)).to(model.device)[None]
    before, after = _ends(model)
    segment, around = language_model.reading.segment, before.shape[1] + after.shape[1]
    window = tokens.shape[1] if language_model.has_memory() else max(1, segment - around)
    found = []
    with torch.inference_mode():
        for part in tokens.split(window, dim=1):
            state, pieces = language_model.initial_state(1, trainable=False), []
            for piece in torch.cat([before, part, after], dim=1).split(segment, dim=1):
                hidden, state = language_model.encode(piece, state)
                pieces.append(_choose(language_model, hidden, layer).float())
            found.append(torch.cat(pieces, dim=1)[:, before.shape[1] :][:, : part.shape[1]])
        features = torch.cat(found, dim=1)
        if pooling != "none":
            pool = Pool.empty(1, features.shape[-1], features)
            features = pool.add(features, torch.ones_like(tokens, dtype=torch.bool), first=False).vector(pooling)
        elif reverse:
            features = features.flip(1)
    return features[0].cpu().numpy()


def _ends(model: TextModel) -> tuple[torch.Tensor, torch.Tensor]:
    """The special tokens around a text, [1, N]. A causal model reads a text as in training, without any."""
    before = after = np.empty(0, np.int64)
    if not model.model.causal:
        before, after = Format(model.tokenizer, "single", [], model.model).ends()
    return torch.from_numpy(before).to(model.device)[None], torch.from_numpy(after).to(model.device)[None]


def _choose(model: LanguageModel, hidden: tuple[torch.Tensor, ...], layer: str) -> torch.Tensor:
    if layer == "mix":
        if not isinstance(model, TaskModel) or model.mix is None:
            raise ConfigError("layer='mix' needs the weights of a run with finetune --set model.features=mix")
        return model.features_of(hidden, layer)
    try:
        number = int(layer)
    except ValueError:
        return model.features_of(hidden, layer) if isinstance(model, TaskModel) else combine(hidden, layer)
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
