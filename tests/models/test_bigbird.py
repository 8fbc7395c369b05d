"""What is BigBird's own: its blocks felt through the whole model, and its random graph."""

import pytest
import torch

from longspan.errors import ConfigError
from longspan.models.bigbird import BigBirdConfig
from longspan.models.families import build

from .felt import farthest, felt, wide

SIZES = {"block": 3, "window_blocks": 3, "global_blocks": 1, "random_blocks": 2}


def edges(model, head: int, block: int) -> set[int]:
    """The random blocks of a block of the first layer."""
    _, pattern = model.layers[0].groups[0]
    return {int(k) for k in pattern.parts[-1].table[head, block] if k >= 0}


def shown(model, i: int, n: int, causal: bool) -> set[int]:
    """Zaheer et al. 2020, section 2, in blocks of 3."""
    block = i // 3
    near = {block - 2, block - 1, block} if causal else {block - 1, block, block + 1}
    blocks = near | {0} | edges(model, 0, block) | edges(model, 1, block)
    if causal:
        return {j for j in range(i + 1) if j // 3 in blocks}
    return set(range(n)) if block == 0 else {j for j in range(n) if j // 3 in blocks}


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "two-sided"])
def test_a_model_feels_window_global_and_random_blocks(causal: bool) -> None:
    """In two documents, each with blocks of its own."""
    model = wide("bigbird", SIZES | {"causal": causal})
    starts = torch.zeros(1, 30, dtype=torch.bool)
    starts[0, 8] = True
    expected = torch.zeros(30, 30, dtype=torch.bool)
    for begin, end in ((0, 8), (8, 30)):
        for i in range(end - begin):
            expected[begin + i, [begin + j for j in shown(model, i, end - begin, causal)]] = True
    assert torch.equal(felt(model, 30, starts), expected)
    if causal:
        assert model.reach == farthest(felt(model, 30))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "two-sided"])
def test_the_graph_is_drawn_once_and_from_what_is_left(causal: bool) -> None:
    config = BigBirdConfig(
        segment=200, heads=2, block=5, window_blocks=3, random_blocks=4, global_blocks=2, causal=causal
    )
    parts = [config.pattern(layer).parts[-1] for layer in (0, 0, 1)]
    table = parts[0].table
    assert (table == parts[1].table).all()
    assert (table != parts[2].table).any()
    assert (table[0] != table[1]).any()
    for block in range(2, 40):
        near = range(block - 2, block + 1) if causal else range(block - 1, block + 2)
        left = set(range(2, block if causal else 40)) - set(near)
        drawn = [int(k) for k in table[0, block] if k >= 0]
        assert len(set(drawn)) == len(drawn) == min(4, len(left))
        assert set(drawn) <= left
    if causal:
        assert (table[0] >= block).sum() == 0
        longer = BigBirdConfig(segment=400, heads=2, block=5, random_blocks=4).pattern(0).parts[-1].table
        assert (longer[:, :40] == table).all()


def test_without_random_and_global_blocks_a_window_is_left() -> None:
    model = wide("bigbird", SIZES | {"random_blocks": 0, "global_blocks": 0})
    expected = [[j <= i and i // 3 - j // 3 <= 2 for j in range(30)] for i in range(30)]
    assert torch.equal(felt(model, 30), torch.tensor(expected))


def test_an_encoder_is_not_scored_as_a_language_model() -> None:
    model, tokens = wide("bigbird", {"causal": False}), torch.randint(11, (1, 5))
    for act in (lambda: model.losses(tokens, tokens), model.decoder):
        with pytest.raises(ConfigError, match=r"reads both ways .* has seen the next token"):
            act()


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"block": 0}, "block=0 must be at least 1"),
        ({"random_blocks": -1}, "random_blocks=-1 must be at least 0"),
        ({"window_blocks": 2, "causal": False}, "window_blocks=2 must be odd .* use 3"),
    ],
)
def test_a_config_that_cannot_be_says_why(values: dict, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        build("bigbird", values)
