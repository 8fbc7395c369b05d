"""Query-key norm: attention against its equation, and the effect of the norm in every family."""

import pytest
import torch

from longspan.cache import SegmentMask
from longspan.config import keys
from longspan.errors import ConfigError
from longspan.models.families import family, known_families
from longspan.nn.attention import Attention
from longspan.training.optimizers import hidden_matrices
from tests.support import READING, build

SMALL = {"vocabulary": 13, "layers": 2, "width": 12, "heads": 2, "inner": 16, "segment": 16, "dropout": 0.0}
FORMS: dict[str, dict[str, object]] = {
    "longspan-xl": {"memory": 8},
    "rotary": {"memory": 8},
    "vanilla": {},
    "compressive": {"memory": 8, "compressed": 4, "rate": 2},
    "adaptive-span": {"span": 9, "ramp": 3},
    "universal": {"steps": 2},
    "evolved": {},
    "sparse": {"stride": 4},
    "longformer": {"window": 4, "global_tokens": 2},
    "bigbird": {"block": 2},
}


def rms_norm(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    return gain * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


@torch.no_grad()
def test_queries_and_keys_are_normed_before_u_and_w_are_added() -> None:
    """Head by head and query by query, with five positions of memory before six of the segment."""
    torch.manual_seed(2)
    attention = Attention(12, 3, 4, 0.0, 0.0, qk_norm=True).double()
    for parameter in attention.parameters():
        parameter.normal_()
    r, u, w = (torch.randn(*shape, 4, dtype=torch.float64) for shape in ((3, 11), (3,), (3,)))
    context = torch.randn(1, 11, 12, dtype=torch.float64)
    query, (key, value) = attention.queries(context[:, 5:]), attention.keys_values(context)
    mask = SegmentMask(5, 6, 5, None, None, None)
    found = attention.attend(query, key, value, mask, (r, u, w))
    weight = dict(attention.named_parameters())
    read = torch.zeros(6, 12, dtype=torch.float64)
    for head in range(3):
        part = slice(4 * head, 4 * head + 4)
        q, k, v = (context[0] @ weight[f"{name}.weight"][part].T for name in ("query", "key", "value"))
        q, k = rms_norm(q, weight["query_norm.weight"]), rms_norm(k, weight["key_norm.weight"])
        for i in range(5, 11):
            distance = r[head, 10 - i :]  # for the keys 0, ..., i: column 10 - d is distance d
            score = (k[: i + 1] @ (q[i] + u[head]) + distance @ (q[i] + w[head])) / 2
            read[i - 5, part] = score.softmax(0) @ v[: i + 1]
    torch.testing.assert_close(found[0], read @ weight["output.weight"].T, rtol=0, atol=1e-12)


def test_every_family_with_qk_norm_is_tested() -> None:
    assert {name for name in known_families() if "qk_norm" in keys(family(name).Config)} == {*FORMS, "reformer"}


def losses_after_scaling(name: str, qk_norm: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Training losses of two segments, and the same with the weights of queries and keys multiplied by three."""
    torch.manual_seed(3)
    known = {*keys(family(name).Config), *READING}
    model = build(name, {k: v for k, v in SMALL.items() if k in known} | FORMS[name] | {"qk_norm": qk_norm}).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    tokens = torch.randint(13, (2, 33))

    def stream_losses() -> torch.Tensor:
        state, losses = model.initial_state(2), []
        for at in (0, 16):
            segment = (tokens[:, at : at + 16], tokens[:, at + 1 : at + 17])
            loss, state = model.training_loss(*segment, state, 0.0)
            losses.append(loss)
        return torch.stack(losses)

    with torch.no_grad():
        before = stream_losses()
        for path, module in model.named_modules():
            if isinstance(module, torch.nn.Linear) and path.endswith(("query", "key")):
                module.weight.mul_(3)
        return before, stream_losses()


@pytest.mark.parametrize("name", FORMS)
def test_with_the_norm_losses_do_not_depend_on_the_scale_of_queries_and_keys(name: str) -> None:
    """Including those of global tokens and of the compression loss. Without the norm, losses change."""
    before, after = losses_after_scaling(name, qk_norm=True)
    torch.testing.assert_close(after, before, rtol=0, atol=1e-4)
    before, after = losses_after_scaling(name, qk_norm=False)
    assert (after - before).abs().max() > 1e-3


def test_a_reformer_refuses_qk_norm() -> None:
    with pytest.raises(ConfigError, match=r"model\.qk_norm.*false"):
        build("reformer", {"qk_norm": True})


def test_gains_start_near_one_and_are_not_matrices_for_the_optimizer() -> None:
    plain, model = (build("longspan-xl", SMALL | {"memory": 4, "qk_norm": value}) for value in (False, True))
    gains = {name: p for name, p in model.named_parameters() if name.endswith(("query_norm.weight", "key_norm.weight"))}
    assert len(gains) == 2 * 2
    assert all(0.8 < float(p.detach().min()) <= float(p.detach().max()) < 1.2 for p in gains.values())
    assert model.parameter_count - plain.parameter_count == 2 * 2 * 6
    assert hidden_matrices(model) == hidden_matrices(plain)
