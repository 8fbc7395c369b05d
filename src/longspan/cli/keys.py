"""Descriptions of all keys, for help texts. Those of a recipe come from the docstrings of its dataclasses. Those of
models and readings are listed here by key, because families share them; a test freezes the list."""

import ast
import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from textwrap import wrap
from typing import Any, NamedTuple

MODEL_KEYS = {
    "vocabulary": "Number of tokens in the vocabulary; 256 for bytes",
    "layers": "Number of layers",
    "width": "Width of the hidden states",
    "heads": "Number of attention heads",
    "head_width": "Width of a head. Default: width / heads",
    "inner": "Width of the feed-forward layer (default: 4 x width), or of all recurrent layers except the last "
    "(default: width)",
    "pointer_width": "Width of the pointer's queries and keys; 0 means no pointer (longspan-xl, rotary)",
    "position": "Position encoding: relative or shaw (longspan-xl); sinusoid, learned or shaw (vanilla)",
    "max_distance": "Largest distance (shaw) or position (learned) that has its own vector. Default: 127; longspan-xl: "
    "255",
    "log_distances": "Half of the position features are sinusoids of the logarithm of the distance (longspan-xl)",
    "layer_losses": "In training, also predict from intermediate layers; layer l of n stops after l/2n of the run "
    "(vanilla)",
    "targets": "Number of following tokens that each position predicts in training (vanilla)",
    "shared_biases": "Share the attention biases u and w between all layers (transformer-xl, longspan-xl)",
    "compressed": "Number of compressed memory slots per layer; 0 is off (compressive)",
    "rate": "Compression rate: number of positions that are compressed into one slot (compressive)",
    "compression": "Compression function: mean, max, convolution, dilated or most-used (compressive)",
    "span": "Largest span that a head can learn (adaptive-span)",
    "ramp": "Number of distances over which the mask of a span falls from 1 to 0 (adaptive-span)",
    "span_penalty": "Weight of the mean span in the training loss (adaptive-span)",
    "steps": "Maximum number of times that the shared block is applied (universal)",
    "threshold": "A position halts when its halting probabilities sum to this (universal)",
    "ponder": "Weight of the ponder cost (the number of steps) in the training loss (universal)",
    "pattern": "Attention pattern: strided or fixed (sparse)",
    "factorised": "How the local and the distant pattern are combined: heads (half of the heads use each), layers "
    "(layers alternate) or merged (every head uses both) (sparse)",
    "stride": "Length of the local pattern, and distance between the keys of the distant one (sparse)",
    "summary": "Number of summary positions per stride in the fixed pattern (sparse)",
    "window": "Window size in keys, including the query's own position: one number, or one per layer (longformer). "
    "Width of the convolution: 1 or 2 (qrnn)",
    "dilation": "Distance between neighbouring keys of a window: one number, or lists with one number per head, either "
    "one list for all layers or one per layer (longformer)",
    "global_tokens": "Number of global tokens at the start of a document: they attend to all positions, and all "
    "positions attend to them (longformer)",
    "block": "Number of positions per block (bigbird)",
    "window_blocks": "Number of blocks in the window, including the query's own (bigbird)",
    "random_blocks": "Number of random blocks that each block attends to (bigbird)",
    "global_blocks": "Number of global blocks at the start of a document: they attend to all blocks, and all blocks "
    "attend to them (bigbird)",
    "causal": "Use causal attention; false means bidirectional attention, for encoding (longformer, bigbird)",
    "rounds": "Number of hashing rounds (reformer)",
    "chunk": "Maximum number of keys per query in each hashing round (reformer)",
    "buckets": "Number of hash buckets per round, a power of two (reformer). Default: 4 with the default chunk",
    "pieces": "Number of pieces in which the feed-forward layer computes a segment, to save memory (reformer)",
    "convolution": "Number of earlier positions in the convolution over a layer's input; 0 is off (longspan-xl, "
    "rotary, vanilla)",
    "norm": "Where the norms are: post or pre (reformer: pre only)",
    "norm_type": "Type of the norms: layer or rms (not transformer-xl)",
    "qk_norm": "Apply an RMS norm to the queries and keys of every head (not transformer-xl, reformer)",
    "final_norm": "Apply a norm after the last layer (not transformer-xl)",
    "activation": "Activation function: relu, gelu, squared-relu, swish or swiglu (not transformer-xl, evolved)",
    "biases": "Use biases in the feed-forward layers (not transformer-xl)",
    "dropout": "Dropout rate of embeddings, positions, attention output, feed-forward and output; awd-lstm: of the "
    "output only",
    "attention_dropout": "Dropout rate of the attention weights",
    "input_dropout": "Dropout rate of embedding units, with the same mask at all positions (awd-lstm); of embeddings "
    "and positions, by default the same as dropout (longspan-xl, rotary)",
    "output_dropout": "Dropout rate of the output (longspan-xl, rotary). Default: the same as dropout",
    "projection_dropout": "Dropout rate of queries, keys and values (longspan-xl, rotary)",
    "hidden_dropout": "Dropout rate of units between layers, with the same mask at all positions (awd-lstm)",
    "embedding_dropout": "Dropout rate of entire words: a dropped word is dropped at all positions (awd-lstm, "
    "longspan-xl, rotary)",
    "weight_dropout": "Dropout rate of the recurrent weight matrices (awd-lstm)",
    "zoneout": "Zoneout rate: probability that a cell keeps its previous value (qrnn)",
    "ar": "Activation regularisation: weight of the squared output in the loss (awd-lstm, longspan-xl, rotary)",
    "tar": "Temporal activation regularisation: weight of the output's squared change in the loss (awd-lstm, "
    "longspan-xl, rotary)",
    "embedding_width": "Width of the token embedding. Default: width",
    "cutoffs": "Adaptive softmax: token ids at which the clusters of rarer tokens start, for example "
    "[20000,40000,200000]",
    "div_val": "Factor by which the embedding of each rarer cluster is narrower than the one before",
    "tie_embedding": "Use the same weights for the embedding and the softmax",
    "positions": "Number of positions with a learned vector, which is the longest possible segment (gpt, bert)",
    "mask": "Id of the mask token (bert). Default: 0",
    "classify": "Id of the token in front of a text ([CLS]), for next sentence prediction (bert). Default: none",
    "separator": "Id of the token that ends a text of a pair ([SEP]) (bert, xlnet). Default: none",
    "first_positions": "Initial position vectors: normal or sinusoid (gpt, bert)",
    "masked": "Fraction of tokens that are predicted (bert)",
    "predict_every": "One in this many tokens is predicted (xlnet)",
    "characters": "Number of bytes of a token that are read; longer tokens are truncated (elmo)",
    "character_width": "Embedding width of a byte (elmo)",
    "filters": "Convolutions over characters, as [[width, number of filters], ...] (elmo)",
    "tie_projections": "In each rarer cluster, use the same projection for the embedding and the softmax",
}
READING_KEYS = {
    "segment": "Number of tokens per segment",
    "memory": "Number of earlier positions that a layer can attend to (transformer-xl, longspan-xl, compressive, "
    "rotary, longformer)",
    "clamp": "Distances beyond this share one position key; 0 is off (transformer-xl, longspan-xl)",
    "discount": "Lower attention scores beyond the clamp by this times log(distance / clamp) (transformer-xl, "
    "longspan-xl)",
    "same_length": "Every query attends to exactly `memory` keys (transformer-xl, longspan-xl, rotary)",
    "pointer": "Number of earlier positions that the pointer can copy from; 0 is off (longspan-xl, rotary)",
    "temperature": "Divide logits by this before the softmax",
}


def keys_help() -> str:
    """The keys as the last paragraph of a help text; click keeps the line breaks after \\b."""
    tables = {"model": MODEL_KEYS, "reading": READING_KEYS}
    found = [Key(f"{table}.{name}", "", f"{text}.") for table, keys in tables.items() for name, text in keys.items()]
    return "Keys for --set:\n\n\b\n" + "\n".join(key_lines(found))


class Key(NamedTuple):
    """A key of a recipe. `default` is in Python syntax; that of a model's key names the families that differ."""

    name: str
    default: str
    text: str
    families: Mapping[str, Any] | None = None
    """The default in every family that has this key of a model."""


_RECIPE = Path(__file__).parents[1] / "training" / "recipe_tables.py"
_TABLES = {"DataConfig": "data", "TrainingConfig": "training", "EvaluationConfig": "evaluation"}


@cache
def recipe_keys() -> tuple[Key, ...]:
    """The keys of [data], [training] and [evaluation]. The source is parsed, because importing it imports torch."""
    found = []
    for node in ast.parse(_RECIPE.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name in _TABLES:
            for entry, after in zip(node.body, [*node.body[1:], None], strict=True):
                if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name) and entry.value is not None:
                    text = after.value.value if _is_text(after) else ""  # type: ignore[union-attr]
                    name = f"{_TABLES[node.name]}.{entry.target.id}"
                    words = [*str(text).split(), *_choices(entry.annotation)]
                    found.append(Key(name, ast.unparse(entry.value), " ".join(words)))
    return tuple(found)


def _choices(annotation: ast.expr) -> list[str]:
    """The values of a Literal, as a sentence."""
    if not (isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "Literal"):
        return []
    return [f"One of {', '.join(ast.literal_eval(annotation.slice))}."]


def _is_text(node: ast.stmt | None) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def model_keys(family: str | None = None) -> list[Key]:
    """The keys of [model] with the default of each family, or those of one family."""
    from longspan.models.families import defaults
    from longspan.models.families import family as require_family

    if family is not None:
        require_family(family)
    found = [Key("model.family", family or "transformer-xl", "The architecture; `longspan families` lists all.")]
    for name, values in defaults().items():
        chosen = values if family is None else {known: value for known, value in values.items() if known == family}
        if chosen:
            text = f"{MODEL_KEYS[name]}." if name in MODEL_KEYS else ""
            found.append(Key(f"model.{name}", _default_of(chosen), text, chosen))
    return found


def _default_of(values: Mapping[str, Any]) -> str:
    """The defaults of the families in words: the most common one, then the others with their families.

    None is left out: the text of the key says what it means.
    """
    families: dict[str, list[str]] = {}
    for family, value in values.items():
        families.setdefault("" if value is None else json.dumps(value).replace('"', ""), []).append(family)
    ordered = sorted(families, key=lambda value: -len(families[value]))
    if "" not in families:
        common, *others = ordered
        return "; ".join([common, *(f"{value} ({', '.join(families[value])})" for value in others)])
    return "; ".join(f"{value} ({', '.join(families[value])})" for value in ordered if value)


def all_keys(family: str | None = None) -> list[Key]:
    """Every key for --set, with its default. Those of a model depend on its family."""
    return [*recipe_keys(), *model_keys(family)]


def key_lines(keys: Sequence[Key], width: int = 98) -> list[str]:
    """Keys with their descriptions and defaults, in lines of at most `width` characters."""
    lines = []
    for name, default, text, _ in keys:
        shown = {"None": "", "True": "true", "False": "false", "": ""}.get(default, default.replace("'", ""))
        words = f"{text} Default: {shown}." if shown else text
        first, *rest = wrap(words, width - 32, break_on_hyphens=False) or [""]
        lines += [f"  {name:<29} {first}", *(f"{'':32}{line}" for line in rest)]
    return lines


def training_help() -> str:
    """The keys of a recipe as the last paragraph of a help text."""
    return "Keys for --set (`longspan config` also lists the keys of models):\n\n\b\n" + "\n".join(
        key_lines(recipe_keys())
    )
