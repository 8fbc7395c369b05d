"""Rotary positions against complex numbers, and the model against its equations in float64."""

import pytest
import torch
from torch.nn import functional as F

from longspan.errors import ConfigError
from longspan.kernels.causal_attention import _blocks, block_mask, causal_attention
from longspan.nn.positions import Rotation, rotary_table
from tests.support import build

CPU = torch.device("cpu")
LIKE = torch.zeros((), dtype=torch.float64)


def rotated(x: torch.Tensor, first: int = 0) -> torch.Tensor:
    """Each pair as one complex number times e^(i position frequency)."""
    half = x.shape[-1] // 2
    frequency = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = (first + torch.arange(x.shape[-2], dtype=torch.float64))[:, None] * frequency
    z = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([z.real, z.imag], dim=-1)


def test_rotation_is_multiplication_by_a_complex_number() -> None:
    x = torch.randn(2, 3, 17, 10, dtype=torch.float64)
    rotate = Rotation(rotary_table(40, 10, LIKE)).last(17)
    torch.testing.assert_close(rotate(x), rotated(x, first=23), rtol=0, atol=1e-12)


@torch.no_grad()
def test_the_model_equals_its_equations() -> None:
    torch.manual_seed(3)
    model = build(
        "rotary", {"vocabulary": 11, "layers": 2, "width": 12, "heads": 3, "inner": 20, "segment": 9, "memory": 4}
    )
    model = model.double().eval()
    for parameter in model.parameters():
        parameter.normal_(0, 0.4)
    tokens = torch.randint(11, (1, 9))
    w = dict(model.named_parameters())

    def rms(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * gain

    h = w["embedding.tables.0"][tokens[0]] * 12**0.5
    hidden = torch.ones(9, 9, dtype=torch.bool).triu(1)
    for n in range(2):
        at = f"layers.{n}."
        x = rms(h, w[at + "attention_residual.norm.weight"])
        q, k, v = (x @ w[f"{at}attention.{part}.weight"].T for part in ("query", "key", "value"))
        read = []
        for head in range(3):
            part = slice(4 * head, 4 * head + 4)
            scores = (rotated(q[:, part]) @ rotated(k[:, part]).T / 2).masked_fill(hidden, -torch.inf)
            read.append(scores.softmax(-1) @ v[:, part])
        h = h + torch.cat(read, 1) @ w[at + "attention.output.weight"].T
        x = rms(h, w[at + "feed_forward_residual.norm.weight"])
        gate, up = (x @ w[f"{at}feed_forward.{part}.weight"].T for part in ("gate", "up"))
        h = h + (F.silu(gate) * up) @ w[at + "feed_forward.down.weight"].T
    logits = rms(h, w["final_norm.weight"]) @ w["embedding.tables.0"].T + w["head.biases.0"]
    torch.testing.assert_close(model(tokens)[0][0], logits, rtol=0, atol=1e-10)


def test_an_odd_head_width_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.head_width=5"):
        build("rotary", {"head_width": 5})


@pytest.mark.parametrize(("L", "K"), [(1, 1), (130, 130), (128, 300), (200, 513), (63, 190)])
@pytest.mark.parametrize("window", [None, 1, 100, 128, 400])
@pytest.mark.parametrize("documents", [False, True])
def test_block_mask_agrees_with_the_mask_entry_by_entry(L: int, K: int, window: int | None, documents: bool) -> None:
    """The blocks that are computed cover all visible entries, and blocks marked full have no masked entry."""
    torch.manual_seed(L + K)
    place = torch.arange(K - L, K)
    first = torch.minimum(torch.randint(0, K, (2, L)).sort(1).values, place) if documents else None
    mask = block_mask(torch.zeros(2, 1, L, 16), K, window, first)
    i, j = torch.arange(L)[:, None], torch.arange(K)
    for row in range(2):
        gap = i + K - L - j
        seen = (gap >= 0) & (gap < (window or K + 1))
        if first is not None:
            seen &= j >= first[row][:, None]
        assert torch.equal(mask.mask_mod(torch.tensor(row), torch.tensor(0), i, j).expand(L, K), seen)
        some, full = (blocks[min(row, blocks.shape[0] - 1), 0] for blocks in _blocks(L, K, window, first, CPU))
        spread = lambda blocks: blocks.repeat_interleave(128, 0)[:L].repeat_interleave(128, 1)[:, :K]  # noqa: E731
        assert not (seen & ~spread(some)).any()
        assert not (~seen & spread(full)).any()


@pytest.mark.gpu
@pytest.mark.parametrize(("L", "K"), [(63, 63), (130, 300), (512, 1024), (500, 513)])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("documents", [False, True])
def test_flex_form_on_cuda(L: int, K: int, window: int | None, documents: bool) -> None:
    torch.manual_seed(1)
    shapes = [(2, 3, L, 64), (2, 3, K, 64), (2, 3, K, 64)]
    ours = [torch.randn(s, device="cuda", requires_grad=True) for s in shapes]
    exact = [t.detach().double().cpu().requires_grad_() for t in ours]
    place = torch.arange(K - L, K)
    first = torch.minimum(torch.randint(0, K, (2, L)).sort(1).values, place) if documents else None
    out = causal_attention(*ours, window=window, first_key=None if first is None else first.cuda())
    wanted = causal_attention(*exact, window=window, first_key=first)
    grad = torch.randn_like(out)
    out.backward(grad)
    wanted.backward(grad.double().cpu())
    for a, b in [(out, wanted), *((x.grad, y.grad) for x, y in zip(ours, exact, strict=True))]:
        assert (a.double().cpu() - b).abs().max() < 2e-3 * b.abs().max()
