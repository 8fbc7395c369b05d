"""XLNet of `transformers` with random weights: outputs, losses and gradients in float64."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from longspan.checkpoints.weights import fill
from longspan.interop.huggingface import make_model, xlnet_weights
from longspan.kernels.bidirectional_attention import forced
from longspan.models.xlnet import XLNet
from longspan.reading import Reading

transformers = pytest.importorskip("transformers")
B, T, V, SEPARATOR = 2, 11, 31, 3


@pytest.fixture(scope="module")
def pair() -> tuple[XLNet, Any]:
    config = transformers.XLNetConfig(
        vocab_size=V, d_model=16, n_layer=2, n_head=4, d_inner=24, dropout=0.0, mem_len=40, initializer_range=0.3
    )
    torch.manual_seed(3)
    theirs = transformers.XLNetLMHeadModel(config).double().eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(0, 0.3)
    # Theirs computes positions in float32, which a float64 model then refuses.
    positions = theirs.transformer.relative_positional_encoding
    theirs.transformer.relative_positional_encoding = lambda *given, **more: positions(*given, **more).double()
    ours = make_model(config.to_dict(), theirs.state_dict(), "theirs", None).double().eval()
    fill(ours, {name: t for name, t in xlnet_weights(theirs.state_dict(), 2).items() if name != "head.tables.0"}, "")
    assert isinstance(ours, XLNet)
    ours.config = replace(ours.config, separator=SEPARATOR)
    ours.reading = Reading(segment=T, memory=40)
    return ours, theirs


def close(ours: torch.Tensor, theirs: torch.Tensor, msg: str | None = None) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6, msg=msg)


def tokens(seed: int = 0) -> torch.Tensor:
    return torch.randint(V, (B, T), generator=torch.Generator().manual_seed(seed))


def pairs(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Two texts that end with a separator, a last token, and the segment of each token."""
    ids = torch.where(tokens(seed) == SEPARATOR, 0, tokens(seed))
    ids[:, [4, T - 2]] = SEPARATOR
    return ids, torch.tensor([0] * 5 + [1] * (T - 6) + [2]).expand(B, -1)


def memory(ours: XLNet, theirs: Any, ids: torch.Tensor) -> tuple[Any, Any]:
    """Both models after a first segment, read without an order."""
    with torch.no_grad():
        _, state = ours.encode(ids, ours.initial_state(B, trainable=True))
        found = theirs(ids, use_mems=True, return_dict=True)
    return state, found.mems


@pytest.mark.parametrize(("with_memory", "form"), [(False, "reference"), (True, "reference"), (True, "biased")])
def test_losses_and_gradients_in_a_permutation(pair: tuple[XLNet, Any], with_memory: bool, form: str) -> None:
    ours, theirs = pair
    (ids, segments), before = pairs(1), torch.where(tokens(2) == SEPARATOR, 0, tokens(2))
    state, mems = memory(ours, theirs, before) if with_memory else (ours.initial_state(B, trainable=True), None)
    chosen = torch.stack([torch.randperm(T)[:4] for _ in range(B)])
    # perm_mask by the definition: 1 where row i must not see key j.
    perm_mask = torch.zeros(B, T, T, dtype=torch.float64)
    for b in range(B):
        rank = {int(position): k for k, position in enumerate(chosen[b])}
        for i in range(T):
            for j in range(T):
                perm_mask[b, i, j] = float(j in rank and rank.get(i, -1) <= rank[j])
    mapping = torch.nn.functional.one_hot(chosen, T).double()
    options = {"perm_mask": perm_mask, "target_mapping": mapping, "token_type_ids": segments, "return_dict": True}
    found = theirs(ids, mems=mems, labels=ids.gather(1, chosen), **options)
    with forced(form):
        losses, _ = ours.permuted_losses(ids, chosen, state)
    close(losses.mean(), found.loss)
    theirs.zero_grad()
    ours.zero_grad()
    found.loss.backward()
    losses.mean().backward()
    expected = xlnet_weights({name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}, 2)
    for name, parameter in ours.named_parameters():
        if name in expected:
            close(parameter.grad, expected[name], msg=name)
    assert len(expected) > 25


@pytest.mark.parametrize("form", ["reference", "biased"])
def test_features_of_a_pair(pair: tuple[XLNet, Any], form: str) -> None:
    ours, theirs = pair
    ids, segments = pairs(4)
    found = theirs.transformer(ids, token_type_ids=segments, output_hidden_states=True, return_dict=True)
    with forced(form):
        hidden, _ = ours.encode(ids)
    for a, b in zip(hidden, found.hidden_states, strict=True):
        close(a, b)


def test_left_to_right_equals_the_masks_of_an_ordinary_language_model(pair: tuple[XLNet, Any]) -> None:
    """Row t of `hidden_states` is the query of position t + 1, which sees the tokens up to t."""
    ours, theirs = pair
    ids = tokens(5)
    logits, _ = ours(ids)
    # A token more, which nobody sees: the query at its place is the last one of ours.
    longer = torch.cat([ids, ids[:, :1]], dim=1)
    perm_mask = torch.ones(T + 1, T + 1, dtype=torch.float64).triu().expand(B, -1, -1)
    mapping = torch.eye(T + 1, dtype=torch.float64)[1:].expand(B, -1, -1)
    found = theirs(longer, perm_mask=perm_mask, target_mapping=mapping, return_dict=True)
    close(logits, found.logits)
