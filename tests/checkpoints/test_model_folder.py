"""A saved and loaded model is the same model; files that do not belong together are refused."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from longspan.checkpoints.manifest import MANIFEST
from longspan.checkpoints.model_folder import find_model, load_model, override, save_model
from longspan.checkpoints.store import CheckpointWarning, read_folder, write_folder
from longspan.contract import LanguageModel
from longspan.errors import CheckpointError, ConfigError
from longspan.tokenizers import Tokenizer, WordTokenizer

Small = Callable[..., tuple[LanguageModel, Tokenizer]]
FORMS = ["plain", "untied", "adaptive", "variant", "vanilla"]


def same_weights(a: LanguageModel, b: LanguageModel) -> bool:
    mine, theirs = a.state_dict(), b.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize("form", FORMS)
def test_round_trip(tmp_path: Path, small: Small, form: str) -> None:
    model, tokens = small(form)
    digest = save_model(tmp_path / "m", model, tokens, notes=["drawn at random"])
    random = torch.random.get_rng_state()
    loaded = load_model(tmp_path / "m")
    assert torch.equal(random, torch.random.get_rng_state()), "loading must not consume random numbers"
    assert loaded.hash == digest
    assert loaded.tokenizer == tokens
    assert loaded.model.config == model.config
    assert loaded.model.reading == model.reading
    assert not loaded.model.training
    assert same_weights(loaded.model, model)
    ids = torch.randint(0, tokens.size, (2, 5))
    assert torch.equal(loaded.model(ids)[0], model(ids)[0])
    names = {"config.json", "model.safetensors", "tokenizer.json", "README.md", "manifest.json"}
    assert {path.name for path in (tmp_path / "m").iterdir()} == names
    assert "drawn at random" in (tmp_path / "m" / "README.md").read_text()


def test_the_card_can_be_edited_but_not_removed(tmp_path: Path, small: Small) -> None:
    model, tokens = small("plain")
    digest = save_model(tmp_path / "m", model, tokens)
    with (tmp_path / "m" / "README.md").open("a") as card:
        card.write("It likes sonnets.\n")
    assert load_model(tmp_path / "m").hash == digest
    (tmp_path / "m" / "README.md").unlink()
    with pytest.raises(CheckpointError, match=r"README.md is missing"):
        load_model(tmp_path / "m")


def test_tied_tensors_are_stored_once_and_tied_again(tmp_path: Path, small: Small) -> None:
    model, tokens = small("adaptive")
    save_model(tmp_path / "m", model, tokens)
    with safe_open(tmp_path / "m" / "model.safetensors", "pt") as file:
        stored = set(file.keys())
    assert len(stored) == len(list(model.parameters())) < len(model.state_dict())
    again = load_model(tmp_path / "m").model
    assert again.head.tables[0] is again.embedding.tables[0]
    assert again.head.projections[1] is again.embedding.projections[1]


def test_the_hash_covers_weights_and_tokenizer_but_not_notes_and_reading(tmp_path: Path, small: Small) -> None:
    model, tokens = small("adaptive")
    first = save_model(tmp_path / "a", model, tokens)
    assert save_model(tmp_path / "b", model, tokens, notes=["another note"]) == first
    assert load_model(tmp_path / "a", overrides={"memory": 9}).hash == first
    other = WordTokenizer(tuple(f"v{k}" for k in range(tokens.size)))
    assert save_model(tmp_path / "c", model, other) != first
    assert save_model(tmp_path / "d", small("adaptive", seed=1)[0], tokens) != first


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes(tmp_path: Path, small: Small, dtype: torch.dtype) -> None:
    model, tokens = small("plain")
    save_model(tmp_path / "m", model.to(dtype), tokens)
    assert same_weights(load_model(tmp_path / "m", dtype=dtype).model, model)
    # By default bfloat16 is converted to float32 on a CPU.
    default = torch.float64 if dtype == torch.float64 else torch.float32
    assert same_weights(load_model(tmp_path / "m").model, model.to(default))


def test_overrides(tmp_path: Path, small: Small) -> None:
    model, tokens = small("plain")
    save_model(tmp_path / "m", model, tokens)
    changed = load_model(tmp_path / "m", overrides={"memory": 20, "same_length": True, "clamp": 3}).model
    assert changed.reading == replace(model.reading, memory=20, same_length=True, clamp=3)
    assert changed.config == model.config
    assert same_weights(changed, model)
    discounted = replace(model.reading, clamp=7, discount=2.0)
    assert override("transformer-xl", discounted, {"memory": 20}).discount == 2.0
    assert override("transformer-xl", discounted, {"clamp": 7}).discount == 0.0  # a discount belongs to its clamp
    assert override("transformer-xl", discounted, {"clamp": 9, "discount": 1.0}).discount == 1.0


@pytest.mark.parametrize(
    ("overrides", "pattern"),
    [
        ({"layers": 3}, "'layers'.*clamp, discount, memory"),
        ({"memry": 3}, "'memry'.*'memory'"),
        ({"pointer": 3}, "transformer-xl.*'pointer'"),
        ({"memory": -1}, r"memory=-1"),
        ({"memory": "long"}, r"reading\.memory.*long"),
    ],
)
def test_only_settings_of_the_reading_can_be_overridden(
    tmp_path: Path, small: Small, overrides: dict[str, Any], pattern: str
) -> None:
    """A key of the config needs other weights; a pointer is not part of this family."""
    save_model(tmp_path / "m", *small("plain"))
    with pytest.raises(ConfigError, match=pattern):
        load_model(tmp_path / "m", overrides=overrides)


@pytest.mark.parametrize(
    ("form", "reading", "pattern"),
    [
        ("plain", {"memory": -1}, "memory=-1"),
        ("plain", {"memry": 1}, "memry"),
        ("plain", {"segment": "x"}, "segment"),
        ("plain", {"pointer": 3}, "pointer"),
        ("variant", {"pointer": 3}, "pointer=3"),
    ],
)
def test_a_stored_reading_is_checked(
    tmp_path: Path, small: Small, form: str, reading: dict[str, Any], pattern: str
) -> None:
    """The variant could have a pointer, but this model has no weights for it."""
    save_model(tmp_path / "m", *small(form))
    files = {path.name: path.read_bytes() for path in (tmp_path / "m").iterdir() if path.name != MANIFEST}
    values = json.loads(files["config.json"])
    values["reading"] |= reading
    write_folder(tmp_path / "n", files | {"config.json": json.dumps(values).encode()})
    with pytest.raises(CheckpointError, match=pattern):
        load_model(tmp_path / "n")


def test_a_run_is_its_best_or_its_newest_undamaged_checkpoint(tmp_path: Path, small: Small) -> None:
    tokens = small()[1]
    digests = {}
    for seed, name in enumerate(("checkpoint-10", "checkpoint-9", "best")):
        digests[name] = save_model(tmp_path / name, small(seed=seed)[0], tokens, extra={"optimizer.bin": b"momenta"})
    assert load_model(tmp_path).hash == digests["best"]
    assert find_model(tmp_path, keep=["optimizer.bin"]).contents["optimizer.bin"] == b"momenta"
    (tmp_path / "best" / "optimizer.bin").write_bytes(b"Momenta")
    with pytest.warns(CheckpointWarning, match=r"best.*optimizer\.bin"):
        assert load_model(tmp_path).hash == digests["checkpoint-10"]
    shutil.rmtree(tmp_path / "best")
    assert load_model(tmp_path).hash == digests["checkpoint-10"]
    (tmp_path / "checkpoint-10" / "config.json").unlink()
    with pytest.warns(CheckpointWarning, match=r"checkpoint-10.*config\.json"):
        assert load_model(tmp_path).hash == digests["checkpoint-9"]
    (tmp_path / "checkpoint-9" / "config.json").unlink()
    with pytest.warns(CheckpointWarning), pytest.raises(CheckpointError, match=r" 2 .*checkpoint-10.config\.json"):
        load_model(tmp_path)


def test_an_existing_model_is_not_overwritten(tmp_path: Path, small: Small) -> None:
    model, tokens = small()
    first = save_model(tmp_path / "m", model, tokens)
    with pytest.raises(CheckpointError, match="m already exists"):
        save_model(tmp_path / "m", small(seed=1)[0], tokens)
    assert load_model(tmp_path / "m").hash == first


def test_folders_that_are_not_models(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no folder .*nowhere"):
        load_model(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(CheckpointError, match=r"no manifest\.json"):
        load_model(tmp_path)
    with pytest.raises(CheckpointError, match=r"config\.json is a file"):
        load_model(tmp_path / "config.json")


def test_weights_of_several_dtypes_are_refused(tmp_path: Path, small: Small) -> None:
    model, tokens = small()
    model.u.data = model.u.data.half()
    with pytest.raises(CheckpointError, match=r"torch\.float16, torch\.float32"):
        save_model(tmp_path / "m", model, tokens)
    assert not list(tmp_path.iterdir())


def test_the_manifest_covers_every_file(tmp_path: Path, small: Small) -> None:
    save_model(tmp_path / "m", *small())
    listed = set(read_folder(tmp_path / "m").files)
    assert listed == {path.name for path in (tmp_path / "m").iterdir()} - {"manifest.json"}
