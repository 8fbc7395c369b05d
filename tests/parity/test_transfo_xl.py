"""Losses and gradients against `transformers` 4.37.2's TransfoXL, from fixtures that `make parity` makes again.

README.md in this folder says what the fixtures hold.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from longspan.checkpoints.convert import import_transfo_xl
from longspan.contract import LanguageModel

FIXTURES = Path(__file__).parent / "fixtures"
CASES = ["plain", "same_length", "adaptive_div4", "adaptive_div1", "pre_norm", "tied"]
TOLERANCE = 1e-5


def load(name: str) -> LanguageModel:
    folder = FIXTURES / name
    if name == "authors":
        return import_transfo_xl(folder / "model.pt", config_path=folder / "config.json")
    return import_transfo_xl(folder)


def streamed(model: LanguageModel, expected: dict[str, torch.Tensor], projected: bool) -> torch.Tensor:
    tokens, segment = expected["tokens"], int(expected["segment"])
    state, pieces = model.initial_state(2, projected=projected), []  # type: ignore[call-arg]
    with torch.no_grad():
        for a in range(0, tokens.shape[1] - 1, segment):
            x, y = tokens[:, a : a + segment], tokens[:, a + 1 : a + segment + 1]
            losses, state = model.losses(x, y, state)
            pieces.append(losses)
    assert len(pieces) >= 4
    return torch.cat(pieces, dim=1)


@pytest.mark.parametrize("projected", [False, True], ids=["hidden", "projected"])
@pytest.mark.parametrize("name", CASES)
def test_losses_over_streamed_segments(name: str, projected: bool) -> None:
    expected = load_file(FIXTURES / name / "expected.safetensors")
    found = streamed(load(name).eval(), expected, projected)
    torch.testing.assert_close(found, expected["losses"], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", CASES)
def test_gradients_of_a_training_step(name: str) -> None:
    """The mean loss of the fourth segment, memory carried from the first three."""
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
    """The gradient of the parameter (or part of one) the package calls `key`."""
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
        return torch.cat([getattr(layer.attention, name).weight.grad for name in ("query", "key", "value")])
    renamed = {
        "dec_attn.r_net.weight": "distances.projection.weight",
        "dec_attn.o_net.weight": "attention.output.weight",
        "dec_attn.layer_norm.weight": "attention_residual.norm.weight",
        "dec_attn.layer_norm.bias": "attention_residual.norm.bias",
        "dec_attn.r_w_bias": "u",
        "dec_attn.r_r_bias": "w",
        "pos_ff.CoreNet.0.weight": "feed_forward.up.weight",
        "pos_ff.CoreNet.0.bias": "feed_forward.up.bias",
        "pos_ff.CoreNet.3.weight": "feed_forward.down.weight",
        "pos_ff.CoreNet.3.bias": "feed_forward.down.bias",
        "pos_ff.layer_norm.weight": "feed_forward_residual.norm.weight",
        "pos_ff.layer_norm.bias": "feed_forward_residual.norm.bias",
    }
    return layer.get_parameter(renamed[inner]).grad


@pytest.mark.parametrize(
    ("form", "same_as"), [("pickled", "adaptive_div4"), ("pickled_legacy", "tied"), ("authors", "adaptive_div4")]
)
def test_other_forms_of_the_same_weights(form: str, same_as: str) -> None:
    """The authors' state dict numbers the clusters from the other end; unturned it would be 0.01 nats off and more."""
    expected = load_file(FIXTURES / same_as / "expected.safetensors")
    found = streamed(load(form).eval(), expected, projected=True)
    torch.testing.assert_close(found, expected["losses"], rtol=0, atol=TOLERANCE)


def test_configs_are_carried_across() -> None:
    model = load("same_length")
    values = json.loads((FIXTURES / "same_length" / "config.json").read_text())
    assert (model.config.clamp, model.config.same_length, model.config.memory) == (4, True, values["mem_len"])
    assert load("plain").config.shared_biases is False
    assert load("tied").config.shared_biases is True
    assert (load("pre_norm").config.norm, load("pre_norm").config.final_norm) == ("pre", False)
