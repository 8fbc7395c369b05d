"""Losses and gradients equal those of TransfoXL in `transformers` 4.37.2. The values are in fixtures.

README.md describes the fixtures; `make parity` computes them again and compares.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from longspan.cache import KeyValueCache, Memory
from longspan.contract import LanguageModel
from longspan.interop.transfo_xl import import_transfo_xl

FIXTURES = Path(__file__).parent / "fixtures"
CASES = ["plain", "same_length", "adaptive_div4", "adaptive_div1", "pre_norm", "tied"]
TOLERANCE = 1e-5


def load(name: str) -> LanguageModel:
    folder = FIXTURES / name
    if name == "authors":
        return import_transfo_xl(folder / "model.pt", config_path=folder / "config.json")
    return import_transfo_xl(folder)


def stream_losses(model: LanguageModel, expected: dict[str, torch.Tensor], trainable: bool) -> torch.Tensor:
    tokens, segment = expected["tokens"], int(expected["segment"])
    state, pieces = model.initial_state(2, trainable=trainable), []
    cache = Memory if trainable else KeyValueCache
    assert all(isinstance(layer, cache) for layer in state.caches)
    with torch.no_grad():
        for a in range(0, tokens.shape[1] - 1, segment):
            x, y = tokens[:, a : a + segment], tokens[:, a + 1 : a + segment + 1]
            losses, state = model.losses(x, y, state)
            pieces.append(losses)
    assert len(pieces) >= 4
    return torch.cat(pieces, dim=1)


@pytest.mark.parametrize("trainable", [True, False], ids=["memory", "key-value-cache"])
@pytest.mark.parametrize("name", CASES)
def test_losses_over_streamed_segments(name: str, trainable: bool) -> None:
    expected = load_file(FIXTURES / name / "expected.safetensors")
    found = stream_losses(load(name).eval(), expected, trainable)
    torch.testing.assert_close(found, expected["losses"], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", CASES)
def test_gradients_of_a_training_step(name: str) -> None:
    """Of the mean loss of the fourth segment, with the memory of the first three."""
    expected = load_file(FIXTURES / name / "expected.safetensors")
    model, tokens, segment = load(name).train(), expected["tokens"], int(expected["segment"])
    state = model.initial_state(2)
    for a in range(0, 4 * segment, segment):
        model.zero_grad()
        loss, state = model.training_loss(tokens[:, a : a + segment], tokens[:, a + 1 : a + segment + 1], state, 0.0)
    loss.backward()
    wanted = {key.removeprefix("grad."): value for key, value in expected.items() if key.startswith("grad.")}
    assert len(wanted) > 10
    for key, value in wanted.items():
        torch.testing.assert_close(gradient(model, key), value, rtol=0, atol=TOLERANCE, msg=key)


def gradient(model: LanguageModel, key: str) -> torch.Tensor:
    """The gradient of the parameter, or part of one, that `transformers` calls `key`."""
    parts = key.removeprefix("transformer.").split(".")
    names = {"r_w_bias": "u", "r_r_bias": "w"}
    if parts[0] in names:
        return model.get_parameter(names[parts[0]]).grad
    if parts[0] == "word_emb":
        kind = {"emb_layers": "tables", "emb_projs": "projections"}[parts[1]]
        return model.get_parameter(f"embedding.{kind}.{parts[2]}").grad
    if parts[0] == "crit":
        if parts[1] in ("cluster_weight", "cluster_bias"):
            return model.get_parameter(f"head.{parts[1]}").grad
        if parts[1] == "out_projs":
            return model.get_parameter(f"head.projections.{parts[2]}").grad
        kind = {"weight": "tables", "bias": "biases"}[parts[3]]
        return model.get_parameter(f"head.{kind}.{parts[2]}").grad
    layer = model.layers[int(parts[1])]
    inner = ".".join(parts[2:])
    if inner == "dec_attn.qkv_net.weight":
        return torch.cat([getattr(layer, name).weight.grad for name in ("query", "key", "value")])
    renamed = {
        "dec_attn.r_net.weight": "position.weight",
        "dec_attn.o_net.weight": "output.weight",
        "dec_attn.layer_norm.weight": "attention_norm.weight",
        "dec_attn.layer_norm.bias": "attention_norm.bias",
        "dec_attn.r_w_bias": "u",
        "dec_attn.r_r_bias": "w",
        "pos_ff.CoreNet.0.weight": "up.weight",
        "pos_ff.CoreNet.0.bias": "up.bias",
        "pos_ff.CoreNet.3.weight": "down.weight",
        "pos_ff.CoreNet.3.bias": "down.bias",
        "pos_ff.layer_norm.weight": "feed_forward_norm.weight",
        "pos_ff.layer_norm.bias": "feed_forward_norm.bias",
    }
    return layer.get_parameter(renamed[inner]).grad


@pytest.mark.parametrize(
    ("form", "same_as"), [("pickled", "adaptive_div4"), ("pickled_legacy", "tied"), ("authors", "adaptive_div4")]
)
def test_other_forms_of_the_same_weights(form: str, same_as: str) -> None:
    """The authors' state dict has the cluster rows in reverse order; not reversing them changes losses by over 0.01."""
    expected = load_file(FIXTURES / same_as / "expected.safetensors")
    found = stream_losses(load(form).eval(), expected, trainable=False)
    torch.testing.assert_close(found, expected["losses"], rtol=0, atol=TOLERANCE)


def test_settings_are_imported() -> None:
    reading = load("same_length").reading
    values = json.loads((FIXTURES / "same_length" / "config.json").read_text())
    assert (reading.clamp, reading.same_length, reading.memory) == (4, True, values["mem_len"])
    assert load("plain").config.shared_biases is False
    assert load("tied").config.shared_biases is True
    assert load("pre_norm").config.norm == "pre"
    assert not any("final" in name for name, _ in load("pre_norm").named_parameters()), "there is no final norm"
