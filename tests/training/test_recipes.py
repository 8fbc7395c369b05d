"""Every recipe loads and builds the published shape. Errors name the line and the value."""

import itertools
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from longspan.errors import ConfigError, LongspanError
from longspan.models.families import family
from longspan.models.longspan_xl import LongspanXLConfig
from longspan.training.depth import rate_factors
from longspan.training.recipe import MOVED, SECTIONS, as_steps, build_recipe, load_recipe, recipe_names

# preset: (parameters in the authors' code, vocabulary, evaluation segment / memory / clamp)
PUBLISHED = {
    "enwik8-base": (41_055_436, 204, (80, 2100, 820)),
    "enwik8-large": (277_231_820, 204, (128, 3800, 1000)),
    "text8-base": (41_055_436 - (204 - 27) * 513, 27, (80, 2100, 820)),
    "text8-large": (277_050_395, 27, (128, 3800, 1000)),
    "wt103-base": (151_107_538, 267_735, (64, 640, 400)),
    "wt103-large": (285_170_506, 267_735, (128, 1600, 1000)),
    "lm1b-base": (357_812_082, 793_471, (32, 128, 0)),
    "lm1b-large": (841_295_982, 793_471, (32, 128, 0)),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_have_the_published_parameters(name: str) -> None:
    recipe = load_recipe(name)
    with torch.device("meta"):
        model = family(recipe.family)(recipe.model)
    count = sum(p.numel() for p in model.parameters())
    parameters, vocabulary, (segment, memory, clamp) = PUBLISHED[name]
    assert count == parameters == recipe.expected.parameters
    assert recipe.model.vocabulary == vocabulary
    assert (recipe.evaluation.segment, recipe.evaluation.memory, recipe.evaluation.clamp) == (segment, memory, clamp)
    assert recipe.evaluation.same_length
    assert recipe.training.lr == 2.5e-4
    assert recipe.training.clip == 0.25
    assert recipe.training.segment == recipe.training.memory


@pytest.mark.parametrize(
    ("family", "training", "evaluation", "expected"),
    [
        ("longspan-xl", {"memory": 512}, {}, (1023, 2.0)),
        ("longspan-xl", {"memory": 512}, {"clamp": 800}, (800, 0.0)),
        ("longspan-xl", {"memory": 512}, {"clamp": 0}, (0, 0.0)),
        ("longspan-xl", {"memory": 512}, {"discount": 1.0}, (1023, 1.0)),
        ("longspan-xl", {"memory": 512, "clamp": 700}, {}, (700, 0.0)),
        ("longspan-xl", {"memory": 512, "clamp": 0}, {}, (0, 0.0)),
        ("longspan-xl", {"memory": 512, "same_length": True}, {}, (511, 2.0)),
        ("longspan-xl", {"memory": [[0, 512], [50, 1024]]}, {}, (1535, 2.0)),
        ("longspan-xl", {"memory": 0}, {}, (511, 2.0)),
        ("longspan-xl", {"memory": 0, "segment": 1}, {}, (0, 0.0)),
        ("transformer-xl", {"memory": 2**20}, {}, (2**20, 0.0)),  # the largest clamp
        ("transformer-xl", {"memory": 512}, {}, (1023, 0.0)),  # the published model has no discount
        ("rotary", {"memory": 512}, {}, (0, 0.0)),  # it has no clamp
    ],
)
def test_evaluation_clamps_and_discounts_what_training_has_not_seen(
    family: str, training: dict[str, Any], evaluation: dict[str, Any], expected: tuple[int, float]
) -> None:
    tables = {"training": {"steps": 100, "segment": 512} | training, "evaluation": {"memory": 4096} | evaluation}
    reading = build_recipe({"model": {"family": family}, **tables}, "test").evaluation_reading()
    assert (reading.memory, reading.clamp, reading.discount) == (4096, *expected)


def test_vectors_of_distances_are_not_discounted() -> None:
    """Shaw's last vector is trained for all distances beyond it."""
    model = {"family": "longspan-xl", "position": "shaw"}
    assert build_recipe({"model": model, "training": {"steps": 1}}, "test").evaluation_reading().discount == 0.0


def test_awd_lstm_on_ptb_has_the_published_settings() -> None:
    recipe = load_recipe("ptb-awd-lstm")
    model, training = recipe.model, recipe.training
    rates = (model.input_dropout, model.hidden_dropout, model.dropout, model.embedding_dropout, model.weight_dropout)
    assert (model.layers, model.width, model.inner, training.segment) == (3, 400, 1150, 70)
    assert rates == (0.4, 0.3, 0.4, 0.1, 0.5)
    assert (model.ar, model.tar) == (2.0, 1.0)
    assert (training.optimizer, training.lr, training.clip, training.batch) == ("sgd", 30.0, 0.25, 40)
    assert (training.averaging, training.average_patience, training.segment_jitter) == ("asgd", 5, 5.0)
    assert recipe.expected.score == 57.3


SYSTEMS = ("gpt", "elmo", "bert", "awd-lstm", "xlnet", "transformer-xl", "longspan-xl")


@pytest.mark.parametrize("name", SYSTEMS)
def test_systems_of_transfer_have_equal_sizes_and_minutes(name: str) -> None:
    """Tensor cores need widths that are multiples of 8."""
    recipe = load_recipe(f"transfer-{name}")
    with torch.device("meta"):
        model = family(recipe.family)(recipe.model)
    assert 24_000_000 < model.parameter_count < 27_000_000
    assert (recipe.model.vocabulary, recipe.training.seconds) == (16_384, 480)
    for matrix in (parameter for parameter in model.parameters() if parameter.dim() == 2 and len(parameter) > 512):
        assert matrix.shape[0] % 8 == matrix.shape[1] % 8 == 0
    for (_, rows), (_, tokens) in zip(as_steps(recipe.training.batch), as_steps(recipe.training.segment), strict=True):
        assert rows * tokens == 2**15


def test_a_language_model_can_be_tuned_with_the_authors_rates_of_ulmfit() -> None:
    """The tied embedding at the highest rate, and each layer at 1 / 2.6 of the one above it."""
    recipe = load_recipe("transfer-ulmfit-lm")
    with torch.device("meta"):
        model = family(recipe.family)(recipe.model)
    found = rate_factors(model, 1 / 2.6, 2.6**4)
    layers = [found[f"layers.{n}.hidden.weight"] for n in range(3)]
    assert found["embedding.tables.0"] == pytest.approx(1.0, rel=1e-4)
    assert [high / low for low, high in itertools.pairwise(layers)] == pytest.approx([2.6, 2.6])
    assert recipe.model == load_recipe("transfer-awd-lstm").model


def test_ptb_recipe_has_the_documented_dropout_and_at_most_24m_parameters() -> None:
    recipe = load_recipe("ptb-longspan-xl")
    model, training = recipe.model, recipe.training
    with torch.device("meta"):
        count = family(recipe.family)(model).parameter_count
    assert count == recipe.expected.parameters <= 24_000_000
    # Those of the authors are 0.2, 0.6, 0.5 and three times 0.2: docs/transformer_xl.md.
    assert (model.embedding_dropout, model.input_dropout, model.output_dropout) == (0.15, 0.5, 0.4)
    assert (model.dropout, model.attention_dropout, model.projection_dropout) == (0.15, 0.0, 0.15)
    assert training.locked_dropout
    assert training.averaging == "asgd"
    assert 0 < training.average_from < training.steps
    assert recipe.expected.score == 54.52


@pytest.mark.parametrize(("name", "most"), [("ptb-transformer-xl", 24_000_000), ("wt2-transformer-xl", 33_000_000)])
def test_recipes_for_words_are_the_papers_model_without_pointer(name: str, most: int) -> None:
    recipe = load_recipe(name)
    with torch.device("meta"):
        model = family(recipe.family)(recipe.model)
        plain = {key: getattr(recipe.model, key) for key in ("vocabulary", "layers", "width", "heads", "inner")}
        paper = family("transformer-xl")(family("transformer-xl").Config(**plain))
    assert model.parameter_count == paper.parameter_count == recipe.expected.parameters <= most
    assert recipe.model.pointer_width == 0
    assert recipe.evaluation.temperature is None
    passes = {"ptb-transformer-xl": (929_589, 175), "wt2-transformer-xl": (2_088_628, 100)}[name]
    per_pass = -(-passes[0] // (recipe.training.batch * recipe.training.segment))
    assert recipe.training.steps == pytest.approx(per_pass * passes[1], rel=0.01)


@pytest.mark.parametrize("name", [n for n in recipe_names() if n.startswith("enwik8-") and n not in PUBLISHED])
def test_baselines_have_the_size_of_transformer_xl(name: str) -> None:
    recipe = load_recipe(name)
    with torch.device("meta"):
        count = family(recipe.family)(recipe.model).parameter_count
    assert count == recipe.expected.parameters
    assert abs(count / 41_055_436 - 1) < 0.01


@pytest.mark.parametrize("name", [n for n in recipe_names() if n.startswith("demo-")])
def test_demo_baselines_have_the_size_of_the_demo(name: str) -> None:
    recipe = load_recipe(name)
    with torch.device("meta"):
        count = family(recipe.family)(recipe.model).parameter_count
    assert abs(count / 890_112 - 1) < 0.02


@pytest.mark.parametrize("name", recipe_names())
def test_a_resolved_recipe_loads_as_the_same_recipe(name: str, tmp_path: Path) -> None:
    recipe = load_recipe(name)
    (tmp_path / "again.toml").write_text(recipe.to_toml())
    assert load_recipe(tmp_path / "again.toml") == recipe


def test_overrides_and_schedules() -> None:
    recipe = load_recipe("tiny", ["training.memory=32", "training.batch=[[0, 4], [50, 8]]", "training.schedule=linear"])
    assert recipe.training.memory == 32
    assert recipe.training.batch == ((0, 4), (50, 8))
    assert recipe.training.schedule == "linear"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[training]\nsteps = 5\nbach = 3\n", "line 3: .*'training.bach'.*'training.batch'"),
        ("[model]\nlayers = 'two'\n[training]\nsteps = 5\n", 'line 2: model.layers="two"'),
        ("[training]\nsteps = 5\n\n[modell]\nlayers = 2\n", "line 4: .*'modell'.*'model'"),
        ("[model]\nfamily = 'transformerxl'\n[training]\nsteps = 5\n", "line 2: .*'transformerxl'.*'transformer-xl'"),
        ("training.steps = 5\ntraining.bach = 3\n", "line 2: .*'training.bach'"),
        ("training = {steps = 5, bach = 3}\n", "line 1: .*'training.bach'"),
        ("[training]\nsteps = 5\n[model.deep]\nlayers = 2\n", "line 3: .*'model.deep'"),
        ("[training]\nsteps = 5\n[[model]]\nlayers = 2\n", "line 3: model=.*layers"),
        ("\ufeff[training]\nsteps = 5\nlr = 'a'\n", 'line 3: training.lr="a"'),
        ("[training]\nlr = 1e-3\n", "training.steps.*training.tokens.*training.seconds"),
        ("[training]\nsteps = 5\naccumulate = 4\nbatch = 6\n", "line 3: training.accumulate=4 .*batch=6; .* of 4"),
        ("[training]\nsteps = 5\nbatch = [[3, 4]]\n", r"line 3: training.batch=\[\[3, 4\]\].* step 0"),
        ("[training]\nsteps = 5\nbatch = []\n", r"line 3: training.batch=\[\].* step 0"),
        ("[training]\nsteps = 5\npatience = 2\n", "line 3: training.patience=2 .*training.validate_every"),
        ("[training]\nsteps = 5\nschedule = 'cosin'\n", "line 3: .*'cosin'.*'cosine'"),
        ("training = 5\n", "line 1: training=5"),
        ("name = 5\n[training]\nsteps = 1\n", "name=5"),
        ("steps = [", "bad.toml.*TOML"),
    ],
)
def test_an_error_names_the_line_and_the_value(text: str, named: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=named):
        load_recipe(path)


@pytest.mark.parametrize(
    ("pairs", "named"),
    [
        (["training.stepps=5"], "'training.stepps'.*'training.steps'"),
        (["training.steps=five"], 'training.steps="five"'),
        (["training=5"], "training=5"),
        (["model.width=17"], "model.width=17 .*heads=4"),
        (["training.lr=nan"], "training.lr=nan"),
        (["training.validate_tokens=1"], "training.validate_tokens=1 .*2"),
        (["training.validate_tokens=-5"], "training.validate_tokens=-5 .*2"),
    ],
)
def test_an_error_of_an_override_names_no_line(pairs: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        load_recipe("tiny", pairs)
    assert "line" not in str(caught.value)


@pytest.mark.parametrize(("old", "new"), MOVED.items())
def test_a_key_of_an_older_version_names_its_new_name(old: str, new: str) -> None:
    with pytest.raises(ConfigError, match=rf"{re.escape(old)} to {re.escape(new)};") as caught:
        load_recipe("tiny", [f"{old}=1"])
    assert "tiny.toml" not in str(caught.value)
    table, _, key = new.partition(".")
    assert not key or key in {field.name for field in fields({"model": LongspanXLConfig, **SECTIONS}[table])}


def test_all_renamed_keys_of_a_recipe_are_named_at_once(tmp_path: Path) -> None:
    old = "[model]\nmemory = 3\n\n[data]\ntokens = 'bytes'\n\n[reached]\nscore = 1.0\n"
    changes = ["model.memory to training.memory", "data.tokens to data.tokenizer", "reached to result"]
    (tmp_path / "recipe.toml").write_text(old, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"^recipe\.toml, line 2: ") as caught:
        load_recipe(tmp_path / "recipe.toml")
    assert all(change in str(caught.value) for change in changes)
    (tmp_path / "run.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"^{tmp_path} .*0\.1.*cannot be resumed.*loaded") as caught:
        load_recipe(tmp_path / "recipe.toml")
    assert all(change in str(caught.value) for change in changes)


def test_a_recipe_of_another_family_is_not_blamed_for_an_override() -> None:
    with pytest.raises(ConfigError, match=r"^tiny\.toml, line 7, .*model\.family=lstm.*'model\.heads'"):
        load_recipe("tiny", ["model.family=lstm"])


def test_an_unknown_recipe_names_the_nearest_one() -> None:
    with pytest.raises(LongspanError, match=r"'tinny'.*'tiny'"):
        load_recipe("tinny")
    with pytest.raises(LongspanError, match=r"nowhere/x\.toml"):
        load_recipe("nowhere/x.toml")


def test_a_file_of_any_name_is_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine").write_text("[training]\nsteps = 5\n")
    assert load_recipe("mine").training.steps == 5


@pytest.mark.parametrize("name", ['a "quoted" name', "a\tb\nc\\d", "\x7f \u2028 é 猫"])
def test_any_string_survives_a_recipe_file(name: str, tmp_path: Path) -> None:
    recipe = build_recipe({"training": {"steps": 1}, "data": {"corpus": name}})
    (tmp_path / "r.toml").write_text(recipe.to_toml(), encoding="utf-8")
    assert load_recipe(tmp_path / "r.toml").data.corpus == name


def test_the_vocabulary_comes_from_the_text() -> None:
    recipe = build_recipe({"model": {"layers": 1}, "training": {"steps": 1}})
    assert recipe.with_vocabulary(27).model.vocabulary == 27
    with pytest.raises(ConfigError, match="cutoffs"):
        load_recipe("wt103-base").with_vocabulary(1000)
    words = build_recipe(
        {"model": {"cutoffs": [1000, 5000]}, "training": {"steps": 1}}
    )  # more than the default vocabulary of 256
    assert words.with_vocabulary(5001).model.cutoffs == (1000, 5000)
    for size in (5000, 256):
        with pytest.raises(ConfigError, match=rf"\[1000, 5000\].* {size};"):
            words.with_vocabulary(size)
    with pytest.raises(ConfigError, match="256"):
        build_recipe({"model": {"cutoffs": [1000], "vocabulary": 256}, "training": {"steps": 1}})
