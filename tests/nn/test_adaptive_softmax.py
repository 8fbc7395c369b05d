"""Adaptive embedding and softmax against a dense computation and torch's adaptive softmax."""

import pytest
import torch
from torch.nn import functional as F

from longspan.errors import DataError
from longspan.models.bert import MaskedHead
from longspan.nn import adaptive_softmax
from longspan.nn.adaptive_softmax import AdaptiveSoftmax
from longspan.nn.embedding import AdaptiveEmbedding

V, WIDTH = 30, 12


def make(cutoffs=(), div_val=1, embedding_width=WIDTH, **ties) -> tuple[AdaptiveEmbedding, AdaptiveSoftmax]:
    embedding = AdaptiveEmbedding(V, WIDTH, embedding_width, cutoffs, div_val)
    head = AdaptiveSoftmax(embedding, V, cutoffs, **ties)
    for parameter in {id(p): p for p in [*embedding.parameters(), *head.parameters()]}.values():
        torch.nn.init.normal_(parameter, 0, 0.5)
    return embedding.double(), head.double()


SHAPES = [
    {},
    {"embedding_width": 7},
    {"cutoffs": (10, 20)},
    {"cutoffs": (10, 20), "embedding_width": 7, "tie_projections": True},
    {"cutoffs": (10, 20), "div_val": 2, "tie_projections": True},
    {"cutoffs": (10, 20), "div_val": 2, "tie_embedding": False},
]


@pytest.mark.parametrize("temperature", [1.0, 1.7])
@pytest.mark.parametrize("shape", SHAPES)
def test_probabilities_sum_to_one_and_losses_match_them_in_token_order(shape: dict, temperature: float) -> None:
    _, head = make(**shape)
    hidden, targets = torch.randn(2, 40, WIDTH, dtype=torch.float64), torch.randint(V, (2, 40))
    logits = head.logits(hidden, temperature)
    expected = -logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    torch.testing.assert_close(head.losses(hidden, targets, temperature), expected, rtol=0, atol=1e-12)
    if shape.get("cutoffs"):
        torch.testing.assert_close(logits.exp().sum(-1), torch.ones(2, 40, dtype=torch.float64))


def test_every_softmax_divides_its_scores_by_the_temperature() -> None:
    """The softmax without clusters, and both that the probability of a rare token is made of."""
    hidden = torch.randn(1, 5, WIDTH, dtype=torch.float64)
    _, plain = make()
    scores = plain.logits(hidden)
    torch.testing.assert_close(plain.logits(hidden, 1.7), scores / 1.7, rtol=0, atol=1e-12)
    _, head = make(cutoffs=(10,), tie_embedding=False)
    table, bias = (
        torch.cat([head.tables[0][:10], head.cluster_weight]),
        torch.cat([head.biases[0][:10], head.cluster_bias]),
    )
    first = (hidden @ table.T + bias) / 1.7
    rest = (hidden @ head.tables[0][10:].T + head.biases[0][10:]) / 1.7
    entry = first.log_softmax(-1)
    wanted = torch.cat([entry[..., :10], entry[..., 10:] + rest.log_softmax(-1)], -1)
    torch.testing.assert_close(head.logits(hidden, 1.7), wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
def test_an_embedding_is_the_projected_row_of_its_cluster(shape: dict) -> None:
    embedding, _ = make(**shape)
    tokens = torch.arange(V)[None]
    rows = []
    for i, (begin, end) in enumerate(embedding.edges):
        for row in range(end - begin):
            vector = embedding.tables[i][row]
            rows.append(embedding.projections[i] @ vector if len(embedding.projections) else vector)
    torch.testing.assert_close(embedding(tokens)[0], torch.stack(rows) * WIDTH**0.5, rtol=0, atol=1e-12)


def test_it_equals_the_adaptive_softmax_of_torch() -> None:
    """Same weights in nn.AdaptiveLogSoftmaxWithLoss, which has no biases and projects in two steps."""
    theirs = torch.nn.AdaptiveLogSoftmaxWithLoss(WIDTH, V, [10, 20], div_value=2.0, head_bias=True).double()
    _, head = make((10, 20), div_val=2, tie_embedding=False)
    with torch.no_grad():
        head.projections[0].copy_(torch.eye(WIDTH))
        head.tables[0].copy_(theirs.head.weight[:10])
        head.cluster_weight.copy_(theirs.head.weight[10:])
        head.biases[0].copy_(theirs.head.bias[:10])
        head.cluster_bias.copy_(theirs.head.bias[10:])
        for i in (1, 2):
            head.projections[i].copy_(theirs.tail[i - 1][0].weight.T)
            head.tables[i].copy_(theirs.tail[i - 1][1].weight)
            head.biases[i].zero_()
    hidden, targets = torch.randn(1, 50, WIDTH, dtype=torch.float64), torch.randint(V, (1, 50))
    torch.testing.assert_close(head.losses(hidden, targets)[0], -theirs(hidden[0], targets[0]).output)
    torch.testing.assert_close(head.logits(hidden)[0], theirs.log_prob(hidden[0]))


def test_tied_weights_are_one_tensor() -> None:
    embedding, head = make((10, 20), div_val=2, tie_projections=True)
    assert all(a is b for a, b in zip(embedding.tables, head.tables, strict=True))
    assert [a is b for a, b in zip(embedding.projections, head.projections, strict=True)] == [False, True, True]


def test_a_batch_without_rare_tokens_gives_every_parameter_a_gradient() -> None:
    """Data-parallel training needs one for each, even if no token belongs to a cluster."""
    _, head = make((10, 20), div_val=2)
    head.losses(torch.randn(1, 5, WIDTH, dtype=torch.float64), torch.zeros(1, 5, dtype=torch.int64)).sum().backward()
    assert all(parameter.grad is not None for parameter in head.parameters())


@pytest.mark.parametrize("target", [-100, -1, V, 10**6, -(2**40), -(2**63)])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_target_outside_the_vocabulary_is_refused(shape: dict, target: int) -> None:
    """By default, cross_entropy ignores a target of -100 and gives it a loss of 0."""
    _, head = make(**shape)
    targets = torch.randint(V, (2, 5))
    targets[1, 2] = target
    with pytest.raises(DataError, match=f"{target}.*{V - 1}"):
        head.losses(torch.randn(2, 5, WIDTH, dtype=torch.float64), targets)


@pytest.mark.parametrize("target", [-100, V])
@pytest.mark.parametrize("shape", SHAPES)
def test_cross_entropy_itself_refuses_it_without_the_check(
    shape: dict, target: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where the check would need a sync."""
    _, head = make(**shape)
    monkeypatch.setattr(AdaptiveSoftmax, "_check_targets", lambda *_: None)
    with pytest.raises(IndexError):
        head.losses(torch.randn(1, 1, WIDTH, dtype=torch.float64), torch.tensor([[target]]))


@pytest.mark.parametrize("shape", SHAPES[2:])
def test_static_shapes_give_the_same_losses(shape: dict) -> None:
    """In float64 without kernels: every cluster scores every token."""
    _, head = make(**shape)
    hidden, targets = torch.randn(2, 40, WIDTH, dtype=torch.float64), torch.randint(V, (2, 40))
    expected = head.losses(hidden, targets, 1.7)
    head.static = True
    torch.testing.assert_close(head.losses(hidden, targets, 1.7), expected, rtol=0, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES[2:])
def test_losses_and_gradients_on_a_gpu(shape: dict) -> None:
    """By kernels, in float32, against float64 on a CPU."""
    embedding, head = make(**shape)
    hidden, targets = torch.randn(2, 40, WIDTH, dtype=torch.float64), torch.randint(V, (2, 40))
    found = []
    for device, dtype in (("cpu", torch.float64), ("cuda", torch.float32)):
        embedding.to(device, dtype), head.to(device, dtype)
        given = hidden.to(device, dtype).requires_grad_()
        losses = head.losses(given, targets.to(device), 1.7)
        grads = torch.autograd.grad(losses.square().sum(), [given, *head.parameters()])
        found.append([t.double().cpu() for t in (losses, *grads)])
    for got, want in zip(*found[::-1], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def plain_cluster(h, table, bias, targets, here, temperature):
    losses = F.cross_entropy(F.linear(h, table, bias) / temperature, targets, reduction="none")
    return torch.where(here, losses, 0.0)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kernels", [False, True])
def test_the_head_of_bert_transforms_before_every_softmax(
    shape: dict, kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in the form with kernels, which GPUs use."""
    torch.manual_seed(0)
    embedding, plain = (module.float() for module in make(**shape))
    ties = {key: value for key, value in shape.items() if key.startswith("tie")}
    head = MaskedHead(embedding, V, shape.get("cutoffs", ()), **ties)
    head.load_state_dict(plain.state_dict() | {k: v for k, v in head.state_dict().items() if k[:4] in ("dens", "norm")})
    hidden, targets = torch.randn(2, 40, WIDTH), torch.randint(V, (2, 40))
    wanted = plain.losses(F.layer_norm(F.gelu(head.dense(hidden)), (WIDTH,), eps=1e-12), targets, 1.3)
    if kernels:
        head.static = head.chunked = True
        monkeypatch.setattr(adaptive_softmax, "TRITON_WORKS", True)
        monkeypatch.setattr(adaptive_softmax, "cluster_losses", plain_cluster)
        monkeypatch.setattr(
            adaptive_softmax, "chunked_losses", lambda h, t, b, y, c: plain_cluster(h, t, b, y, y >= 0, c)
        )
    torch.testing.assert_close(head.losses(hidden, targets, 1.3), wanted)
    own = head.logits(hidden, 1.3).log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    torch.testing.assert_close(-own, wanted)
