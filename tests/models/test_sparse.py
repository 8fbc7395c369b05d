"""What is the Sparse Transformer's own: the paper's sets, felt through the whole model."""

import pytest
import torch

from longspan.errors import ConfigError
from longspan.models.families import build
from longspan.training.recipe import load_recipe

from .felt import farthest, felt, hops, sets, wide

L, C = 7, 2
A1 = {"strided": lambda i: set(range(max(0, i - L), i + 1)), "fixed": lambda i: set(range(i // L * L, i + 1))}
A2 = {
    "strided": lambda i: {j for j in range(i + 1) if (i - j) % L == 0},
    "fixed": lambda i: {j for j in range(i + 1) if j % L >= L - C},
}


@pytest.mark.parametrize("factorised", ["heads", "layers", "merged"])
@pytest.mark.parametrize("pattern", ["strided", "fixed"])
def test_a_model_feels_the_papers_sets(pattern: str, factorised: str) -> None:
    """Child et al. 2019, section 4.3; and `reach` is the farthest token felt."""
    layers = 2 if factorised == "layers" else 1
    values = {"pattern": pattern, "factorised": factorised, "layers": layers, "stride": L, "summary": C}
    model = wide("sparse", values)
    near, distant = sets(A1[pattern], 30), sets(A2[pattern], 30)
    expected = hops(near, distant) if factorised == "layers" else near | distant
    found = felt(model, 30)
    assert torch.equal(found, expected)
    assert model.reach == farthest(found)


@pytest.mark.parametrize("pattern", ["strided", "fixed"])
def test_the_first_heads_see_one_set_and_the_others_the_other(pattern: str) -> None:
    """Each half by itself, the other half's output left out: together they would hide what only one of them shows."""
    for silent, expected in ((slice(4, 8), A1), (slice(0, 4), A2)):
        model = wide("sparse", {"pattern": pattern, "stride": L, "summary": C})
        with torch.no_grad():
            model.layers[0].attention.output.weight[:, silent] = 0.0
        assert torch.equal(felt(model, 30), sets(expected[pattern], 30))


@pytest.mark.parametrize("pattern", ["strided", "fixed"])
def test_two_layers_reach_everything(pattern: str) -> None:
    model = wide("sparse", {"pattern": pattern, "layers": 2, "stride": 5, "summary": 1})
    assert torch.equal(felt(model, 30), torch.ones(30, 30).tril().bool())
    assert model.reach == 29


def test_positions_are_a_row_and_a_column() -> None:
    model = wide("sparse", {"stride": 7})
    rows, columns = model.places.rows, model.places.columns
    assert (rows.shape[0], columns.shape[0]) == (5, 7)
    torch.testing.assert_close(model.places(30, None)[0, 23], rows[3] + columns[2])
    first = torch.tensor([[0, 1, 1]])
    torch.testing.assert_close(model.places(3, first)[0, 2], rows[0] + columns[1])


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"stride": 0}, "stride=0 must be at least 1"),
        ({"stride": 4, "summary": 5}, "summary=5 positions must fit a stride of 4; use 1 to 4"),
        ({"heads": 1}, "factorised='heads' divides two patterns among heads, and there is 1"),
        ({"factorised": "layers", "layers": 1}, "use model.layers=2 or model.factorised='merged'"),
        ({"pattern": "fixd"}, "did you mean 'fixed'"),
    ],
)
def test_a_config_that_cannot_be_says_why(values: dict, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        build("sparse", values)


def test_more_tokens_than_places_are_refused() -> None:
    model = wide("sparse", {})
    with pytest.raises(ConfigError, match="learned 30 positions and was handed 31 tokens"):
        model(torch.zeros(1, 31, dtype=torch.int64))


@pytest.mark.parametrize("name", ["sparse", "longformer", "bigbird"])
def test_recipes_have_the_parameters_they_say(name: str) -> None:
    """41.1M within 1% on enwik8, 890,112 within 2% at the size of the demo."""
    recipe = load_recipe(f"enwik8-{name}")
    with torch.device("meta"):
        published = build(recipe.family, _values(recipe.model))
        demo = build(recipe.family, _values(load_recipe(f"demo-{name}").with_vocabulary(256).model))
    assert published.parameter_count == recipe.expected.parameters
    assert abs(published.parameter_count / 41.1e6 - 1) < 0.01
    assert abs(demo.parameter_count / 890_112 - 1) < 0.02


def _values(config: object) -> dict:
    from longspan.config import plain

    return plain(config)
