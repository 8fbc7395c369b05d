"""`longspan config`, `train --help`, grouped help and shell completion."""

import dataclasses
import os
import re
import subprocess
import sys
from typing import get_args

import pytest

from longspan import config
from longspan.cli import completion
from longspan.cli.keys import recipe_keys
from longspan.cli.main import GROUPS
from longspan.models.families import family, known_families
from longspan.scoring.surprisal import Per
from longspan.scoring.surprisal_files import FORMATS
from longspan.training.recipe import SECTIONS

from .conftest import Cli


def test_every_key_of_a_recipe_is_described_with_its_default() -> None:
    """The source is parsed without being imported: keys and defaults must be those of the imported classes."""
    expected = {
        f"{table}.{name}": default
        for table in ("data", "training", "evaluation")
        for name, default in config.keys(SECTIONS[table]).items()
    }
    found = {key.name: key for key in recipe_keys()}
    assert set(found) == set(expected)
    for name, key in found.items():
        assert eval(key.default) == expected[name], name
        assert key.text.endswith("."), name
        assert (key.default == "None") == ("Default:" in key.text), name  # each key has one default


def test_config_lists_keys_within_100_columns(cli: Cli) -> None:
    listed = cli("config").out
    assert max(map(len, listed.splitlines())) <= 100
    assert "training.lr " in listed
    assert "model.layers " in listed
    one = cli("config", "training.lr").out
    assert one.split() == ["training.lr", "Learning", "rate", "of", "AdamW", "or", "SGD.", "Default:", "0.00025."]
    assert len(cli("config", "data", "--json").json["keys"]) == len(dataclasses.fields(SECTIONS["data"]))
    assert "One of cosine, inverse-sqrt, linear, constant, slanted-triangular." in " ".join(
        cli("config", "training.schedule").out.split()
    )
    cli("config", "training.rl").refused("training.rl", "training.lr")


def test_keys_of_a_model_have_the_default_of_each_family(cli: Cli) -> None:
    (layers,) = cli("config", "model.layers", "--json").json["keys"]
    assert layers["families"] == {name: config.keys(family(name).Config)["layers"] for name in known_families()}
    assert "Default: 6; 3 (lstm, awd-lstm, qrnn); 2 (elmo); 1 (universal)." in " ".join(
        cli("config", "model.layers").out.split()
    )
    own = {
        key["name"].removeprefix("model."): key
        for key in cli("config", "model", "--family", "qrnn", "--json").json["keys"]
    }
    assert own.pop("family")["default"] == "qrnn"
    assert {name: key["families"]["qrnn"] for name, key in own.items()} == {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in config.keys(family("qrnn").Config).items()
    }
    for key in cli("config", "model", "--json").json["keys"]:
        assert key["default"] or "efault" in key["text"], key["name"]
    cli("config", "--family", "qrn").refused("qrn", "qrnn")


def test_train_help_has_every_key(cli: Cli) -> None:
    out = cli("train", "--help").out
    for key in recipe_keys():
        assert f"  {key.name} " in out


def test_help_is_grouped(cli: Cli) -> None:
    out = cli("--help").out
    places = [out.index(f"\n{group}:") for group in GROUPS]
    assert places == sorted(places)
    for group, verbs in GROUPS.items():
        section = out.partition(f"\n{group}:\n")[2].partition("\n\n")[0]
        assert all(f"  {name} " in section for name in verbs), group


@pytest.mark.parametrize("verb", [name for verbs in GROUPS.values() for name in verbs])
def test_usage_lines_have_single_brackets(cli: Cli, verb: str) -> None:
    usage = cli(verb, "--help").out.partition("\n\n")[0]
    assert usage.startswith(f"Usage: longspan {verb} ")
    assert not re.search(r"\[\[|\]\]|\.\.\.[}\]]", usage)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("longspan gen", "generate"),
        ("longspan generate --repet", "--repetition-penalty"),
        ("longspan config training.muon_m", "training.muon_momentum"),
    ],
)
def test_shell_completion(line: str, expected: str) -> None:
    environment = os.environ | {"_LONGSPAN_COMPLETE": "complete_bash", "COMP_WORDS": line}
    environment["COMP_CWORD"] = str(len(line.split()) - 1)
    done = subprocess.run([sys.executable, "-m", "longspan"], env=environment, capture_output=True, text=True)
    assert done.stdout.split() == [expected], done.stderr


def test_values_are_completed() -> None:
    assert completion.recipe_values("tin") == ["tiny"]
    assert completion.family_values("awd") == ["awd-lstm"]
    assert completion.page_values("eco") == ["ecosystem"]
    assert tuple(completion.unit_values("")) == get_args(Per)
    assert completion.table_values("") == list(FORMATS)
