"""Transformer-XL weights of other codes, carried into ours one to one.

Two forms are read: a folder as `transformers` 4.x saves its TransfoXL (config.json, and model.safetensors or
pytorch_model.bin), and a state dict of the authors' PyTorch code with a JSON of its arguments. They name tensors
alike, but for a prefix and for u and w, which the port may keep per layer. They differ in one number: the authors
count the clusters of the adaptive softmax from the other end (`head_logprob[:, -i]`), so those rows are turned round.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from longspan import config
from longspan.checkpoints.manifest import read_json, reason
from longspan.checkpoints.pickles import LISTED, read_state_dict
from longspan.checkpoints.weights import fill, parse_weights, sketch
from longspan.errors import CheckpointError, ConfigError
from longspan.models.transformer_xl import TransformerXL, TransformerXLConfig
from longspan.shapes import Tensor
from longspan.tokens import Tokenizer

# The authors' train.py: cutoffs, and whether the projections of the rarer clusters are tied, by data set.
AUTHORS_CLUSTERS = {"wt103": ((20000, 40000, 200000), True), "lm1b": ((60000, 100000, 640000), False)}
ALIASES = {"n_token": "vocab_size", "hidden_size": "d_model", "num_attention_heads": "n_head"}
ALIASES |= {"num_hidden_layers": "n_layer"}
LAYER = {
    "attention.output.weight": "dec_attn.o_net.weight",
    "distances.projection.weight": "dec_attn.r_net.weight",
    "attention_residual.norm.weight": "dec_attn.layer_norm.weight",
    "attention_residual.norm.bias": "dec_attn.layer_norm.bias",
    "feed_forward.up.weight": "pos_ff.CoreNet.0.weight",
    "feed_forward.up.bias": "pos_ff.CoreNet.0.bias",
    "feed_forward.down.weight": "pos_ff.CoreNet.3.weight",
    "feed_forward.down.bias": "pos_ff.CoreNet.3.bias",
    "feed_forward_residual.norm.weight": "pos_ff.layer_norm.weight",
    "feed_forward_residual.norm.bias": "pos_ff.layer_norm.bias",
}
BIASES = {"u": "r_w_bias", "w": "r_r_bias"}


def import_transfo_xl(source: Path, tokens: Tokenizer | None = None, config_path: Path | None = None) -> TransformerXL:
    """The model in `source`, a folder or a file of weights; `tokens` must have as many ids as it has."""
    source = Path(source)
    where, weights = _read_weights(source)
    values = _read_values(config_path or (source / "config.json" if source.is_dir() else None), source)
    found = Foreign(str(where), weights)
    made = _config(values, found)
    if tokens is not None and tokens.size != made.vocabulary:
        raise CheckpointError(
            f"{source} knows {made.vocabulary} tokens and these --tokens ({tokens.kind}) {tokens.size}; "
            "give the vocabulary it was trained with"
        )
    tensors = _carry(made, found)
    found.require_used()
    found.require_enough(sum(tensor.numel() for tensor in sketch(lambda: TransformerXL(made)).values()))
    model = TransformerXL(made)
    fill(model, tensors, str(where))
    return model.eval()


@dataclass
class Foreign:
    """The tensors of another code under the authors' names, each handed out in float32 and marked as used."""

    where: str
    tensors: dict[str, Tensor]
    authors: bool = False
    used: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        bare = {name.removeprefix("module."): tensor for name, tensor in self.tensors.items()}
        self.authors = not any(name.startswith("transformer.") for name in bare)
        self.tensors = {name.removeprefix("transformer."): tensor for name, tensor in bare.items()}
        # Each is a table both codes compute when they are built.
        self.tensors.pop("pos_emb.inv_freq", None)

    def take(self, name: str, *shape: int) -> Tensor:
        if name not in self.tensors:
            raise CheckpointError(f"{self.where} has no {name!r}; is it the whole of a Transformer-XL language model?")
        tensor = self.tensors[name]
        if tuple(tensor.shape) != shape or not tensor.is_floating_point():
            found = f"{tensor.dtype} {list(tensor.shape)}"
            raise CheckpointError(f"{self.where} holds {name!r} as {found} where its config asks for {list(shape)}")
        self.used.add(name)
        return tensor.float()

    def same(self, name: str, other: str) -> bool:
        """Whether `name` says nothing of its own: it is left out, or equal to the tensor it is tied to."""
        if name not in self.tensors:
            return True
        mine, tied = self.tensors[name], self.tensors.get(other)
        return tied is not None and mine.shape == tied.shape and torch.equal(mine, tied)

    def take_tied(self, name: str, other: str) -> None:
        if not self.same(name, other):
            raise CheckpointError(f"{self.where} holds {name!r} and {other!r}, tied by its config but not equal")
        self.used.add(name)

    def require_used(self) -> None:
        if unused := sorted(set(self.tensors) - self.used):
            raise CheckpointError(f"{self.where} holds {unused[0]!r:.80}, which this kind of Transformer-XL has not")

    def require_enough(self, needed: int) -> None:
        """Tensors that the file ties are copied where ours are not tied, a few times and not as often as it likes."""
        held = sum(tensor.numel() for tensor in self.tensors.values())
        if needed > LISTED * held:
            raise CheckpointError(
                f"{self.where} holds {held} numbers and its settings ask for {needed}; are they a pair?"
            )


def _read_weights(source: Path) -> tuple[Path, dict[str, Tensor]]:
    if not source.exists():
        raise CheckpointError(f"there is no {source}; give a folder of transformers or a file of weights")
    names = ("model.safetensors", "pytorch_model.bin")
    where = next((source / name for name in names if (source / name).is_file()), None) if source.is_dir() else source
    if where is None:
        raise CheckpointError(
            f"{source} holds neither {names[0]} nor {names[1]}; give a folder that transformers saved"
        )
    if where.suffix == ".safetensors":
        return where, parse_weights(_bytes(where), str(where))
    return where, read_state_dict(where)


def _read_values(path: Path | None, source: Path) -> dict[str, Any]:
    if path is None:
        raise CheckpointError(f"{source} is a bare file of weights; give its settings with --config FILE.json")
    values = read_json(_bytes(path), str(path))
    if values.get("model_type", "transfo-xl") != "transfo-xl":
        raise CheckpointError(f"{path} describes a {values['model_type']!r:.40}; longspan imports transfo-xl")
    return {ALIASES.get(key, key): value for key, value in values.items()}


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"there is no file {path}; check the name") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {reason(error)}") from None


def _config(values: Mapping[str, Any], found: Foreign) -> TransformerXLConfig:
    """Our config for the other code's; what ours cannot express is refused by name."""
    for key, usual in (("attn_type", 0), ("layer_norm_epsilon", 1e-5), ("ext_len", 0)):
        if values.get(key, usual) != usual:
            raise CheckpointError(f"{found.where} was made with {key}={values[key]!r:.40}; only {usual} is imported")
    needed = ("d_model", "n_head", "d_head", "d_inner", "n_layer")
    if missing := [key for key in needed if key not in values]:
        raise CheckpointError(f"the settings of {found.where} lack {missing[0]!r}; they must name {', '.join(needed)}")
    layers = {int(name[1]) for key in found.tensors if (name := re.match(r"layers\.([0-9]{1,6})\.", key))}
    if layers != set(range(len(layers))) or values["n_layer"] != len(layers):
        found_layers = f"holds {len(layers)} layers where its settings say {values['n_layer']!r:.40}"
        raise CheckpointError(f"{found.where} {found_layers}; are the two a pair?")
    cutoffs, tie_projections = _clusters(values, found)
    made = {
        "vocabulary": values.get("vocab_size", _rows(found)),
        "layers": values["n_layer"],
        "width": values["d_model"],
        "heads": values["n_head"],
        "head_width": values["d_head"],
        "inner": values["d_inner"],
        "embedding_width": _positive(values.get("d_embed"), values["d_model"]),
        "memory": values.get("mem_len", 0),
        "clamp": _positive(values.get("clamp_len"), 0),
        "same_length": values.get("same_length", False),
        "norm": "pre" if values.get("pre_lnorm") else "post",
        "dropout": values.get("dropout", 0.0),
        "attention_dropout": values.get("dropatt", 0.0),
        "shared_biases": "r_w_bias" in found.tensors or not values.get("untie_r", True),
        "cutoffs": cutoffs,
        "div_val": values.get("div_val", 1),
        "tie_embedding": bool(values.get("tie_word_embeddings", values.get("tied", not values.get("not_tied", False)))),
        "tie_projections": tie_projections,
    }
    made |= {"segment": values["tgt_len"]} if _positive(values.get("tgt_len"), 0) else {}
    try:
        return config.build(TransformerXLConfig, made, "model")
    except ConfigError as error:
        raise CheckpointError(f"the settings of {found.where} cannot be: {error}") from None


def _clusters(values: Mapping[str, Any], found: Foreign) -> tuple[list[Any], bool]:
    """Cutoffs, and whether the rarer clusters' projections are tied: as told, or as the authors' data sets have it.

    Ours ties all of them but the first, or none. Where a file ties otherwise each gets a copy: the same numbers.
    """
    if "cutoffs" in values or not values.get("adaptive", False):
        cutoffs, tied = values.get("cutoffs", []), values.get("tie_projs", False)
    elif (known := AUTHORS_CLUSTERS.get(str(values.get("dataset")))) is not None:
        cutoffs, tied = list(known[0]), known[1]
    else:
        raise CheckpointError(f"the settings of {found.where} are adaptive without 'cutoffs'; add the list of them")
    if not isinstance(cutoffs, list):
        raise CheckpointError(f"the settings of {found.where} have cutoffs={cutoffs!r:.40}; they must be a list")
    if isinstance(tied, list):
        tied = tied[1 : 1 + len(cutoffs)] == [True] * len(cutoffs) and not (tied and tied[0])
    return cutoffs, bool(cutoffs) and bool(tied)


def _carry(made: TransformerXLConfig, found: Foreign) -> dict[str, Tensor]:
    width, inner, across = made.width, made.inner_size, made.heads * made.head_size
    shapes = {
        "dec_attn.o_net.weight": (width, across),
        "dec_attn.r_net.weight": (across, width),
        "pos_ff.CoreNet.0.weight": (inner, width),
        "pos_ff.CoreNet.0.bias": (inner,),
        "pos_ff.CoreNet.3.weight": (width, inner),
    }
    tensors: dict[str, Tensor] = {}
    for n in range(made.layers):
        for ours, theirs in LAYER.items():
            tensors[f"layers.{n}.{ours}"] = found.take(f"layers.{n}.{theirs}", *shapes.get(theirs, (width,)))
        fused = found.take(f"layers.{n}.dec_attn.qkv_net.weight", 3 * across, width)
        for part, weight in zip(("query", "key", "value"), fused.chunk(3), strict=True):
            tensors[f"layers.{n}.attention.{part}.weight"] = weight
    return tensors | _carry_biases(made, found) | _carry_tokens(made, found)


def _carry_biases(made: TransformerXLConfig, found: Foreign) -> dict[str, Tensor]:
    """u and w: one pair, which the port also lists under every layer, or one pair per layer."""
    shape = (made.heads, made.head_size)
    tensors: dict[str, Tensor] = {}
    for ours, theirs in BIASES.items():
        names = [f"layers.{n}.dec_attn.{theirs}" for n in range(made.layers)]
        if made.shared_biases:
            first = theirs if theirs in found.tensors else names[0]
            tensors[ours] = found.take(first, *shape)
            for name in names:
                found.take_tied(name, first)
        else:
            tensors |= {f"layers.{n}.{ours}": found.take(name, *shape) for n, name in enumerate(names)}
    return tensors


def _carry_tokens(made: TransformerXLConfig, found: Foreign) -> dict[str, Tensor]:
    """Embedding and adaptive softmax; a tied tensor may be listed twice, and must then be equal."""
    tensors: dict[str, Tensor] = {}
    shapes = {name: tensor.shape for name, tensor in sketch(made.make_embedding).items()}
    tables = [shape for name, shape in shapes.items() if name.startswith("tables.")]
    projections = [shape for name, shape in shapes.items() if name.startswith("projections.")]
    for i, table in enumerate(tables):
        theirs = f"word_emb.emb_layers.{i}.weight"
        tensors[f"embedding.tables.{i}"] = found.take(theirs, *table)
        tensors[f"head.biases.{i}"] = found.take(f"crit.out_layers.{i}.bias", table[0])
        if made.tie_embedding:
            found.take_tied(f"crit.out_layers.{i}.weight", theirs)
        else:
            tensors[f"head.tables.{i}"] = found.take(f"crit.out_layers.{i}.weight", *table)
    for i, projection in enumerate(projections):
        tensors[f"embedding.projections.{i}"] = found.take(f"word_emb.emb_projs.{i}", *projection)
    if projections:
        for i in range(len(made.cutoffs) + 1):
            tensors |= _carry_projection(made, found, i, min(i, len(projections) - 1))
    if made.cutoffs:
        count, widest = len(made.cutoffs), tables[0][1]
        rows = {
            "weight": found.take("crit.cluster_weight", count, widest),
            "bias": found.take("crit.cluster_bias", count),
        }
        tensors |= {f"head.cluster_{kind}": row.flip(0) if found.authors else row for kind, row in rows.items()}
    return tensors


def _carry_projection(made: TransformerXLConfig, found: Foreign, cluster: int, source: int) -> dict[str, Tensor]:
    ours, theirs, tied = f"head.projections.{cluster}", f"crit.out_projs.{cluster}", f"word_emb.emb_projs.{source}"
    if made.tie_projections and cluster > 0:
        found.take_tied(theirs, tied)
        return {}
    return {ours: found.take(theirs if theirs in found.tensors else tied, *found.tensors[tied].shape)}


def _rows(found: Foreign) -> int:
    """The vocabulary, where no setting says it: the rows of the embedding."""
    tables = [
        tensor for name, tensor in found.tensors.items() if re.fullmatch(r"word_emb\.emb_layers\.\d+\.weight", name)
    ]
    return sum(table.shape[0] for table in tables if table.dim() == 2)


def _positive(value: Any, otherwise: Any) -> Any:
    """The authors write -1 for a setting that is off."""
    return otherwise if value is None or (type(value) is int and value <= 0) else value
