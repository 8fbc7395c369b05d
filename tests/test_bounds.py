"""Every number of every config has an upper bound, and a value beyond it is a ConfigError of one short sentence."""

import dataclasses
import json
import typing
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from longspan import config
from longspan.errors import ConfigError
from longspan.models.families import BUILT_IN, family, outline
from longspan.nn import model_config
from longspan.reading import LONGEST, Reading
from longspan.training import recipe
from longspan.training.recipe import SECTIONS, build_recipe, load_recipe

CONFIGS: dict[str, tuple[type, str, dict[str, config.Bound]]] = {
    name: (family(name).Config, "model", model_config.LARGEST) for name in BUILT_IN
} | {name: (section, name, recipe.LARGEST) for name, section in SECTIONS.items()}
REQUIRED = {"training": {"steps": 1}}
ABSURD = [10**400, -(10**400), 16**5000, float("inf"), float("nan"), 1e308, -1e308]


def number_types(hint: Any) -> set[type]:
    """The number types (int, float) that occur in a type hint."""
    return {hint} if hint in (int, float) else set().union(*(number_types(inner) for inner in typing.get_args(hint)))


def numeric_keys(cls: type) -> dict[str, Any]:
    """The keys that take numbers, with their types."""
    hints = typing.get_type_hints(cls)
    return {entry.name: hints[entry.name] for entry in dataclasses.fields(cls) if number_types(hints[entry.name])}


def forms(hint: Any, value: Any) -> list[Any]:
    """A number in every form that a key accepts: a scalar, a tuple, a tuple of tuples."""
    if hint in (int, float):
        return [value]
    inner = typing.get_args(hint)
    if typing.get_origin(hint) is tuple:
        return [(form,) * (1 if inner[-1] is Ellipsis else len(inner)) for form in forms(inner[0], value)]
    return [form for choice in inner for form in forms(choice, value)]


KEYS = [(name, key) for name, (cls, _, _) in CONFIGS.items() for key in numeric_keys(cls)]


@pytest.mark.parametrize("name", CONFIGS)
def test_every_number_has_a_bound(name: str) -> None:
    cls, _, largest = CONFIGS[name]
    assert set(numeric_keys(cls)) <= set(largest)


@pytest.mark.parametrize(("name", "key"), KEYS)
def test_absurd_values_are_refused(name: str, key: str) -> None:
    """From a file, from a shell and from the constructor."""
    cls, where, largest = CONFIGS[name]
    hint, bound = numeric_keys(cls)[key], largest[key]
    integer, most = int in number_types(hint), max(bound) if isinstance(bound, tuple) else bound
    beyond = int(most) + 1 if integer else 2 * most
    for value in (*ABSURD, beyond, -beyond):
        for form in forms(hint, value):
            given = REQUIRED.get(name, {}) | {key: form}
            with pytest.raises(ConfigError, match=rf"{where}\.{key}") as caught:
                config.build(cls, given, where)
            assert len(str(caught.value)) < 300
            if isinstance(value, int) or not integer:
                with pytest.raises(ConfigError, match=rf"{where}\.{key}"):
                    cls(**given)


@pytest.mark.parametrize("key", numeric_keys(Reading))
def test_absurd_readings_are_refused(key: str) -> None:
    integer = numeric_keys(Reading)[key] is int
    beyond = LONGEST + 1 if integer else 101.0
    for value in (*ABSURD, beyond, -beyond):
        with pytest.raises(ConfigError, match=key) as caught:
            config.build(Reading, {key: value}, "reading")
        assert len(str(caught.value)) < 300
        if isinstance(value, int) or not integer:
            with pytest.raises(ConfigError, match=key):
                Reading(**{key: value})


def test_a_schedule_is_bounded_in_its_values_and_its_steps() -> None:
    for key, most in (("batch", 2**24), ("segment", 2**20), ("memory", 2**20)):
        for step, value in ((10**12 + 1, 1), (10, most + 1)):
            with pytest.raises(ConfigError, match=str(max(value, step))):
                recipe.TrainingConfig(steps=1, **{key: ((0, 1), (step, value))})
        assert recipe.TrainingConfig(steps=1, **{key: ((0, 1), (4_000_000, 16))})


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_largest_values_are_built_or_refused(name: str) -> None:
    """On the meta device. `layers` and `heads` are left out: building that many modules is slow."""
    cls, _, largest = CONFIGS[name]
    for key, hint in numeric_keys(cls).items():
        for form in forms(hint, largest[key]) if key not in ("layers", "heads") else ():
            with suppress(ConfigError):
                outline(name, config.build(cls, {"layers": 2} | {key: form}, "model"))


HUGE = "9" * 5000
DEEP = "[" * 400 + "]" * 400


@pytest.mark.parametrize("text", [HUGE, "9" * 400, f"0x{HUGE}", f"-{HUGE}", f"1e{HUGE}", "1e400", DEEP, "[" * 50_000])
@pytest.mark.parametrize("key", ["training.lr", "training.steps", "model.width", "model.cutoffs", "training.batch"])
def test_absurd_text_is_refused(tmp_path: Path, key: str, text: str) -> None:
    table, name = key.split(".")
    with pytest.raises(ConfigError) as caught:
        load_recipe("tiny", [f"{key}={text}"])
    assert len(str(caught.value)) < 300
    (tmp_path / "r.toml").write_text(f"[{table}]\n{name} = {text}\n")
    with pytest.raises(ConfigError) as caught:
        load_recipe(tmp_path / "r.toml")
    assert len(str(caught.value)) < 400


def test_deeply_nested_keys_are_refused() -> None:
    for path in ("model." + "a." * 5000, "model.width." + "a." * 5000, "a." * 5000):
        with pytest.raises(ConfigError):
            load_recipe("tiny", [f"{path}b=1"])


def test_absurd_values_from_json_are_refused() -> None:
    values = json.loads('{"model": {"dropout": 1e999, "width": 1' + "0" * 4000 + "}}")
    for key, value in values["model"].items():
        with pytest.raises(ConfigError, match=key):
            build_recipe({"model": {key: value}, "training": {"steps": 1}})
