"""One decoding step as an ONNX graph, with the state as inputs and outputs, and a runner for onnxruntime.

    logits, state... = step(tokens, state...)        # tokens [B, 1], logits [B, V]

Caches have their final size from the first step on, so all shapes are static. An empty state is all zeros.
"""

import importlib
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from longspan.bundled import model_path
from longspan.checkpoints.model_folder import find_model, open_model
from longspan.checkpoints.store import write_file
from longspan.contract import LanguageModel
from longspan.errors import CheckpointError, ConfigError, LongspanError
from longspan.kernels.relative_attention import forced
from longspan.models.families import name_of
from longspan.shapes import Tensor
from longspan.tokenizers import Tokenizer, tokenizer_from_dict

GRAPH, TOKENIZER = "step.onnx", "tokenizer.json"
_OPSET = 18
_TOLERANCE = 1e-4
"""Largest difference of a logit, relative to the largest logit."""


class Step(nn.Module):
    """`model` for one token per row, with the tensors of the state as arguments."""

    def __init__(self, model: LanguageModel, batch: int) -> None:
        super().__init__()
        self.model = model.eval()
        state = model.initial_state(batch, trainable=False, filled=True)
        with torch.no_grad():
            # The state after a step has the position keys, which follow from the weights: constants of the graph.
            _, after = model.hidden_states(torch.zeros(batch, 1, dtype=torch.int64), state)
        self.empty = replace(state.map(lambda tensor: tensor.contiguous().clone()), full=False, shared=after.shared)
        self.names = list(self.empty.tensors())

    def forward(self, tokens: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        given = iter([*tensors[1:], tensors[0]])  # `State.map` visits the length last
        logits, after = self.model(tokens, self.empty.map(lambda _: next(given)))
        return logits[:, -1], *after.tensors().values()


class PlainOperators(TorchFunctionMode):
    """Replaces operators that the exporter does not know by their definition."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.rms_norm:
            return _rms_norm(*args, **(kwargs or {}))
        if func is torch.logaddexp:
            a, b = args
            return torch.maximum(a, b) + (-(a - b).abs()).exp().log1p()
        return func(*args, **(kwargs or {}))


def _rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    axes = tuple(range(-len(shape), 0))
    size = x.square().mean(axes, keepdim=True) + (torch.finfo(x.dtype).eps if eps is None else eps)
    return x * size.rsqrt() if weight is None else x * size.rsqrt() * weight


@dataclass(frozen=True)
class OnnxExport:
    """What was written, and the folder it came from."""

    source: Path
    parameters: int
    inputs: dict[str, list[int]]


def export_onnx(
    model: str | Path | None, out: str | Path, *, batch: int = 1, reading: Mapping[str, Any] | None = None
) -> OnnxExport:
    """Write a folder with one decoding step in float32 (step.onnx) and the tokenizer."""
    out = Path(out)
    require("onnx", "onnxruntime")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists and is not empty; choose a new folder")
    found = find_model(model_path(model))
    loaded = open_model(found, overrides=reading, dtype=torch.float32)
    try:
        out.mkdir(parents=True, exist_ok=True)
        step = write_step(loaded.model, out / GRAPH, batch=batch)
        content = json.dumps(loaded.tokenizer.to_dict(), ensure_ascii=False).encode()
        write_file(out / TOKENIZER, content)
    except OSError as error:
        raise LongspanError(f"{out} cannot be written: {error.strerror or error}") from None
    shapes = {name: list(tensor.shape) for name, tensor in step.empty.tensors().items()}
    return OnnxExport(found.path, loaded.model.parameter_count, {"tokens": [batch, 1], **shapes})


def write_step(model: LanguageModel, path: Path, *, batch: int = 1) -> Step:
    """Write the step of a model to a file."""
    if not model.has_memory():
        raise ConfigError(
            f"{name_of(model)} has no memory and reads its window again at every step; export it with --to hf instead"
        )
    # In eval mode as a whole, because the exporter sets all parts to the mode of the outer module.
    step = Step(model, batch).eval()
    try:
        _trace(step, path, batch)
        _check(step, path, batch)
    except (torch.onnx.errors.OnnxExporterError, RuntimeError) as error:
        path.unlink(missing_ok=True)
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"{name_of(model)} cannot be exported to ONNX: {reason}; export it with --to hf") from None
    return step


def _trace(step: Step, path: Path, batch: int) -> None:
    tensors = list(step.empty.tensors().values())
    with warnings.catch_warnings(), torch.no_grad(), PlainOperators(), forced("reference"):
        warnings.simplefilter("ignore")  # shapes are constants of the graph on purpose
        torch.onnx.export(
            step,
            (torch.zeros(batch, 1, dtype=torch.int64), *tensors),
            str(path),
            input_names=["tokens", *step.names],
            output_names=["logits", *(f"next.{name}" for name in step.names)],
            opset_version=_OPSET,
            dynamo=False,
        )


def _check(step: Step, path: Path, batch: int) -> None:
    """A few steps of the graph equal those of the model: the exporter loses some operations without an error."""
    session = require("onnxruntime").InferenceSession(str(path), providers=["CPUExecutionProvider"])
    used = {each.name for each in session.get_inputs()}
    state = list(step.empty.tensors().values())
    for number in range(4):
        tokens = torch.full((batch, 1), (7 * number + 1) % step.model.config.vocabulary)
        feed = {"tokens": tokens, **dict(zip(step.names, state, strict=True))}
        found = session.run(["logits"], {name: tensor.numpy() for name, tensor in feed.items() if name in used})[0]
        with torch.no_grad():
            logits, *state = step(tokens, *state)
        worst = float((logits - torch.from_numpy(found)).abs().max())
        if not worst <= _TOLERANCE * max(1.0, float(logits.abs().max())):
            raise RuntimeError(f"logits of the graph differ by {worst:.2g} after {number + 1} steps")


class OnnxModel:
    """A folder made by `export_onnx`, run with onnxruntime."""

    def __init__(self, folder: str | Path, *, threads: int = 0) -> None:
        """`threads` are those of a step; 0 leaves the choice to onnxruntime."""
        runtime = require("onnxruntime")
        folder = Path(folder)
        if not (folder / GRAPH).is_file():
            raise CheckpointError(f"{folder} has no {GRAPH}; make it with: longspan export MODEL --to onnx --out DIR")
        options = runtime.SessionOptions()
        options.intra_op_num_threads = threads
        self.session = runtime.InferenceSession(str(folder / GRAPH), options, providers=["CPUExecutionProvider"])
        self.tokenizer: Tokenizer = tokenizer_from_dict(json.loads((folder / TOKENIZER).read_bytes()))
        tokens, *self.inputs = self.session.get_inputs()
        self.batch = int(tokens.shape[0])

    def initial_state(self) -> list[NDArray[Any]]:
        kinds = {"tensor(int64)": np.int64, "tensor(float)": np.float32}
        return [np.zeros(each.shape, kinds[each.type]) for each in self.inputs]

    def step(self, tokens: Sequence[int], state: Sequence[NDArray[Any]]) -> tuple[NDArray[Any], list[NDArray[Any]]]:
        """Logits [B, V] after one token per row, and the state after it."""
        feed = {each.name: value for each, value in zip(self.inputs, state, strict=True)}
        logits, *state = self.session.run(None, {"tokens": np.array(tokens, np.int64)[:, None], **feed})
        return logits, list(state)

    def tokens(self, prompt: str | bytes) -> Iterator[int]:
        """The tokens that follow a prompt, greedily and without end."""
        if self.batch != 1:
            raise ConfigError(f"this graph has a batch of {self.batch}; export one with batch=1 to generate")
        ids = self.tokenizer.encode_prompt(prompt).tolist()
        if not ids:
            raise ConfigError("the prompt is empty; pass at least one token")
        state = self.initial_state()
        for token in ids:
            logits, state = self.step([token], state)
        while True:
            token = int(logits[0, : self.tokenizer.size].argmax())
            yield token
            logits, state = self.step([token], state)

    def generate(self, prompt: str | bytes, max_new_tokens: int = 200) -> str:
        """The text that follows a prompt, greedily."""
        return self.tokenizer.decode(list(islice(self.tokens(prompt), max_new_tokens)))


def require(*names: str) -> Any:
    """The first of some packages, if all are installed."""
    try:
        first, *_ = [importlib.import_module(name) for name in names]
    except ImportError as error:
        raise ConfigError(
            f"ONNX needs the package {error.name}; install it with: pip install 'longspan[onnx]'"
        ) from None
    return first
