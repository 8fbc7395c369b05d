"""Import GPT, GPT-2, BERT and XLNet of `transformers`: their config.json and safetensors in longspan's names."""

import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from longspan import config as configs
from longspan.checkpoints.manifest import read_json
from longspan.checkpoints.weights import fill, parse_weights, weights_of
from longspan.contract import LanguageModel
from longspan.errors import CheckpointError, ConfigError, DataError, DataWarning, UnknownNameError, counted
from longspan.models.families import create, family
from longspan.reading import Reading
from longspan.shapes import Tensor
from longspan.tokenizers import SubwordTokenizer, Tokenizer

CONFIG, WEIGHTS, TOKENIZER = "config.json", "model.safetensors", "tokenizer.json"
INDEX = "model.safetensors.index.json"
TRANSFO_XL = "transfo-xl"
"""Imported by transfo_xl.py. The authors' code saves no model type."""
Values = Mapping[str, Any]
Change = Callable[[Tensor], Tensor]


class Names:
    """Takes tensors of another implementation by name. A prefix of their names is left out."""

    def __init__(self, tensors: Mapping[str, Tensor], prefix: str) -> None:
        self.tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
        self.found: dict[str, Tensor] = {}

    def take(self, ours: str, theirs: str, change: Change = lambda tensor: tensor) -> None:
        if theirs in self.tensors:
            self.found[ours] = change(self.tensors[theirs]).contiguous()

    def linear(self, ours: str, theirs: str, *, transposed: bool = False) -> None:
        self.take(f"{ours}.weight", f"{theirs}.weight", (lambda tensor: tensor.t()) if transposed else lambda t: t)
        self.take(f"{ours}.bias", f"{theirs}.bias")


def gpt_values(values: Values) -> tuple[str, dict[str, Any], int]:
    """Family, config and longest segment of GPT and GPT-2."""
    first = values["model_type"] == "openai-gpt"
    made = {"vocabulary": values["vocab_size"], "layers": values["n_layer"], "width": values["n_embd"]}
    made |= {"heads": values["n_head"], "inner": values.get("n_inner"), "positions": values["n_positions"]}
    made |= {"dropout": values["resid_pdrop"], "attention_dropout": values["attn_pdrop"]}
    return "gpt", made | {"norm": "post" if first else "pre"}, values["n_positions"]


def gpt_weights(tensors: Mapping[str, Tensor], layers: int) -> dict[str, Tensor]:
    names = Names(tensors, "transformer.")
    for tokens, places in (("wte.weight", "wpe.weight"), ("tokens_embed.weight", "positions_embed.weight")):
        names.take("embedding.tables.0", tokens)
        names.take("head.tables.0", tokens)
        names.take("places.rows", places)
        names.take("head.biases.0", tokens, lambda tensor: tensor.new_zeros(tensor.shape[0]))
    names.linear("final_norm", "ln_f")
    for n in range(layers):
        ours, theirs = f"layers.{n}", f"h.{n}"
        for k, part in enumerate(("query", "key", "value")):
            # One product gives queries, keys and values; weights are stored as [inputs, outputs].
            names.take(f"{ours}.{part}.weight", f"{theirs}.attn.c_attn.weight", lambda t, k=k: t.t().chunk(3)[k])  # type: ignore[misc]
            names.take(f"{ours}.{part}.bias", f"{theirs}.attn.c_attn.bias", lambda t, k=k: t.chunk(3)[k])  # type: ignore[misc]
        names.linear(f"{ours}.output", f"{theirs}.attn.c_proj", transposed=True)
        names.linear(f"{ours}.up", f"{theirs}.mlp.c_fc", transposed=True)
        names.linear(f"{ours}.down", f"{theirs}.mlp.c_proj", transposed=True)
        names.linear(f"{ours}.attention_norm", f"{theirs}.ln_1")
        names.linear(f"{ours}.feed_forward_norm", f"{theirs}.ln_2")
    return names.found


def bert_values(values: Values) -> tuple[str, dict[str, Any], int]:
    made = {"vocabulary": values["vocab_size"], "layers": values["num_hidden_layers"], "width": values["hidden_size"]}
    made |= {"heads": values["num_attention_heads"], "inner": values["intermediate_size"]}
    made |= {"positions": values["max_position_embeddings"], "dropout": values["hidden_dropout_prob"]}
    made |= {"attention_dropout": values["attention_probs_dropout_prob"]}
    return "bert", made, values["max_position_embeddings"]


def bert_weights(tensors: Mapping[str, Tensor], layers: int) -> dict[str, Tensor]:
    names = Names(tensors, "bert.")
    for ours in ("embedding.tables.0", "head.tables.0"):
        names.take(ours, "embeddings.word_embeddings.weight")
    names.take("places.rows", "embeddings.position_embeddings.weight")
    names.take("segments", "embeddings.token_type_embeddings.weight")
    names.linear("embedding_norm", "embeddings.LayerNorm")
    names.take("head.biases.0", "cls.predictions.bias")
    names.linear("head.dense", "cls.predictions.transform.dense")
    names.linear("head.norm", "cls.predictions.transform.LayerNorm")
    names.linear("pooler", "pooler.dense")
    names.linear("next_sentence", "cls.seq_relationship")
    parts = {part: f"attention.self.{part}" for part in ("query", "key", "value")}
    parts |= {"output": "attention.output.dense", "attention_norm": "attention.output.LayerNorm"}
    parts |= {"up": "intermediate.dense", "down": "output.dense", "feed_forward_norm": "output.LayerNorm"}
    for n in range(layers):
        for ours, theirs in parts.items():
            names.linear(f"layers.{n}.{ours}", f"encoder.layer.{n}.{theirs}")
    return names.found


def xlnet_values(values: Values) -> tuple[str, dict[str, Any], int]:
    made = {"vocabulary": values["vocab_size"], "layers": values["n_layer"], "width": values["d_model"]}
    made |= {"heads": values["n_head"], "head_width": values.get("d_head"), "inner": values["d_inner"]}
    return "xlnet", made | {"dropout": values["dropout"], "attention_dropout": values["dropout"]}, 512


def xlnet_weights(tensors: Mapping[str, Tensor], layers: int) -> dict[str, Tensor]:
    names = Names(tensors, "transformer.")
    for ours in ("embedding.tables.0", "head.tables.0"):
        names.take(ours, "word_embedding.weight")
    names.take("query_start", "mask_emb", lambda tensor: tensor.flatten())
    names.take("head.biases.0", "lm_loss.bias")
    for n in range(layers):
        ours, theirs = f"layers.{n}", f"layer.{n}"
        for part, name in {"query": "q", "key": "k", "value": "v", "position": "r"}.items():
            names.take(f"{ours}.{part}.weight", f"{theirs}.rel_attn.{name}", lambda tensor: tensor.flatten(1).t())
        names.take(f"{ours}.output.weight", f"{theirs}.rel_attn.o", lambda tensor: tensor.flatten(1))
        for part, name in {"u": "r_w_bias", "w": "r_r_bias", "s": "r_s_bias", "segments": "seg_embed"}.items():
            names.take(f"{ours}.{part}", f"{theirs}.rel_attn.{name}")
        names.linear(f"{ours}.attention_norm", f"{theirs}.rel_attn.layer_norm")
        names.linear(f"{ours}.feed_forward_norm", f"{theirs}.ff.layer_norm")
        names.linear(f"{ours}.up", f"{theirs}.ff.layer_1")
        names.linear(f"{ours}.down", f"{theirs}.ff.layer_2")
    return names.found


KINDS: dict[str, tuple[Callable[[Values], tuple[str, dict[str, Any], int]], Callable[..., dict[str, Tensor]]]] = {
    "gpt2": (gpt_values, gpt_weights),
    "openai-gpt": (gpt_values, gpt_weights),
    "bert": (bert_values, bert_weights),
    "xlnet": (xlnet_values, xlnet_weights),
}
SPECIAL = {"bert": {"mask": "[MASK]", "classify": "[CLS]", "separator": "[SEP]"}, "xlnet": {"separator": "<sep>"}}
"""Keys of a config that are ids of special tokens."""
OPTIONAL = {"bert": ("pooler.", "next_sentence.", "head."), "xlnet": ("query_start", "head.biases")}
"""Weights that a file may lack."""

_TIED = {"tie_word_embeddings": (True,), "add_cross_attention": (False,), "is_decoder": (False,)}
_GPT = {"layer_norm_epsilon": (1e-5,), "scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,)}
_TANH = ("gelu_new", "gelu_pytorch_tanh")
_XLNET = {"ff_activation": ("gelu",), "attn_type": ("bi",), "layer_norm_eps": (1e-12,), "clamp_len": (-1, 0)}
_XLNET |= {"bi_data": (False,), "untie_r": (True,), "reuse_len": (0,)}
_BERT = {"hidden_act": ("gelu", "gelu_python"), "layer_norm_eps": (1e-12,), "position_embedding_type": ("absolute",)}
COMPUTED: dict[str, dict[str, tuple[Any, ...]]] = {
    "gpt2": _TIED | _GPT | {"activation_function": _TANH},
    "openai-gpt": _TIED | _GPT | {"afn": ("gelu", "gelu_new")},
    "bert": _TIED | _BERT,
    "xlnet": _TIED | _XLNET,
}
"""Keys that change what a model computes, and the values that ours computes. A key may be missing."""


def check_computed(kind: str, values: Values, where: str) -> None:
    """An error for a config whose model computes something that ours does not."""
    for key, known in COMPUTED[kind].items():
        value = values.get(key)
        if value is not None and value not in known:
            shown = " or ".join(json.dumps(one) for one in known)
            raise ConfigError(f"{where} has {key}={json.dumps(value)}; longspan imports {kind} only with {shown}")


def kind_of(source: Path) -> str | None:
    """The model type of a folder of `transformers`; None without a config. Types that longspan does not import are
    errors."""
    if not source.exists():
        raise CheckpointError(
            f"there is no {source} to import; use a folder saved by transformers, or a file of weights"
        )
    if not (source / CONFIG).is_file():
        if source.is_dir() and not any(path.suffix in (".safetensors", ".bin") for path in source.iterdir()):
            raise CheckpointError(f"{source} has no weights; use a folder that save_pretrained of transformers wrote")
        return None  # the config of a Transformer-XL can be named separately
    found = read_json((source / CONFIG).read_bytes(), str(source / CONFIG)).get("model_type", TRANSFO_XL)
    if found not in (*KINDS, TRANSFO_XL):
        raise UnknownNameError("supported model type", str(found), (*KINDS, TRANSFO_XL))
    return str(found)


def make_model(values: Values, tensors: Mapping[str, Tensor], where: str, tokenizer: Tokenizer | None) -> LanguageModel:
    """The model of a config.json and its tensors. Missing tensors are an error; other heads than ours are ignored."""
    kind = str(values.get("model_type"))
    if kind not in KINDS:
        raise UnknownNameError("supported model type", kind, KINDS)
    check_computed(kind, values, where)
    describe, convert = KINDS[kind]
    try:
        name, made, segment = describe(values)
    except KeyError as error:
        raise CheckpointError(f"{where} has no {error.args[0]!r} in its {CONFIG}; it is damaged") from None
    named = {key: tokenizer.token_id(token) for key, token in SPECIAL.get(kind, {}).items()} if tokenizer else {}
    given = {key: value for key, value in (made | named).items() if value is not None}
    if tokenizer is not None:
        given["vocabulary"] = known_tokens(given["vocabulary"], tokenizer, where)
    chosen: Any = configs.build(family(name).Config, given, "model")
    model = create(name, chosen, Reading(segment=segment, memory=0))
    expected = model.state_dict(keep_vars=True)
    found = convert(tensors, made["layers"])
    for name in {"embedding.tables.0", "head.tables.0", "head.biases.0"} & found.keys():
        found[name] = found[name][: given["vocabulary"]]
    # A tied tensor has one name.
    first = {id(tensor): name for name, tensor in reversed(expected.items())}
    wanted = {name: tensor for name, tensor in found.items() if first.get(id(expected.get(name))) == name}
    # An encoder is often saved without the heads of its pre-training. Ours keep their initial weights then.
    heads = {name: t.detach() for name, t in weights_of(model).items() if name.startswith(OPTIONAL.get(kind, ()))}
    fill(model, heads | wanted, where)
    return model.eval()


def known_tokens(rows: int, tokenizer: Tokenizer, where: str) -> int:
    """The vocabulary of a model whose embedding has so many rows. Some are padded to a round number."""
    if rows < tokenizer.size:
        raise ConfigError(
            f"{where} has {rows:,} tokens, but its tokenizer has {tokenizer.size:,}; import the tokenizer of this model"
        )
    if rows > tokenizer.size:
        gone = counted(rows - tokenizer.size, "row")
        warnings.warn(
            f"{gone} of the embedding of {where} belong to no token of its tokenizer and are left out, so the other "
            "tokens get their probability",
            DataWarning,
            stacklevel=2,
        )
    return tokenizer.size


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of model.safetensors, or of all files that its index names."""
    if (folder / WEIGHTS).is_file():
        return parse_weights((folder / WEIGHTS).read_bytes(), str(folder / WEIGHTS))
    if not (folder / INDEX).is_file():
        raise CheckpointError(f"{folder} has no {WEIGHTS}; save it again with safe_serialization=True")
    places = read_json((folder / INDEX).read_bytes(), str(folder / INDEX)).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise CheckpointError(f"{folder / INDEX} has no weight_map; it is damaged")
    tensors: dict[str, Tensor] = {}
    for name in sorted(set(places.values())):
        if Path(name).name != name or not (folder / name).is_file():
            raise CheckpointError(f"{folder} has no {name!r:.80}, which its {INDEX} lists; download this file too")
        tensors |= parse_weights((folder / name).read_bytes(), str(folder / name))
    return tensors


def import_huggingface(folder: Path, tokenizer: Tokenizer | None = None) -> tuple[LanguageModel, Tokenizer]:
    """The model and the tokenizer of a folder of `transformers` with safetensors. Default `tokenizer`: that of the
    folder's tokenizer.json."""
    values = read_json((folder / CONFIG).read_bytes(), str(folder / CONFIG))
    tensors = read_tensors(folder)
    if tokenizer is None:
        if not (folder / TOKENIZER).is_file():
            raise DataError(f"{folder} has no {TOKENIZER}; save the tokenizer there, or name one with --tokenizer")
        tokenizer = SubwordTokenizer.from_file(folder / TOKENIZER)
    return make_model(values, tensors, str(folder), tokenizer), tokenizer
