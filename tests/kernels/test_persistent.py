"""The step in one kernel against the plain decoder in float64. Without a GPU its phases run one by one in Triton's
interpreter; on a GPU the single launch must equal the phases bit for bit."""

from typing import Any

import pytest
import torch

from longspan.contract import LanguageModel
from longspan.decoding.fused import FusedDecoder
from longspan.decoding.open import open_decoder
from longspan.decoding.persistent import PersistentDecoder
from longspan.decoding.rolling import RollingDecoder
from longspan.decoding.sampling import Sampling
from longspan.decoding.session import Session
from longspan.decoding.step_layers import step_layers
from longspan.kernels.one_token import persistent
from tests.models.paper import PAPER
from tests.support import build

pytest.importorskip("triton")
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here, not interpreted")
SHAPE = {"vocabulary": 11, "layers": 2, "width": 20, "heads": 2, "head_width": 9, "inner": 24, "segment": 8}
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "paper": ("transformer-xl", {"memory": 40}),
    "clamp": (
        "transformer-xl",
        {"memory": 5, "clamp": 2, "discount": 1.5, "same_length": True, "shared_biases": False},
    ),
    "pre": ("transformer-xl", {"memory": 3, "norm": "pre"}),
    "both-norms": ("longspan-xl", PAPER | {"memory": 3, "final_norm": True, "activation": "squared-relu"}),
    "qk-norm": (
        "longspan-xl",
        PAPER
        | {"memory": 2, "norm": "pre", "norm_type": "rms", "biases": False, "final_norm": True, "activation": "gelu"}
        | {"qk_norm": True, "same_length": True},
    ),
}


def make(form: str, device: str = "cpu", **values: Any) -> LanguageModel:
    family, own = FORMS[form]
    torch.manual_seed(5)
    model = build(family, SHAPE | own | values).to(device).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    return model


def open_as(kind: Any, model: LanguageModel, *programs: int) -> Any:
    state = model.initial_state(1, trainable=False)
    layers = step_layers(model, state)
    assert layers is not None
    return kind(model, state, layers, 0, *programs)


def largest_difference(decoder: Any, model: LanguageModel, steps: int, prompt: int) -> float:
    """From the plain decoder in float64, after a prompt."""
    device = next(model.parameters()).device
    reference = open_as(RollingDecoder, make_double(model))
    tokens = torch.randint(11, (1, prompt), device=device)
    decoder.prefill(tokens)
    reference.prefill(tokens)
    largest = 0.0
    for _ in range(steps):
        token = torch.randint(11, (1,), device=device)
        found, wanted = decoder.step(token).double(), reference.step(token)
        largest = max(largest, float((found - wanted).abs().max() / wanted.abs().max()))
    for name, tensor in reference.state().tensors().items():
        torch.testing.assert_close(decoder.state().tensors()[name].double(), tensor.double(), rtol=0, atol=1e-5)
    return largest


def make_double(model: LanguageModel) -> LanguageModel:
    import copy

    return copy.deepcopy(model).double()


@interpreted
@pytest.mark.parametrize(
    ("form", "prompt"),
    [
        ("clamp", 6),
        ("qk-norm", 0),
        *(pytest.param(form, 4, marks=pytest.mark.torture) for form in ("paper", "pre", "both-norms")),
    ],
)
def test_the_phases_equal_the_plain_decoder(form: str, prompt: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two programs, so that each has some rows of every product and one head."""
    monkeypatch.setattr(PersistentDecoder, "persistent", False)
    model = make(form, layers=1) if form == "qk-norm" else make(form)
    assert largest_difference(open_as(PersistentDecoder, model, 2), model, 2, prompt) < 1e-6


@interpreted
@pytest.mark.torture
@pytest.mark.parametrize("form", ["paper", "qk-norm"])
def test_one_program_computes_all_phases_in_one_launch(form: str) -> None:
    """A single program finds what it has sent itself, so it needs no phases even in the interpreter."""
    model = make(form, heads=1)
    whole = open_as(PersistentDecoder, model, 1)
    phases = open_as(PersistentDecoder, model, 1)
    phases.persistent = False
    for token in ([3], [7]):
        assert torch.equal(whole.step(torch.tensor(token)), phases.step(torch.tensor(token)))
    assert largest_difference(open_as(PersistentDecoder, model, 1), model, 1, 4) < 1e-6


@interpreted
@pytest.mark.torture
def test_slots_in_several_blocks_and_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PersistentDecoder, "persistent", False)
    monkeypatch.setattr(persistent, "SLOTS", 16)
    model = make("paper", memory=70)
    assert largest_difference(open_as(PersistentDecoder, model, 4), model, 3, 90) < 1e-6


@pytest.mark.parametrize(
    ("values", "rows", "fits"),
    [
        ({}, 1, True),
        ({}, 2, False),
        ({"cutoffs": [5]}, 1, False),
        ({"embedding_width": 8}, 1, False),
        ({"inner": 1 << 16}, 1, False),
    ],
)
def test_other_models_are_left_to_the_fused_decoder(values: dict[str, Any], rows: int, fits: bool) -> None:
    model = make("paper", **values)
    state = model.initial_state(rows, trainable=False)
    layers = step_layers(model, state)
    assert layers is not None
    assert PersistentDecoder.fits(model, state, layers) is fits


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
def test_one_launch_equals_its_phases_and_the_plain_decoder(form: str) -> None:
    model = make(form, "cuda")
    whole, phases = open_as(PersistentDecoder, model), open_as(PersistentDecoder, model)
    phases.persistent = False
    for token in torch.randint(11, (60, 1), device="cuda"):
        assert torch.equal(whole.step(token), phases.step(token))
    assert not whole.work.failed
    assert largest_difference(open_as(PersistentDecoder, model), model, 20, 7) < 1e-5


@pytest.mark.gpu
def test_a_reader_whose_words_never_come_gives_up() -> None:
    """One phase without those before it: the flag is set and the logits are NaN."""
    model = make("paper", "cuda")
    decoder = open_as(PersistentDecoder, model)
    token = torch.zeros(1, dtype=torch.int64, device="cuda")
    persistent._launch(decoder.shape, decoder.weights, decoder.work, token, decoder.count, 0, 0, persistent.HEAD)
    assert bool(decoder.work.failed)
    assert decoder.work.logits.isnan().all()


@pytest.mark.gpu
def test_greedy_text_is_that_of_the_fused_decoder() -> None:
    model = make("paper", "cuda", memory=30)
    decoder = open_decoder(model)
    assert type(decoder.decoder) is PersistentDecoder  # type: ignore[attr-defined]
    session, fused = Session(model), open_as(FusedDecoder, model)
    session.read([1, 2, 3])
    fused.prefill(torch.tensor([[1, 2]], device="cuda"))
    expected, token = [], torch.tensor([3], device="cuda")
    for _ in range(80):
        token = fused.step(token).argmax(-1)
        expected.append(int(token))
    assert list(session.write(80, Sampling(temperature=0.0))) == expected
