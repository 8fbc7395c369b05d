"""One-token decoding against the layers of the model: the rolling cache, the fused kernels, and both in a CUDA
graph."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from longspan import cuda_graphs
from longspan.contract import Decoder, LanguageModel, State
from longspan.cuda_graphs import GraphDecoder
from longspan.decoding.fused import FusedDecoder
from longspan.decoding.open import open_decoder
from longspan.decoding.rolling import RollingDecoder
from longspan.decoding.sampling import Sampling
from longspan.decoding.session import Session
from longspan.decoding.step_layers import step_layers
from longspan.decoding.stream import StreamDecoder
from longspan.kernels import one_token
from tests.models.paper import PAPER
from tests.support import build

pytest.importorskip("triton")
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here, not interpreted")
SHAPE = {"vocabulary": 19, "layers": 2, "width": 24, "heads": 1, "head_width": 10, "inner": 40, "segment": 8}
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "paper": ("transformer-xl", {"memory": 40}),
    "paper-clamp": (
        "transformer-xl",
        {"memory": 5, "clamp": 2, "discount": 1.5, "same_length": True, "shared_biases": False},
    ),
    "paper-pre": ("transformer-xl", {"memory": 12, "norm": "pre"}),
    "paper-adaptive": ("transformer-xl", {"memory": 12, "cutoffs": [7], "div_val": 2}),
    "default": ("longspan-xl", {"memory": 20}),
    "plain": ("longspan-xl", PAPER | {"memory": 40}),
    "clamp": (
        "longspan-xl",
        PAPER | {"memory": 5, "clamp": 2, "discount": 1.5, "same_length": True, "shared_biases": False},
    ),
    "pre": ("longspan-xl", PAPER | {"memory": 20, "norm": "pre", "final_norm": True, "activation": "squared-relu"}),
    "rms": (
        "longspan-xl",
        PAPER | {"memory": 12, "norm": "pre", "norm_type": "rms", "biases": False, "log_distances": True},
    ),
    "gelu": ("longspan-xl", PAPER | {"memory": 12, "norm_type": "rms", "biases": False, "activation": "gelu"}),
    "shaw": ("longspan-xl", PAPER | {"memory": 12, "position": "shaw", "final_norm": True}),
    "adaptive": ("longspan-xl", PAPER | {"memory": 12, "cutoffs": [7], "div_val": 2}),
    "convolution": ("longspan-xl", PAPER | {"memory": 12, "convolution": 3, "norm_type": "rms"}),
    "qk-norm": (
        "longspan-xl",
        PAPER | {"memory": 5, "same_length": True, "heads": 2, "qk_norm": True, "convolution": 2, "norm": "pre"},
    ),
}
QUICK = {"paper", "clamp", "adaptive", "qk-norm"}
# The fused kernels do not have these activations; the rolling decoder does.
ALL_FORMS = FORMS | {
    "gated": ("longspan-xl", PAPER | {"memory": 12, "activation": "swiglu"}),
    "swish": ("longspan-xl", PAPER | {"memory": 12, "activation": "swish"}),
}


def build_form(form: str) -> LanguageModel:
    family, values = ALL_FORMS[form]
    return build(family, SHAPE | values)


def fused(model: LanguageModel, state: State) -> Decoder:
    return FusedDecoder(model, state, step_layers(model, state), 0)


def rolling(model: LanguageModel, state: State) -> Decoder:
    return RollingDecoder(model, state, step_layers(model, state), 0)


def captured(model: LanguageModel, state: State) -> Decoder:
    return GraphDecoder(fused(model, state))


def largest_difference(
    form: str, rows: int, device: str, dtype: torch.dtype, make: Callable[[LanguageModel, State], Decoder]
) -> float:
    """Relative difference from StreamDecoder, which calls the model's layers: a prompt, some steps, another prompt and
    some more steps. The states at the end must agree as well."""
    torch.manual_seed(5)
    model = build_form(form).to(device, dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    state = model.initial_state(rows, trainable=False)
    decoder, reference = make(model, state), StreamDecoder(model, state)
    largest = 0.0
    for prompt, steps in ((3, 3), (11, 2)):
        tokens = torch.randint(19, (rows, prompt), device=device)
        decoder.prefill(tokens)
        reference.prefill(tokens)
        for _ in range(steps):
            token = torch.randint(19, (rows,), device=device)
            found, wanted = decoder.step(token).double(), reference.step(token).double()
            largest = max(largest, float((found - wanted).abs().max() / wanted.abs().max()))
    found = decoder.state().tensors()
    for name, tensor in reference.state().tensors().items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-5 if dtype == torch.float32 else 0.1)
    return largest


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("form", ALL_FORMS)
def test_the_rolling_decoder_equals_the_layers(form: str, rows: int) -> None:
    assert largest_difference(form, rows, "cpu", torch.float32, rolling) < 1e-5


@pytest.mark.parametrize("form", ALL_FORMS)
def test_a_cpu_decodes_on_a_rolling_cache(form: str) -> None:
    assert type(open_decoder(build_form(form).eval())) is RollingDecoder


def test_logits_of_a_step_may_be_modified() -> None:
    logits = open_decoder(build("transformer-xl", SHAPE).eval()).step(torch.zeros(1, dtype=torch.int64))
    logits[:, 0] = 7.0
    assert logits[0, 0] == 7.0


def test_a_model_in_training_mode_applies_dropout_at_every_step() -> None:
    model = build("transformer-xl", {**SHAPE, "memory": 4, "dropout": 0.5}).train()
    token = torch.zeros(1, dtype=torch.int64)
    assert not torch.equal(open_decoder(model).step(token), open_decoder(model).step(token))


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "rows"),
    [
        *(pytest.param(form, 1, marks=() if form in QUICK else pytest.mark.torture) for form in FORMS),
        *(pytest.param(form, 5, marks=pytest.mark.torture) for form in ("plain", "rms")),
    ],
)
def test_interpreted_kernels_equal_the_layers(form: str, rows: int) -> None:
    assert largest_difference(form, rows, "cpu", torch.float32, fused) < 1e-5


@interpreted
def test_a_softmax_split_into_parts_equals_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_token, "SLOTS", 16)
    assert one_token.split_count(1, 41) > 1
    assert largest_difference("plain", 1, "cpu", torch.float32, fused) < 1e-5


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Dependent launch in the interpreter: kernels load early, and the names of what they call are recorded."""
    from longspan.kernels.one_token import kernels, split_kernel

    calls: list[str] = []
    for name, module in itertools.product(("let_next_start", "after_previous"), (kernels, split_kernel)):
        monkeypatch.setattr(module, name, lambda _, name=name: calls.append(name))
    monkeypatch.setattr(one_token, "_launch", lambda _: {"PDL": True, "launch_pdl": False})
    return calls


@interpreted
@pytest.mark.torture
@pytest.mark.parametrize(("form", "rows", "slots"), [("plain", 1, 16), ("paper-clamp", 4, 32)])
def test_kernels_that_load_early_equal_the_layers(
    form: str, rows: int, slots: int, early: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With parts of the softmax and without, and with fewer slots than a block."""
    monkeypatch.setattr(one_token, "SLOTS", slots)
    assert largest_difference(form, rows, "cpu", torch.float32, fused) < 1e-5
    assert early[::2] == ["let_next_start"] * (len(early) // 2)


@interpreted
@pytest.mark.parametrize("splits", [1, 3])
def test_slots_that_are_loaded_early_equal_float64(
    splits: int, early: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three rows: one empty, one partly filled, one that has wrapped around. Two blocks, so one of three parts has
    none."""
    B, S, D, C = 3, 21, 10, 12
    torch.manual_seed(1)
    monkeypatch.setattr(one_token, "walk", lambda *_: one_token.Walk(16, splits, 4, 1))
    qkv, keys, values, r = (
        torch.randn(B, 3, 1, D),
        torch.randn(B, 1, S, D),
        torch.randn(B, 1, S, D),
        torch.randn(1, C, D),
    )
    u, w, count, out = torch.randn(1, D), torch.randn(1, D), torch.tensor([0, 9, 50]), torch.zeros(B, 1, D)
    slots = (keys.clone(), values.clone())
    one_token.rolling_attention(qkv, *slots, r, u, w, count, torch.empty(B, splits * (D + 2)), out)
    assert early[:2] == ["let_next_start", "after_previous"]
    for b, before in enumerate(count.tolist()):
        q, *new = qkv[b, :, 0].double()
        seen = range(min(before + 1, S))
        at = [(before - away) % S for away in seen]
        k, v = (
            given[b, 0].double().index_copy(0, torch.tensor([at[0]]), part[None])[at]
            for given, part in zip((keys, values), new, strict=True)
        )
        far = r[0].double()[[C - 1 - min(away, C - 1) for away in seen]]
        chances = (((q + u[0]) @ k.T + (q + w[0]) @ far.T) * D**-0.5).softmax(0)
        torch.testing.assert_close(out[b, 0].double(), chances @ v, rtol=0, atol=1e-5)
        assert torch.equal(slots[0][b, 0, at[0]], qkv[b, 1, 0])


@interpreted
@pytest.mark.usefixtures("early")
@pytest.mark.parametrize(("N", "K"), [(1030, 40), (20, 300), (70, 1024)])
def test_tiles_for_early_weights_equal_float64(N: int, K: int) -> None:
    """float16 rows with a mean of five deviations, whose variance is computed in one pass. (The interpreter has no
    product of bfloat16.)"""
    torch.manual_seed(2)
    x, kept = ((torch.randn(5, size) + 5).half() for size in (K, N))
    weight, bias, out = torch.randn(N, K).half() * K**-0.5, torch.randn(N).half(), torch.zeros(5, N)
    inside, residual = (torch.nn.LayerNorm(size).half().requires_grad_(False) for size in (K, N))
    torch.nn.init.normal_(residual.weight)
    norm = one_token.Norm.of(inside) if K < 1024 else None
    one_token.linear(
        x, weight, bias, out, norm=norm, residual=kept, residual_norm=one_token.Norm.of(residual),
        scratch=one_token.Scratch.of(5, N, x.device),
    )  # fmt: skip
    given = inside.double()(x.double()) if norm else x.double()
    expected = residual.double()(kept.double()) + torch.nn.functional.linear(given, weight.double(), bias.double())
    assert float((out - expected).abs().max() / expected.abs().max()) < 5e-3


@interpreted
def test_programs_that_share_a_product_equal_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice with the same tickets; lengths that fit no tile."""
    monkeypatch.setattr(one_token, "tiles", lambda *_: one_token.Tiles(16, 16, 16, 4, 1, 3))
    torch.manual_seed(1)
    x, weight, bias, kept = torch.randn(5, 41), torch.randn(19, 41), torch.randn(19), torch.randn(5, 19)
    norm, scratch = torch.nn.LayerNorm(19), one_token.Scratch.of(5, 19, x.device)
    torch.nn.init.normal_(norm.weight)
    for factor in (1.0, 2.0):
        out = torch.zeros(5, 19)
        one_token.linear(
            x * factor, weight, bias, out, activation="relu", residual=kept, residual_norm=one_token.Norm.of(norm),
            scratch=scratch,
        )  # fmt: skip
        expected = norm(kept) + torch.relu(torch.nn.functional.linear(x * factor, weight, bias))
        torch.testing.assert_close(out, expected.detach(), rtol=0, atol=1e-5)
    assert scratch.tickets[:2].tolist() == [6, 6]


class FakeGraph(torch.cuda.CUDAGraph):
    """A CUDA graph on a machine without CUDA: a replay runs the work."""

    def __new__(cls, *_: Any) -> "FakeGraph":
        return object.__new__(cls)

    def __init__(self, work: Callable[[], Any], generator: torch.Generator | None = None) -> None:
        del generator
        self.replay = work  # type: ignore[method-assign]


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("form", [pytest.param("paper", marks=pytest.mark.torture), "convolution"])
def test_the_warm_up_before_a_capture_changes_no_state(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first token must enter the caches once, those of the convolution included."""
    monkeypatch.setattr(cuda_graphs, "warm_up", lambda work: work())
    monkeypatch.setattr(cuda_graphs, "capture", FakeGraph)
    assert largest_difference(form, 1, "cpu", torch.float32, captured) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 17, 64])
@pytest.mark.parametrize("form", FORMS)
def test_captured_steps_equal_the_layers(form: str, rows: int) -> None:
    assert largest_difference(form, rows, "cuda", torch.float32, captured) < 1e-4


@pytest.mark.gpu
def test_a_bfloat16_model_is_captured_and_allocates_nothing_per_token() -> None:
    assert largest_difference("paper", 1, "cuda", torch.bfloat16, captured) < 5e-2
    assert largest_difference("plain", 1, "cuda", torch.bfloat16, captured) < 5e-2
    model = build("transformer-xl", {**SHAPE, "memory": 300}).cuda().bfloat16().eval()
    decoder, token = open_decoder(model), torch.zeros(1, dtype=torch.int64, device="cuda")
    assert isinstance(decoder, GraphDecoder)
    assert isinstance(decoder.decoder, FusedDecoder)
    decoder.step(token)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(20):
        decoder.step(token)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@pytest.mark.gpu
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.7, top_k=5, top_p=0.9, min_p=0.01)])
def test_captured_sampling_follows_the_seed(sampling: Sampling) -> None:
    """Two sessions with one seed generate the same tokens, another seed gives others, and a pause changes nothing."""
    torch.manual_seed(1)
    model = build("transformer-xl", {**SHAPE, "memory": 30}).cuda().eval()

    def generate(seed: int, counts: tuple[int, ...]) -> list[int]:
        session = Session(model, seed=seed)
        session.read([1, 2, 3])
        return [token for count in counts for token in session.write(count, sampling)]

    assert generate(1, (40,)) == generate(1, (40,)) == generate(1, (7, 33))
    assert generate(1, (40,)) != generate(2, (40,))
    decoder = open_decoder(model)
    decoder.prefill(torch.tensor([[1, 2]], device="cuda"))
    greedy, token = [], torch.tensor([3], device="cuda")
    for _ in range(20):
        token = decoder.step(token).argmax(-1)
        greedy.append(int(token))
    session = Session(model)
    session.read([1, 2, 3])
    assert list(session.write(20, Sampling(temperature=0.0))) == greedy
