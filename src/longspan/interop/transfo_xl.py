"""Imports Transformer-XL weights of other implementations.

Two forms are supported: a folder of TransfoXL as `transformers` 4.x saves it (config.json, and model.safetensors or
pytorch_model.bin), and a state dict of the authors' PyTorch code with a JSON file of its arguments. Both use the same
names for tensors, except for a prefix and for u and w, which `transformers` may have per layer. One thing differs: the
authors index the clusters of the adaptive softmax from the end (`head_logprob[:, -i]`), so those rows are reversed.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from longspan import config
from longspan.checkpoints.manifest import read_json, reason
from longspan.checkpoints.weights import fill, meta_weights, parse_weights
from longspan.errors import CheckpointError, ConfigError
from longspan.interop.pickles import MAX_ALIASES, read_state_dict
from longspan.models.transformer_xl import TransformerXL, TransformerXLConfig
from longspan.reading import Reading
from longspan.shapes import Tensor

# From the authors' train.py, by data set: cutoffs, and whether the projections of the rarer clusters are tied.
DATASET_CLUSTERS = {"wt103": ((20000, 40000, 200000), True), "lm1b": ((60000, 100000, 640000), False)}
ALIASES = {"n_token": "vocab_size", "hidden_size": "d_model", "num_attention_heads": "n_head"}
ALIASES |= {"num_hidden_layers": "n_layer"}
LAYER = {
    "output.weight": "dec_attn.o_net.weight",
    "position.weight": "dec_attn.r_net.weight",
    "attention_norm.weight": "dec_attn.layer_norm.weight",
    "attention_norm.bias": "dec_attn.layer_norm.bias",
    "up.weight": "pos_ff.CoreNet.0.weight",
    "up.bias": "pos_ff.CoreNet.0.bias",
    "down.weight": "pos_ff.CoreNet.3.weight",
    "down.bias": "pos_ff.CoreNet.3.bias",
    "feed_forward_norm.weight": "pos_ff.layer_norm.weight",
    "feed_forward_norm.bias": "pos_ff.layer_norm.bias",
}
BIASES = {"u": "r_w_bias", "w": "r_r_bias"}


def import_transfo_xl(source: Path, config_path: Path | None = None) -> TransformerXL:
    """The model in `source`, a folder or a file of weights."""
    source = Path(source)
    where, weights = _read_weights(source)
    values = _read_values(config_path or (source / "config.json" if source.is_dir() else None), source)
    found = SourceTensors(str(where), weights)
    model_config = _config(values, found)
    tensors = _convert(model_config, found)
    found.require_used()
    found.require_enough(sum(tensor.numel() for tensor in meta_weights(lambda: TransformerXL(model_config)).values()))
    model = TransformerXL(model_config)
    model.reading = _reading(values, found)
    fill(model, tensors, str(where))
    return model.eval()


@dataclass
class SourceTensors:
    """The tensors of another implementation under the authors' names. `take` returns one in float32 and marks it as
    used."""

    where: str
    tensors: dict[str, Tensor]
    authors: bool = False
    used: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        bare = {name.removeprefix("module."): tensor for name, tensor in self.tensors.items()}
        self.authors = not any(name.startswith("transformer.") for name in bare)
        self.tensors = {name.removeprefix("transformer."): tensor for name, tensor in bare.items()}
        # A constant that both implementations compute when a model is built.
        self.tensors.pop("pos_emb.inv_freq", None)

    def take(self, name: str, *shape: int) -> Tensor:
        if name not in self.tensors:
            raise CheckpointError(f"{self.where} has no {name!r}; is it a complete Transformer-XL language model?")
        tensor = self.tensors[name]
        if tuple(tensor.shape) != shape or not tensor.is_floating_point():
            found = f"{tensor.dtype} {list(tensor.shape)}"
            raise CheckpointError(
                f"{self.where} has {name!r} as {found}, but its config needs floats of shape {list(shape)}"
            )
        self.used.add(name)
        return tensor.float()

    def same(self, name: str, other: str) -> bool:
        """Whether `name` is absent, or equal to the tensor it is tied to."""
        if name not in self.tensors:
            return True
        mine, tied = self.tensors[name], self.tensors.get(other)
        return tied is not None and mine.shape == tied.shape and torch.equal(mine, tied)

    def take_tied(self, name: str, other: str) -> None:
        if not self.same(name, other):
            raise CheckpointError(f"{self.where} has {name!r} and {other!r}, tied by its config but not equal")
        self.used.add(name)

    def require_used(self) -> None:
        if unused := sorted(set(self.tensors) - self.used):
            raise CheckpointError(f"{self.where} has {unused[0]!r:.80}, which is not part of such a Transformer-XL")

    def require_enough(self, needed: int) -> None:
        """A tensor that is tied in the file but not in our model is copied. The number of copies is limited, so that a
        small file cannot ask for any amount of memory."""
        held = sum(tensor.numel() for tensor in self.tensors.values())
        if needed > MAX_ALIASES * held:
            raise CheckpointError(
                f"{self.where} has {held} parameters, but its settings need {needed}; the files are from different "
                "models; use a matching pair"
            )


def _read_weights(source: Path) -> tuple[Path, dict[str, Tensor]]:
    if not source.exists():
        raise CheckpointError(f"there is no {source}; use a folder saved by transformers, or a file of weights")
    names = ("model.safetensors", "pytorch_model.bin")
    where = next((source / name for name in names if (source / name).is_file()), None) if source.is_dir() else source
    if where is None:
        raise CheckpointError(f"{source} has neither {names[0]} nor {names[1]}; use a folder saved by transformers")
    if where.suffix == ".safetensors":
        return where, parse_weights(_read_bytes(where), str(where))
    return where, read_state_dict(where)


def _read_values(path: Path | None, source: Path) -> dict[str, Any]:
    if path is None:
        raise CheckpointError(
            f"{source} is a file of weights without settings; pass its settings with --config FILE.json "
            "(config= in Python)"
        )
    values = read_json(_read_bytes(path), str(path))
    if values.get("model_type", "transfo-xl") != "transfo-xl":
        raise CheckpointError(f"{path} has model_type {values['model_type']!r:.40}; only 'transfo-xl' is supported")
    return {ALIASES.get(key, key): value for key, value in values.items()}


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"there is no file {path}; check the name") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {reason(error)}") from None


def _config(values: Mapping[str, Any], found: SourceTensors) -> TransformerXLConfig:
    """Our config for the settings of the other implementation. Settings that we do not support are errors."""
    for key, supported in (("attn_type", 0), ("layer_norm_epsilon", 1e-5), ("ext_len", 0)):
        if values.get(key, supported) != supported:
            raise CheckpointError(f"{found.where} has {key}={values[key]!r:.40}; only {supported} is supported")
    needed = ("d_model", "n_head", "d_head", "d_inner", "n_layer")
    if missing := [key for key in needed if key not in values]:
        raise CheckpointError(f"the settings of {found.where} have no {missing[0]!r}; they need {', '.join(needed)}")
    layers = {int(name[1]) for key in found.tensors if (name := re.match(r"layers\.([0-9]{1,6})\.", key))}
    if layers != set(range(len(layers))) or values["n_layer"] != len(layers):
        counts = f"{len(layers)} layers, its settings say n_layer={values['n_layer']!r:.40}"
        raise CheckpointError(f"{found.where} has {counts}; the files are from different models; use a matching pair")
    cutoffs, tie_projections = _clusters(values, found)
    settings = {
        "vocabulary": values.get("vocab_size", _vocabulary(found)),
        "layers": values["n_layer"],
        "width": values["d_model"],
        "heads": values["n_head"],
        "head_width": values["d_head"],
        "inner": values["d_inner"],
        "embedding_width": _positive(values.get("d_embed"), values["d_model"]),
        "norm": "pre" if values.get("pre_lnorm") else "post",
        "dropout": values.get("dropout", 0.0),
        "attention_dropout": values.get("dropatt", 0.0),
        "shared_biases": "r_w_bias" in found.tensors or not values.get("untie_r", True),
        "cutoffs": cutoffs,
        "div_val": values.get("div_val", 1),
        "tie_embedding": bool(values.get("tie_word_embeddings", values.get("tied", not values.get("not_tied", False)))),
        "tie_projections": tie_projections,
    }
    try:
        return config.build(TransformerXLConfig, settings, "model")
    except ConfigError as error:
        raise CheckpointError(f"the settings of {found.where} are not valid: {error}") from None


def _reading(values: Mapping[str, Any], found: SourceTensors) -> Reading:
    """The reading of the other implementation: its segment, memory, clamp and same_length."""
    settings = {
        "memory": values.get("mem_len", 0),
        "clamp": _positive(values.get("clamp_len"), 0),
        "same_length": values.get("same_length", False) and values.get("mem_len", 0) > 0,
    }
    settings |= {"segment": values["tgt_len"]} if _positive(values.get("tgt_len"), 0) else {}
    try:
        return config.build(Reading, settings, "reading")
    except ConfigError as error:
        raise CheckpointError(f"the settings of {found.where} are not valid: {error}") from None


def _clusters(values: Mapping[str, Any], found: SourceTensors) -> tuple[list[Any], bool]:
    """Cutoffs, and whether the projections of the rarer clusters are tied: from the settings, or by data set.

    Our model ties all of them except the first, or none. For any other combination each cluster gets a copy, which
    computes the same.
    """
    if "cutoffs" in values or not values.get("adaptive", False):
        cutoffs, tied = values.get("cutoffs", []), values.get("tie_projs", False)
    elif (known := DATASET_CLUSTERS.get(str(values.get("dataset")))) is not None:
        cutoffs, tied = list(known[0]), known[1]
    else:
        raise CheckpointError(f"the settings of {found.where} have 'adaptive' but no 'cutoffs'; add them as a list")
    if not isinstance(cutoffs, list):
        raise CheckpointError(f"the settings of {found.where} have cutoffs={cutoffs!r:.40}; use a list")
    if isinstance(tied, list):
        tied = tied[1 : 1 + len(cutoffs)] == [True] * len(cutoffs) and not (tied and tied[0])
    return cutoffs, bool(cutoffs) and bool(tied)


def _convert(model_config: TransformerXLConfig, found: SourceTensors) -> dict[str, Tensor]:
    width, inner, heads_width = model_config.width, model_config.inner_size, model_config.heads * model_config.head_size
    shapes = {
        "dec_attn.o_net.weight": (width, heads_width),
        "dec_attn.r_net.weight": (heads_width, width),
        "pos_ff.CoreNet.0.weight": (inner, width),
        "pos_ff.CoreNet.0.bias": (inner,),
        "pos_ff.CoreNet.3.weight": (width, inner),
    }
    tensors: dict[str, Tensor] = {}
    for n in range(model_config.layers):
        for ours, theirs in LAYER.items():
            tensors[f"layers.{n}.{ours}"] = found.take(f"layers.{n}.{theirs}", *shapes.get(theirs, (width,)))
        fused = found.take(f"layers.{n}.dec_attn.qkv_net.weight", 3 * heads_width, width)
        for part, weight in zip(("query", "key", "value"), fused.chunk(3), strict=True):
            tensors[f"layers.{n}.{part}.weight"] = weight
    return tensors | _convert_biases(model_config, found) | _convert_tokens(model_config, found)


def _convert_biases(model_config: TransformerXLConfig, found: SourceTensors) -> dict[str, Tensor]:
    """u and w: one pair, which `transformers` also lists under every layer, or one pair per layer."""
    shape = (model_config.heads, model_config.head_size)
    tensors: dict[str, Tensor] = {}
    for ours, theirs in BIASES.items():
        names = [f"layers.{n}.dec_attn.{theirs}" for n in range(model_config.layers)]
        if model_config.shared_biases:
            first = theirs if theirs in found.tensors else names[0]
            tensors[ours] = found.take(first, *shape)
            for name in names:
                found.take_tied(name, first)
        else:
            tensors |= {f"layers.{n}.{ours}": found.take(name, *shape) for n, name in enumerate(names)}
    return tensors


def _convert_tokens(model_config: TransformerXLConfig, found: SourceTensors) -> dict[str, Tensor]:
    """Embedding and adaptive softmax. A tied tensor may be listed under both names and must then be equal."""
    tensors: dict[str, Tensor] = {}
    shapes = {name: tensor.shape for name, tensor in meta_weights(model_config.make_embedding).items()}
    tables = [shape for name, shape in shapes.items() if name.startswith("tables.")]
    projections = [shape for name, shape in shapes.items() if name.startswith("projections.")]
    for i, table in enumerate(tables):
        theirs = f"word_emb.emb_layers.{i}.weight"
        tensors[f"embedding.tables.{i}"] = found.take(theirs, *table)
        tensors[f"head.biases.{i}"] = found.take(f"crit.out_layers.{i}.bias", table[0])
        if model_config.tie_embedding:
            found.take_tied(f"crit.out_layers.{i}.weight", theirs)
        else:
            tensors[f"head.tables.{i}"] = found.take(f"crit.out_layers.{i}.weight", *table)
    for i, projection in enumerate(projections):
        tensors[f"embedding.projections.{i}"] = found.take(f"word_emb.emb_projs.{i}", *projection)
    if projections:
        for i in range(len(model_config.cutoffs) + 1):
            tensors |= _convert_projection(model_config, found, i, min(i, len(projections) - 1))
    if model_config.cutoffs:
        count, widest = len(model_config.cutoffs), tables[0][1]
        rows = {
            "weight": found.take("crit.cluster_weight", count, widest),
            "bias": found.take("crit.cluster_bias", count),
        }
        tensors |= {f"head.cluster_{kind}": row.flip(0) if found.authors else row for kind, row in rows.items()}
    return tensors


def _convert_projection(
    model_config: TransformerXLConfig, found: SourceTensors, cluster: int, source: int
) -> dict[str, Tensor]:
    ours, theirs, tied = f"head.projections.{cluster}", f"crit.out_projs.{cluster}", f"word_emb.emb_projs.{source}"
    if model_config.tie_projections and cluster > 0:
        found.take_tied(theirs, tied)
        return {}
    return {ours: found.take(theirs if theirs in found.tensors else tied, *found.tensors[tied].shape)}


def _vocabulary(found: SourceTensors) -> int:
    """The number of tokens, if the settings do not have it: the rows of the embedding."""
    tables = [
        tensor for name, tensor in found.tensors.items() if re.fullmatch(r"word_emb\.emb_layers\.\d+\.weight", name)
    ]
    return sum(table.shape[0] for table in tables if table.dim() == 2)


def _positive(value: Any, otherwise: Any) -> Any:
    """`value` if it is positive, else `otherwise`: the authors write -1 for a setting that is off."""
    return otherwise if value is None or (type(value) is int and value <= 0) else value
