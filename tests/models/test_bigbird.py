"""BigBird: its blocks, measured by their influence through the complete model, and its random graph."""

import pytest
import torch

from longspan.decoding.open import open_decoder
from longspan.errors import ConfigError
from longspan.models.bigbird import BigBirdConfig
from tests.support import build

from .influence import farthest, influence, wide_model

SIZES = {"block": 3, "window_blocks": 3, "global_blocks": 1, "random_blocks": 2, "max_distance": 29}


def edges(model, head: int, block: int) -> set[int]:
    """The random blocks of a block of the first layer."""
    _, pattern = model.layers[0].groups[0]
    return {int(k) for k in pattern.parts[-1].table[head, block] if k >= 0}


def visible(model, i: int, n: int, causal: bool) -> set[int]:
    """Zaheer et al. 2020, section 2, in blocks of 3."""
    block = i // 3
    near = {block - 2, block - 1, block} if causal else {block - 1, block, block + 1}
    blocks = near | {0} | edges(model, 0, block) | edges(model, 1, block)
    if causal:
        return {j for j in range(i + 1) if j // 3 in blocks}
    return set(range(n)) if block == 0 else {j for j in range(n) if j // 3 in blocks}


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "two-sided"])
def test_influence_follows_window_global_and_random_blocks(causal: bool) -> None:
    """In two documents: the blocks of each are counted from its first token."""
    model = wide_model("bigbird", SIZES | {"causal": causal})
    starts = torch.zeros(1, 30, dtype=torch.bool)
    starts[0, 8] = True
    expected = torch.zeros(30, 30, dtype=torch.bool)
    for begin, end in ((0, 8), (8, 30)):
        for i in range(end - begin):
            expected[begin + i, [begin + j for j in visible(model, i, end - begin, causal)]] = True
    assert torch.equal(influence(model, 30, starts), expected)
    if causal:
        assert model.reach() == farthest(influence(model, 30))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "two-sided"])
def test_random_blocks_are_drawn_once_from_the_blocks_not_visible_otherwise(causal: bool) -> None:
    config = BigBirdConfig(
        max_distance=199, heads=2, block=5, window_blocks=3, random_blocks=4, global_blocks=2, causal=causal
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
        longer = BigBirdConfig(max_distance=399, heads=2, block=5, random_blocks=4).pattern(0).parts[-1].table
        assert (longer[:, :40] == table).all()


def test_without_random_and_global_blocks_only_the_window_remains() -> None:
    model = wide_model("bigbird", SIZES | {"random_blocks": 0, "global_blocks": 0})
    expected = [[j <= i and i // 3 - j // 3 <= 2 for j in range(30)] for i in range(30)]
    assert torch.equal(influence(model, 30), torch.tensor(expected))


def test_a_bidirectional_model_does_not_predict_the_next_token() -> None:
    model, tokens = wide_model("bigbird", {"causal": False}), torch.randint(11, (1, 5))
    assert (model.causal, model.predicts_next) == (False, False)
    causal = wide_model("bigbird", {})
    assert (causal.causal, causal.predicts_next) == (True, True)
    for predict in (
        lambda: model.losses(tokens, tokens),
        lambda: model(tokens),
        lambda: open_decoder(model).step(tokens[:, 0]),
    ):
        with pytest.raises(ConfigError, match=r"model\.causal=false.*hidden_states"):
            predict()


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"block": 0}, r"model\.block=0.* 1"),
        ({"random_blocks": -1}, r"model\.random_blocks=-1.* 0"),
        ({"window_blocks": 2, "causal": False}, r"model\.window_blocks=2.* 3"),
    ],
)
def test_an_invalid_config_is_refused_with_the_key_and_its_value(values: dict, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        build("bigbird", values)
