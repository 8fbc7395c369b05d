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
    "vocabulary": "number of tokens; 256 for bytes",
    "layers": "number of layers",
    "width": "width of the hidden states",
    "heads": "attention heads",
    "head_width": "width of a head; default: width / heads",
    "inner": "width of the feed-forward layer, default 4 x width; of all recurrent layers but the last, default width",
    "pointer_width": "width of the pointer's queries and keys; 0 for no pointer (longspan-xl, rotary)",
    "position": "relative | shaw (longspan-xl); sinusoid | learned | shaw (vanilla)",
    "max_distance": "largest distance (shaw) or position (learned) with its own vector; default 127; longspan-xl: 255",
    "layer_losses": "in training, layer l of n also predicts, until l/2n of the run (vanilla)",
    "targets": "number of next tokens predicted in training (vanilla)",
    "shared_biases": "one pair u, w for all layers instead of one per layer (transformer-xl, longspan-xl)",
    "compressed": "slots of compressed memory per layer; 0 is off (compressive)",
    "rate": "positions compressed into one slot (compressive)",
    "compression": "mean | max | convolution | dilated | most-used (compressive)",
    "span": "largest span that a head can learn (adaptive-span)",
    "ramp": "number of distances over which a span fades out (adaptive-span)",
    "span_penalty": "weight of the mean span in the training loss (adaptive-span)",
    "steps": "maximum number of applications of the shared block (universal)",
    "threshold": "sum of halting probabilities at which a position halts (universal)",
    "ponder": "weight of the number of steps in the training loss (universal)",
    "pattern": "strided | fixed (sparse)",
    "factorised": "the two patterns alternate over heads | layers, or are merged in every head (sparse)",
    "stride": "length of the local pattern and step of the distant one (sparse)",
    "summary": "summary positions per stride in the fixed pattern (sparse)",
    "window": "keys per query, its own included: a number, or one per layer (longformer); 1 or 2 (qrnn)",
    "dilation": "gap between the keys of a window: a number, or [[one per head], ... per layer] (longformer)",
    "global_tokens": "first tokens of a document that attend to all and that all attend to (longformer)",
    "block": "positions per block (bigbird)",
    "window_blocks": "blocks of the window, the query's own included (bigbird)",
    "random_blocks": "random blocks per block (bigbird)",
    "global_blocks": "first blocks of a document that attend to all and that all attend to (bigbird)",
    "causal": "false: attention in both directions, for encoding (longformer, bigbird)",
    "rounds": "rounds of hashing (reformer)",
    "chunk": "maximum number of keys per query and round (reformer)",
    "buckets": "buckets per round, a power of two; default 4 (reformer)",
    "pieces": "number of pieces in which the feed-forward layer computes a segment (reformer)",
    "convolution": "earlier positions in the convolution over a layer's input; 0 is off (longspan-xl, rotary, vanilla)",
    "norm": "post | pre; reformer has pre only",
    "norm_type": "layer | rms (not transformer-xl)",
    "qk_norm": "RMS norm of the queries and keys of every head (not transformer-xl, reformer)",
    "final_norm": "norm after the last layer (not transformer-xl)",
    "activation": "relu | gelu | squared-relu | swish | swiglu (not transformer-xl, evolved)",
    "biases": "biases in the feed-forward layers (not transformer-xl)",
    "dropout": "of embeddings, positions, attention output, feed-forward and output; of the output only (awd-lstm)",
    "attention_dropout": "of attention weights",
    "input_dropout": "of embedding units, the same at all positions (awd-lstm); of embeddings and positions, default: "
    "dropout (longspan-xl, rotary)",
    "output_dropout": "of the output; default: dropout (longspan-xl, rotary)",
    "projection_dropout": "of queries, keys and values (longspan-xl, rotary)",
    "hidden_dropout": "of units between layers, the same at all positions (awd-lstm)",
    "embedding_dropout": "of entire words, at all positions (awd-lstm, longspan-xl, rotary)",
    "weight_dropout": "of the recurrent weight matrices (awd-lstm)",
    "zoneout": "of the updates of the cell (qrnn)",
    "ar": "activation regularisation: weight of the squared output (awd-lstm, longspan-xl, rotary)",
    "tar": "temporal activation regularisation: weight of the output's squared change (awd-lstm, longspan-xl, rotary)",
    "embedding_width": "width of the token embedding; default: width",
    "cutoffs": "token ids at which rarer clusters start, for example [20000,40000,200000]",
    "div_val": "the embedding of each rarer cluster is narrower by this factor",
    "tie_embedding": "one table for embedding and softmax",
    "positions": "positions with a learned vector: the longest segment (gpt, bert)",
    "mask": "the token that hides a predicted one; default: 0 (bert)",
    "classify": "the token in front of a text, for next sentence prediction; default: none (bert)",
    "separator": "the token that ends a text of a pair; default: none (bert, xlnet)",
    "first_positions": "normal | sinusoid: the vectors of positions before training (gpt, bert)",
    "masked": "share of tokens that are predicted (bert)",
    "predict_every": "one token in this many is predicted (xlnet)",
    "characters": "bytes of a token that are read (elmo)",
    "character_width": "width of the vector of a byte (elmo)",
    "filters": "convolutions over characters: [[width, number], ...] (elmo)",
    "tie_projections": "one projection for embedding and softmax of each rarer cluster",
}
READING_KEYS = {
    "segment": "tokens per call",
    "memory": "earlier positions a layer can attend to (transformer-xl, longspan-xl, compressive, rotary, longformer)",
    "clamp": "distances beyond this one share one position key; 0 is off (transformer-xl, longspan-xl)",
    "discount": "scores beyond the clamp fall by this times log(distance / clamp) (transformer-xl, longspan-xl)",
    "same_length": "every query attends to exactly `memory` keys (transformer-xl, longspan-xl, rotary)",
    "pointer": "earlier positions that the pointer may copy from; 0 is off (longspan-xl, rotary)",
    "temperature": "logits are divided by this before the softmax",
}


def keys_help() -> str:
    """The keys as the last paragraph of a help text; click keeps the line breaks after \\b."""
    tables = {"model": MODEL_KEYS, "reading": READING_KEYS}
    lines = [f"  {f'{table}.{name}':<24} {text}" for table, keys in tables.items() for name, text in keys.items()]
    return "Keys for --set:\n\n\b\n" + "\n".join(lines)


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
    found = [Key("model.family", family or "transformer-xl", "the architecture; `longspan families` lists them.")]
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
    return "Keys for --set (`longspan config` also lists those of models):\n\n\b\n" + "\n".join(
        key_lines(recipe_keys())
    )
