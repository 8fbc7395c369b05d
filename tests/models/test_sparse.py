"""The Sparse Transformer: the paper's sets, measured by their influence through the complete model."""

import pytest
import torch

from longspan.errors import ConfigError
from longspan.models.families import outline
from longspan.training.recipe import load_recipe
from tests.support import build

from .influence import compose, farthest, influence, visibility, wide_model

L, C = 7, 2
POSITIONS = {"max_distance": 29}
A1 = {"strided": lambda i: set(range(max(0, i - L), i + 1)), "fixed": lambda i: set(range(i // L * L, i + 1))}
A2 = {
    "strided": lambda i: {j for j in range(i + 1) if (i - j) % L == 0},
    "fixed": lambda i: {j for j in range(i + 1) if j % L >= L - C},
}


@pytest.mark.parametrize("factorised", ["heads", "layers", "merged"])
@pytest.mark.parametrize("pattern", ["strided", "fixed"])
def test_influence_follows_the_sets_of_the_paper(pattern: str, factorised: str) -> None:
    """Child et al. 2019, section 4.3; and `reach` is the farthest influence."""
    layers = 2 if factorised == "layers" else 1
    values = {"pattern": pattern, "factorised": factorised, "layers": layers, "stride": L, "summary": C}
    model = wide_model("sparse", POSITIONS | values)
    near, distant = visibility(A1[pattern], 30), visibility(A2[pattern], 30)
    expected = compose(near, distant) if factorised == "layers" else near | distant
    found = influence(model, 30)
    assert torch.equal(found, expected)
    assert model.reach() == farthest(found)


@pytest.mark.parametrize("pattern", ["strided", "fixed"])
def test_the_first_half_of_the_heads_uses_one_set_and_the_second_half_the_other(pattern: str) -> None:
    """Each half alone, with the output of the other half set to zero: together they would hide an error of one."""
    for silent, expected in ((slice(4, 8), A1), (slice(0, 4), A2)):
        model = wide_model("sparse", POSITIONS | {"pattern": pattern, "stride": L, "summary": C})
        with torch.no_grad():
            model.layers[0].attention.output.weight[:, silent] = 0.0
        assert torch.equal(influence(model, 30), visibility(expected[pattern], 30))


@pytest.mark.parametrize("pattern", ["strided", "fixed"])
def test_two_layers_connect_all_positions(pattern: str) -> None:
    model = wide_model("sparse", POSITIONS | {"pattern": pattern, "layers": 2, "stride": 5, "summary": 1})
    assert torch.equal(influence(model, 30), torch.ones(30, 30).tril().bool())
    assert model.reach() == 29


def test_a_position_is_the_sum_of_a_row_and_a_column_vector() -> None:
    model = wide_model("sparse", POSITIONS | {"stride": 7})
    rows, columns = model.places.rows, model.places.columns
    assert (rows.shape[0], columns.shape[0]) == (5, 7)
    torch.testing.assert_close(model.places(30, None)[0, 23], rows[3] + columns[2])
    first = torch.tensor([[0, 1, 1]])
    torch.testing.assert_close(model.places(3, first)[0, 2], rows[0] + columns[1])


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"stride": 0}, r"model\.stride=0.* 1"),
        ({"stride": 4, "summary": 5}, r"model\.summary=5.*1 to 4"),
        ({"heads": 1}, r"model\.factorised='heads'.*model\.heads=2"),
        ({"factorised": "layers", "layers": 1}, r"model\.factorised='layers'.*model\.layers=2.*'merged'"),
        ({"pattern": "fixd"}, r"'fixd'.*'fixed'"),
    ],
)
def test_an_invalid_config_is_refused_with_the_key_and_its_value(values: dict, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        build("sparse", values)


def test_a_segment_longer_than_the_learned_positions_is_refused() -> None:
    model = wide_model("sparse", POSITIONS)
    with pytest.raises(ConfigError, match=r"31 tokens.*30.*model\.max_distance=30"):
        model(torch.zeros(1, 31, dtype=torch.int64))


@pytest.mark.parametrize("name", ["sparse", "longformer", "bigbird"])
def test_recipes_have_the_expected_number_of_parameters(name: str) -> None:
    """41.1M within 1% on enwik8, 890,112 within 2% at the size of the demo."""
    recipe, demo = load_recipe(f"enwik8-{name}"), load_recipe(f"demo-{name}").with_vocabulary(256)
    published = outline(recipe.family, recipe.model).parameter_count
    assert published == recipe.expected.parameters
    assert abs(published / 41.1e6 - 1) < 0.01
    assert abs(outline(demo.family, demo.model).parameter_count / 890_112 - 1) < 0.02
