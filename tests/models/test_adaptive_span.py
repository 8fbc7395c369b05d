"""Adaptive span: the mask, its cost, its penalty, and full span against plain attention."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from longspan.checkpoints.model_folder import save_model
from longspan.contract import LanguageModel
from longspan.errors import ConfigError
from longspan.kernels.relative_attention.reference import relative_scores
from longspan.kernels.span_attention import span_attention
from longspan.models.families import state_bytes
from longspan.nn.span import AdaptiveSpan
from longspan.tokenizers import ByteTokenizer
from tests.cli.conftest import Cli, cli  # noqa: F401 (a fixture)
from tests.models.paper import load_paper_weights, paper_name
from tests.support import build

SMALL = {"vocabulary": 11, "layers": 2, "width": 8, "heads": 2, "inner": 12, "segment": 4, "dropout": 0.0}


def make(dtype: torch.dtype = torch.float64, family: str = "adaptive-span", **values: object) -> LanguageModel:
    torch.manual_seed(3)
    model = build(family, {**SMALL, **values}).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.4)
    return model


def set_spans(model: LanguageModel, *layers: list[float]) -> None:
    """z of every head, in tokens."""
    with torch.no_grad():
        for layer, spans in zip(model.layers, layers, strict=True):
            layer.attention.adaptive.share.copy_(torch.tensor(spans, dtype=torch.float64) / model.config.span)


def text(rows: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(11, (rows, count + 1), generator=torch.Generator().manual_seed(5))
    return ids[:, :-1], ids[:, 1:]


def test_the_mask_equals_the_formula_of_the_paper() -> None:
    """R = 4, z = 2.5 of S = 10: 1 up to distance 2, then falling by quarters, 0 from 6.5 on."""
    adaptive = AdaptiveSpan(1, span=10, ramp=4).double()
    with torch.no_grad():
        adaptive.share.fill_(0.25)
    mask = adaptive.log_mask(9).exp().flip(1)[0]
    torch.testing.assert_close(mask, torch.tensor([1, 1, 1, 0.875, 0.625, 0.375, 0.125, 0, 0], dtype=torch.float64))


@pytest.mark.parametrize(
    ("L", "M", "C"), [(5, 7, 12), (1, 9, 10), (6, 0, 6), (150, 0, 12), (150, 5, 12), (129, 40, 12), (128, 11, 12)]
)
def test_attention_weights_are_masked_and_normalised(L: int, M: int, C: int) -> None:
    """Against the formula, with all gradients, those of the spans included; rows have different valid lengths, and one
    contains a document start. No head sees more than 12 distances, so long segments are computed in blocks."""
    B, H, D, K = 2, 3, 4, L + M
    tensors = {
        "query": torch.randn(B, H, L, D),
        "key": torch.randn(B, H, K, D),
        "value": torch.randn(B, H, K, D),
        "distance": torch.randn(H, K, D),
        "u": torch.randn(H, D),
        "w": torch.randn(H, D),
    }
    tensors = {name: t.double().requires_grad_() for name, t in tensors.items()}
    adaptive = AdaptiveSpan(H, span=10, ramp=3).double()
    with torch.no_grad():
        adaptive.share.copy_(torch.tensor([0.0, 0.33, 0.9]))
    first_key = torch.tensor([0, min(2, M)])[:, None].repeat(1, L)
    first_key[1, 70:] = M + 70
    near = {**tensors, "distance": tensors["distance"][:, K - C :]}
    found = span_attention(**near, log_mask=adaptive.log_mask(C), first_key=first_key)

    x = torch.arange(K - L, K)[:, None] - torch.arange(K)
    m = ((3 + 10 * adaptive.share[:, None, None] - x) / 3).clamp(0, 1) * (x >= 0)
    there = torch.arange(K) >= first_key[:, None, :, None]
    scores = relative_scores(*(tensors[name] for name in ("query", "key", "distance", "u", "w"))) / D**0.5
    weights = m * scores.exp() * there
    expected = weights / weights.sum(dim=-1, keepdim=True) @ tensors["value"]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    leaves = [*tensors.values(), adaptive.share]
    weight = torch.randn_like(found)
    for a, b in zip(
        torch.autograd.grad((found * weight).sum(), leaves),
        torch.autograd.grad((expected * weight).sum(), leaves),
        strict=True,
    ):
        # At z = 0 both clamps have a corner, where ours drops the gradient that points outwards.
        keep = slice(1, None) if a.shape == adaptive.share.shape else slice(None)
        torch.testing.assert_close(a[keep], b[keep], rtol=0, atol=1e-11)
    with torch.no_grad():
        same = span_attention(**near, log_mask=adaptive.log_mask(C), first_key=first_key)
    torch.testing.assert_close(same, expected, rtol=0, atol=1e-12)
    if M == 0:
        first_key[:] = 0
        masked = span_attention(**near, log_mask=adaptive.log_mask(C), first_key=first_key)
        torch.testing.assert_close(span_attention(**near, log_mask=adaptive.log_mask(C)), masked, rtol=0, atol=1e-12)


def test_full_span_equals_plain_attention() -> None:
    """Against torch, in float32, without position terms."""
    query, key, value = (torch.randn(2, 2, 12, 8) for _ in range(3))
    adaptive = AdaptiveSpan(2, span=12, ramp=5)
    with torch.no_grad():
        adaptive.share.fill_(1.0)
    none, zero = torch.zeros(2, 12, 8), torch.zeros(2, 8)
    found = span_attention(query, key, value, none, zero, zero, adaptive.log_mask(12).float())
    torch.testing.assert_close(
        found, F.scaled_dot_product_attention(query, key, value, is_causal=True), rtol=0, atol=1e-5
    )


def test_full_span_equals_transformer_xl_with_same_length() -> None:
    """Losses over a stream and every gradient, in float32."""
    xl = make(torch.float32, "transformer-xl", memory=9, same_length=True)
    model = make(torch.float32, span=9, ramp=4)
    missing = load_paper_weights(model, xl)
    assert len(missing) == 2
    assert all(name.endswith("adaptive.share") for name in missing)
    set_spans(model, [9, 9], [9, 9])
    tokens, targets = text(2, 24)
    total = {}
    for net in (xl, model):
        state, losses = net.initial_state(2), []
        for piece in range(0, 24, 6):
            here, state = net.losses(tokens[:, piece : piece + 6], targets[:, piece : piece + 6], state)
            losses.append(here)
        total[net] = torch.cat(losses, dim=1)
        total[net].mean().backward()
    torch.testing.assert_close(total[model], total[xl], rtol=0, atol=1e-5)
    expected = {name: parameter.grad for name, parameter in xl.named_parameters()}
    for name, parameter in model.named_parameters():
        if name not in missing:
            torch.testing.assert_close(parameter.grad, expected[paper_name(name)], rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize("training", [False, True])
def test_cost_falls_with_the_span(training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of keys is the segment of 4 plus the distances that the widest head sees, in training rounded up to a
    block of 64. The caches have the same size."""
    model = make(span=200, ramp=8).train(training)
    key_counts: list[int] = []
    for layer in model.layers:
        plain = layer.attention.attend

        def counted(query, key, *rest, plain=plain):
            key_counts.append(key.shape[2])
            return plain(query, key, *rest)

        monkeypatch.setattr(layer.attention, "attend", counted)
    tokens, targets = text(1, 260)
    found = {}
    for name, spans in {"wide": ([200, 0], [200, 50]), "narrow": ([0, 0], [70.5, 3])}.items():
        set_spans(model, *spans)
        with torch.no_grad():
            _, state = model.losses(tokens[:, :256], targets[:, :256])
            key_counts.clear()
            _, state = model.losses(tokens[:, 256:], targets[:, 256:], state)
        found[name] = tuple(key_counts)
        assert [cache.positions for cache in state.caches] == [keys - 4 for keys in key_counts]
        if not training:
            assert state.nbytes_per_row() == state_bytes(model)
    wide, narrow = (199 + 4, 199 + 4), (64 + 4, 128 + 4) if training else (7 + 4, 78 + 4)
    assert found == {"wide": wide, "narrow": narrow}


def test_the_cost_of_a_long_segment_follows_from_its_spans() -> None:
    """Floating-point operations counted by torch: with short spans, twice the tokens are twice the work."""
    model = make(torch.float32, span=2048, ramp=32).train()

    def work(count: int, *spans: list[float]) -> int:
        set_spans(model, *spans)
        with FlopCounterMode(display=False) as counter:
            model.losses(*text(1, count))[0].mean().backward()
        return counter.get_total_flops()

    short, long = (work(count, [0, 0], [0, 3]) for count in (1024, 2048))
    assert long == pytest.approx(2 * short, rel=0.02)
    assert work(2048, [2048, 0], [0, 3]) > 5 * long


def test_a_stream_continues_when_spans_shrink_or_grow() -> None:
    """A cache of wide spans gives the same losses as that cache cut to the narrow spans."""
    model = make(span=32, ramp=2).eval()
    tokens, targets = text(2, 30)
    set_spans(model, [20, 3], [20, 3])
    _, wide = model.losses(tokens[:, :26], targets[:, :26])
    set_spans(model, [4, 3], [1, 3])
    found, _ = model.losses(tokens[:, 26:], targets[:, 26:], wide)
    assert [cache.positions for cache in wide.caches] == [21, 21]
    first, second = wide.caches
    narrow = replace(wide, caches=(first.trim(5), second.trim(4)), length=wide.length.clamp(max=5))
    expected, after = model.losses(tokens[:, 26:], targets[:, 26:], narrow)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    set_spans(model, [20, 3], [20, 3])
    _, grown = model.losses(tokens[:, :4], targets[:, :4], after)
    assert grown.length.tolist() == [9, 9]


def test_reach_is_the_distance_of_the_farthest_influence() -> None:
    model = make(span=12, ramp=3).eval()
    set_spans(model, [0.5, 2], [4.2, 1])
    assert model.distances_seen() == [5, 8]
    tokens, targets = text(1, 30)
    plain, _ = model.losses(tokens, targets)
    for lag, visible in ((model.reach(), True), (model.reach() + 1, False)):
        changed = tokens.clone()
        changed[0, 29 - lag] = (changed[0, 29 - lag] + 1) % 11
        moved, _ = model.losses(changed, targets)
        assert (float((moved - plain)[0, -1].detach().abs()) > 1e-14) == visible, lag


def test_the_penalty_is_on_the_mean_span_of_every_layer() -> None:
    model = make(span=100, ramp=8, span_penalty=0.01).train()
    set_spans(model, [10, 30], [0, 50])
    tokens, targets = text(2, 8)
    loss, _ = model.training_loss(tokens, targets)
    plain = model.losses(tokens, targets)[0].mean()
    torch.testing.assert_close(loss - plain, torch.tensor(0.01 * (20 + 25), dtype=torch.float64), rtol=0, atol=1e-9)
    torch.testing.assert_close(model.eval().training_loss(tokens, targets)[0], plain)


def test_spans_can_shrink_to_zero_and_grow_again() -> None:
    """A large penalty drives spans to zero and not below; with the opposite sign they grow again."""
    model = make(span=40, ramp=4).train()
    set_spans(model, [20, 8], [12, 2])
    optimizer = torch.optim.Adam([layer.attention.adaptive.share for layer in model.layers], lr=0.05)
    tokens, targets = text(2, 8)
    highest = []
    for step in range(60):
        loss, _ = model.training_loss(tokens, targets)
        sign = 1 if step < 30 else -1
        (1e-6 * loss + sign * model.spans().sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
        highest.append(float(model.spans().detach().max()))
        assert min(float(n.attention.adaptive.share.detach().min()) for n in model.layers) > -0.6
    assert highest[29] == 0
    assert min(model.spans().flatten().tolist()) > 10


def test_info_reports_the_spans(cli: Cli, tmp_path: Path) -> None:  # noqa: F811
    model = make(torch.float32, vocabulary=256, span=64)
    set_spans(model, [16, 32], [0, 64])
    save_model(tmp_path / "m", model, ByteTokenizer(), notes=[])
    facts = cli("info", "m", "--json").json
    assert facts["span_mean_by_layer"] == [24.0, 32.0]
    assert facts["span_max_by_layer"] == [32.0, 64.0]
    assert facts["reach"] == 63 + 63
    assert "span_max_by_layer" in cli("info", "m").out


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"span": 0}, r"model\.span=0.* 1"),
        ({"ramp": 0}, r"model\.ramp=0.* 1"),
        ({"span_penalty": -1.0}, r"model\.span_penalty=-1\.0"),
    ],
)
def test_an_invalid_config_is_refused_with_the_key_and_its_value(values: dict, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        build("adaptive-span", SMALL | values)
