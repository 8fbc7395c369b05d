"""Weights of GPT-2, BERT and XLNet of `transformers` in the names of longspan, and back to a model."""

from collections.abc import Mapping
from typing import Any

from longspan.models.xlnet import XLNetConfig
from longspan.shapes import Tensor


def xlnet_config(values: Mapping[str, Any]) -> XLNetConfig:
    """The config of an XLNet with the settings of its config.json."""
    return XLNetConfig(
        vocabulary=values["vocab_size"],
        layers=values["n_layer"],
        width=values["d_model"],
        heads=values["n_head"],
        head_width=values.get("d_head"),
        inner=values["d_inner"],
        dropout=values["dropout"],
        attention_dropout=values["dropout"],
    )


def xlnet_weights(tensors: Mapping[str, Tensor], config: XLNetConfig) -> dict[str, Tensor]:
    """Tensors of XLNetLMHeadModel by our names; those that are missing are left out."""
    E = config.width
    found: dict[str, Tensor] = {}

    def take(ours: str, theirs: str, change: Any = lambda tensor: tensor) -> None:
        if theirs in tensors:
            found[ours] = change(tensors[theirs])

    take("embedding.tables.0", "transformer.word_embedding.weight")
    take("query_start", "transformer.mask_emb", lambda tensor: tensor.reshape(E))
    take("head.biases.0", "lm_loss.bias")
    take("head.tables.0", "transformer.word_embedding.weight")
    for n in range(config.layers):
        ours, theirs = f"layers.{n}", f"transformer.layer.{n}"
        for part, name in {"query": "q", "key": "k", "value": "v", "position": "r"}.items():
            take(f"{ours}.{part}.weight", f"{theirs}.rel_attn.{name}", lambda tensor: tensor.reshape(E, -1).t())
        take(f"{ours}.output.weight", f"{theirs}.rel_attn.o", lambda tensor: tensor.reshape(E, -1))
        for part, name in {"u": "r_w_bias", "w": "r_r_bias", "s": "r_s_bias", "segments": "seg_embed"}.items():
            take(f"{ours}.{part}", f"{theirs}.rel_attn.{name}")
        parts = {"attention_norm": "rel_attn.layer_norm", "feed_forward_norm": "ff.layer_norm"}
        parts |= {"up": "ff.layer_1", "down": "ff.layer_2"}
        for part, name in parts.items():
            for kind in ("weight", "bias"):
                take(f"{ours}.{part}.{kind}", f"{theirs}.{name}.{kind}")
    return found
