"""Int8 weights and cache in C against plain attention in float64 over the same quantised numbers."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from longspan import TextModel, load
from longspan.checkpoints.int8 import quantise_rows
from longspan.contract import LanguageModel
from longspan.decoding.int8 import Int8Decoder, int8_weights
from longspan.decoding.open import open_decoder
from longspan.decoding.rolling import RollingDecoder
from longspan.decoding.sampling import Sampling
from longspan.decoding.step_layers import step_layers
from longspan.kernels import int8_step
from longspan.shapes import Tensor
from longspan.tokenizers import ByteTokenizer
from longspan.training.export import export_model
from tests.models.paper import PAPER
from tests.support import build

needs_compiler = pytest.mark.skipif(int8_step.compiled() is None, reason="no C compiler")
SHAPE = {"vocabulary": 19, "layers": 2, "width": 24, "heads": 2, "head_width": 10, "inner": 40, "segment": 8}
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "paper": ("transformer-xl", {"memory": 6}),
    "clamp": ("transformer-xl", {"memory": 5, "clamp": 2, "discount": 1.5, "same_length": True, "norm": "pre"}),
    "untied": ("transformer-xl", {"memory": 6, "tie_embedding": False, "head_width": 16, "width": 64}),
    "both-norms": ("longspan-xl", PAPER | {"memory": 6, "final_norm": True, "activation": "squared-relu"}),
    "rms": (
        "longspan-xl",
        PAPER | {"memory": 6, "norm": "pre", "norm_type": "rms", "biases": False, "final_norm": True},
    ),
    "own": (
        "longspan-xl",
        {"memory": 6, "clamp": 4, "discount": 2.0, "same_length": True, "convolution": 3, "qk_norm": True},
    ),
    "gelu": ("longspan-xl", PAPER | {"memory": 6, "activation": "gelu"}),
}


def make(form: str) -> LanguageModel:
    family, values = FORMS[form]
    torch.manual_seed(5)
    model = build(family, SHAPE | values).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    return model


def restored(tensor: Tensor) -> Tensor:
    values, scale = quantise_rows(tensor)
    return values.double() * scale[..., None].double()


class Quantised(RollingDecoder):
    """The plain decoder in float64, with keys and values rounded to int8 as they are stored."""

    def write(self, n: int, key: Tensor, value: Tensor) -> None:
        super().write(n, restored(key), restored(value))


def open_as(kind: Any, model: LanguageModel) -> Any:
    state = model.initial_state(1, trainable=False)
    layers = step_layers(model, state)
    assert layers is not None
    return kind(model, state, layers, 0)


def open_reference(model: LanguageModel) -> RollingDecoder:
    """Matrices and position keys rounded to int8, everything else in float64."""
    wide = copy.deepcopy(model).double()
    with torch.no_grad():
        positions = open_as(RollingDecoder, model).positions
        for name, parameter in wide.named_parameters():
            if parameter.dim() == 2 and not f".{name}".endswith((".u", ".w", ".convolution.weight")):
                parameter.copy_(restored(parameter))
        reference = open_as(Quantised, wide)
        reference.positions = [
            (restored(r.transpose(1, 2)).transpose(1, 2), u, w)
            for (r, _, _), (_, u, w) in zip(positions, reference.positions, strict=True)
        ]
    return reference


@pytest.fixture(params=["native", "plain"])
def instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The library for this processor, and one that any processor of its kind runs."""
    if request.param == "plain":
        monkeypatch.setattr(int8_step, "OPTIONS", tuple(o for o in int8_step.OPTIONS if o != "-march=native"))
        int8_step.compiled.cache_clear()
    yield
    int8_step.compiled.cache_clear()


@needs_compiler
@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("form", FORMS)
def test_steps_equal_float64_over_the_same_quantised_numbers(form: str) -> None:
    """From an empty cache past the point where it wraps."""
    model = make(form)
    native, reference = open_as(Int8Decoder, model), open_reference(model)
    for token in torch.randint(19, (12, 1)):
        found, wanted = native.step(token).double(), reference.step(token)
        assert (found - wanted).abs().max() / wanted.abs().max() < 1e-5


@needs_compiler
@pytest.mark.usefixtures("instructions")
def test_activations_that_are_not_finite_reach_the_logits() -> None:
    model = make("both-norms")
    with torch.no_grad():
        dict(model.named_parameters())["final_norm.weight"][3] = float("nan")
    assert open_as(Int8Decoder, model).step(torch.tensor([1])).isnan().all()


@needs_compiler
@pytest.mark.parametrize("form", ["paper", "own"])
def test_the_loss_of_accuracy_is_small_and_a_state_continues_in_float32(form: str) -> None:
    model = make(form)
    native, plain = open_as(Int8Decoder, model), open_as(RollingDecoder, model)
    prompt = torch.randint(19, (1, 9))
    native.prefill(prompt)
    plain.prefill(prompt)
    for token in torch.randint(19, (4, 1)):
        found, wanted = native.step(token), plain.step(token)
        assert (found - wanted).norm() / wanted.norm() < 0.05
    continued = open_decoder(model, native.state())
    token = torch.tensor([3])
    assert type(continued) is RollingDecoder
    assert (continued.step(token) - plain.step(token)).norm() / plain.step(token).norm() < 0.05
    assert int(native.state().length[0]) == int(continued.state().length[0])


@needs_compiler
def test_forks_share_the_weights_until_they_change() -> None:
    model = make("paper")
    layers = step_layers(model, model.initial_state(1, trainable=False))
    assert layers is not None
    first = int8_weights(model, layers)
    assert int8_weights(model, layers) is first
    with torch.no_grad():
        next(model.parameters()).mul_(2)
    assert int8_weights(model, layers) is not first


def test_without_a_compiler_float32_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8_step, "compiled", lambda: None)
    assert type(open_decoder(make("paper"), int8=True)) is RollingDecoder


@needs_compiler
def test_an_int8_folder_is_decoded_with_int8(tmp_path: Path) -> None:
    """The rounded weights are rounded again without a change, so both generate the same text."""
    torch.manual_seed(1)
    model = TextModel(build("transformer-xl", SHAPE | {"vocabulary": 256, "memory": 6}), ByteTokenizer())
    model.save(tmp_path / "float")
    export_model(tmp_path / "float", tmp_path / "int8", int8=True)
    stored, asked, plain = load(tmp_path / "int8"), load(tmp_path / "float", int8=True), load(tmp_path / "float")
    assert [type(one.session().decoder) for one in (stored, asked, plain)] == [Int8Decoder, Int8Decoder, RollingDecoder]
    assert type(load(tmp_path / "int8", int8=False).session().decoder) is RollingDecoder
    greedy = Sampling(temperature=0.0)
    tokens = [list(one.session("ab").write(20, greedy)) for one in (stored, asked)]
    assert tokens[0] == tokens[1]
