"""Norms of queries and keys: attention against its equation, and what every family makes of them."""

import pytest
import torch

from longspan.config import keys
from longspan.errors import ConfigError
from longspan.layers.attention import Attention
from longspan.models.families import FAMILIES, build
from longspan.training.optimizers import hidden_matrices

SMALL = {"vocabulary": 13, "layers": 2, "width": 12, "heads": 2, "inner": 16, "segment": 16, "dropout": 0.0}
FORMS: dict[str, dict[str, object]] = {
    "transformer-xl": {"memory": 8},
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


def normed(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
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
    found = attention.attend(query, key, value, (r, u, w))
    weight = dict(attention.named_parameters())
    read = torch.zeros(6, 12, dtype=torch.float64)
    for head in range(3):
        part = slice(4 * head, 4 * head + 4)
        q, k, v = (context[0] @ weight[f"{name}.weight"][part].T for name in ("query", "key", "value"))
        q, k = normed(q, weight["query_norm.weight"]), normed(k, weight["key_norm.weight"])
        for i in range(5, 11):
            distance = r[head, 10 - i :]  # of the keys 0, ..., i: column 10 - d is distance d
            score = (k[: i + 1] @ (q[i] + u[head]) + distance @ (q[i] + w[head])) / 2
            read[i - 5, part] = score.softmax(0) @ v[: i + 1]
    torch.testing.assert_close(found[0], read @ weight["output.weight"].T, rtol=0, atol=1e-12)


def test_every_family_that_takes_the_key_is_here() -> None:
    assert {name for name, family in FAMILIES.items() if "qk_norm" in keys(family.Config)} == {*FORMS, "reformer"}


def losses_after_scaling(family: str, qk_norm: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Training losses of two segments, and the same with all that makes queries and keys three times as large."""
    torch.manual_seed(3)
    known = keys(FAMILIES[family].Config)
    model = build(
        family, {k: v for k, v in SMALL.items() if k in known} | FORMS[family] | {"qk_norm": qk_norm}
    ).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    tokens = torch.randint(13, (2, 33))

    def read() -> torch.Tensor:
        state, losses = model.initial_state(2), []
        for at in (0, 16):
            asked = (tokens[:, at : at + 16], tokens[:, at + 1 : at + 17])
            loss, state = model.training_loss(*asked, state, 0.0)
            losses.append(loss)
        return torch.stack(losses)

    with torch.no_grad():
        before = read()
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear) and name.endswith(("query", "key")):
                module.weight.mul_(3)
        return before, read()


@pytest.mark.parametrize("family", FORMS)
def test_a_norm_forgets_how_long_queries_and_keys_are(family: str) -> None:
    """Also those of global tokens, and those by which a compressor learns; without the norms it is felt."""
    before, after = losses_after_scaling(family, qk_norm=True)
    torch.testing.assert_close(after, before, rtol=0, atol=1e-4)
    before, after = losses_after_scaling(family, qk_norm=False)
    assert (after - before).abs().max() > 1e-3


def test_a_reformer_says_why_it_has_none() -> None:
    with pytest.raises(ConfigError, match="whose keys are its queries and already brought to length 1"):
        build("reformer", {"qk_norm": True})


def test_gains_begin_near_one_and_are_no_matrices_to_the_optimiser() -> None:
    plain, model = (build("transformer-xl", SMALL | {"memory": 4, "qk_norm": value}) for value in (False, True))
    gains = {name: p for name, p in model.named_parameters() if name.endswith(("query_norm.weight", "key_norm.weight"))}
    assert len(gains) == 2 * 2
    assert all(0.8 < float(p.detach().min()) <= float(p.detach().max()) < 1.2 for p in gains.values())
    assert model.parameter_count - plain.parameter_count == 2 * 2 * 6
    assert hidden_matrices(model) == hidden_matrices(plain)
