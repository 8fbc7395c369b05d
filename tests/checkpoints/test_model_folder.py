"""A model saved and loaded is the same model; what does not fit together is refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from longspan.checkpoints.model_folder import find_model, load_model, save_model
from longspan.checkpoints.store import CheckpointWarning, read_folder
from longspan.contract import LanguageModel
from longspan.errors import CheckpointError, ConfigError
from longspan.tokens import Tokenizer, WordTokenizer

Small = Callable[..., tuple[LanguageModel, Tokenizer]]
FORMS = ["plain", "untied", "adaptive", "vanilla"]


def same_weights(a: LanguageModel, b: LanguageModel) -> bool:
    mine, theirs = a.state_dict(), b.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize("form", FORMS)
def test_round_trip(tmp_path: Path, small: Small, form: str) -> None:
    model, tokens = small(form)
    digest = save_model(tmp_path / "m", model, tokens, notes=["drawn at random"])
    random = torch.random.get_rng_state()
    loaded = load_model(tmp_path / "m")
    assert torch.equal(random, torch.random.get_rng_state()), "loading spends no random numbers"
    assert loaded.hash == digest
    assert loaded.tokenizer == tokens
    assert loaded.model.config == model.config
    assert not loaded.model.training
    assert same_weights(loaded.model, model)
    ids = torch.randint(0, tokens.size, (2, 5))
    assert torch.equal(loaded.model(ids)[0], model(ids)[0])
    names = {"config.json", "model.safetensors", "tokenizer.json", "README.md", "manifest.json"}
    assert {path.name for path in (tmp_path / "m").iterdir()} == names
    assert "drawn at random" in (tmp_path / "m" / "README.md").read_text()


def test_the_card_may_be_edited(tmp_path: Path, small: Small) -> None:
    model, tokens = small("plain")
    digest = save_model(tmp_path / "m", model, tokens)
    with (tmp_path / "m" / "README.md").open("a") as card:
        card.write("It likes sonnets.\n")
    assert load_model(tmp_path / "m").hash == digest
    (tmp_path / "m" / "README.md").unlink()
    with pytest.raises(CheckpointError, match=r"README.md is missing"):
        load_model(tmp_path / "m")


def test_shared_tensors_are_stored_once_and_shared_again(tmp_path: Path, small: Small) -> None:
    model, tokens = small("adaptive")
    save_model(tmp_path / "m", model, tokens)
    with safe_open(tmp_path / "m" / "model.safetensors", "pt") as file:
        stored = set(file.keys())
    assert len(stored) == len(list(model.parameters())) < len(model.state_dict())
    again = load_model(tmp_path / "m").model
    assert again.head.tables[0] is again.embedding.tables[0]
    assert again.head.projections[1] is again.embedding.projections[1]


def test_the_hash_is_the_models_own(tmp_path: Path, small: Small) -> None:
    model, tokens = small("adaptive")
    first = save_model(tmp_path / "a", model, tokens)
    assert save_model(tmp_path / "b", model, tokens, notes=["another note"]) == first
    assert load_model(tmp_path / "a", overrides={"memory": 9}).hash == first
    other = WordTokenizer(tuple(f"v{k}" for k in range(tokens.size)))
    assert save_model(tmp_path / "c", model, other) != first
    assert save_model(tmp_path / "d", small("adaptive", seed=1)[0], tokens) != first


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions(tmp_path: Path, small: Small, dtype: torch.dtype) -> None:
    model, tokens = small("plain")
    save_model(tmp_path / "m", model.to(dtype), tokens)
    assert same_weights(load_model(tmp_path / "m", dtype=dtype).model, model)
    # Half the width is not computed in on a CPU unless asked for.
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert same_weights(load_model(tmp_path / "m").model, model.to(wide))


def test_overrides(tmp_path: Path, small: Small) -> None:
    model, tokens = small("plain")
    save_model(tmp_path / "m", model, tokens)
    changed = load_model(tmp_path / "m", overrides={"memory": 20, "same_length": True, "clamp": 3}).model
    assert (changed.config.memory, changed.config.same_length, changed.config.clamp) == (20, True, 3)
    assert same_weights(changed, model)
    with pytest.raises(ConfigError, match="other weights"):
        load_model(tmp_path / "m", overrides={"layers": 3})
    with pytest.raises(ConfigError, match=r"did you mean 'model\.memory'"):
        load_model(tmp_path / "m", overrides={"memry": 3})


def test_a_run_is_its_best_or_its_newest_whole_checkpoint(tmp_path: Path, small: Small) -> None:
    tokens = small()[1]
    digests = {}
    for seed, name in enumerate(("checkpoint-10", "checkpoint-9", "best")):
        digests[name] = save_model(tmp_path / name, small(seed=seed)[0], tokens, extra={"optimizer.bin": b"momenta"})
    assert load_model(tmp_path).hash == digests["best"]
    assert find_model(tmp_path, keep=["optimizer.bin"]).contents["optimizer.bin"] == b"momenta"
    (tmp_path / "best" / "optimizer.bin").write_bytes(b"Momenta")
    with pytest.warns(CheckpointWarning, match="best is passed over"):
        assert load_model(tmp_path).hash == digests["checkpoint-10"]
    shutil.rmtree(tmp_path / "best")
    assert load_model(tmp_path).hash == digests["checkpoint-10"]
    (tmp_path / "checkpoint-10" / "config.json").unlink()
    with pytest.warns(CheckpointWarning, match="checkpoint-10 is passed over"):
        assert load_model(tmp_path).hash == digests["checkpoint-9"]
    (tmp_path / "checkpoint-9" / "config.json").unlink()
    with pytest.warns(CheckpointWarning), pytest.raises(CheckpointError, match="no whole checkpoint"):
        load_model(tmp_path)


def test_an_existing_model_is_not_overwritten(tmp_path: Path, small: Small) -> None:
    model, tokens = small()
    first = save_model(tmp_path / "m", model, tokens)
    with pytest.raises(CheckpointError, match="already exists"):
        save_model(tmp_path / "m", small(seed=1)[0], tokens)
    assert load_model(tmp_path / "m").hash == first


def test_foreign_folders(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no folder"):
        load_model(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(CheckpointError, match="no manifest"):
        load_model(tmp_path)
    with pytest.raises(CheckpointError, match="is a file"):
        load_model(tmp_path / "config.json")


def test_mixed_precision_is_refused(tmp_path: Path, small: Small) -> None:
    model, tokens = small()
    model.u.data = model.u.data.half()
    with pytest.raises(CheckpointError, match="saved in one of"):
        save_model(tmp_path / "m", model, tokens)
    assert not list(tmp_path.iterdir())


def test_the_manifest_covers_every_file(tmp_path: Path, small: Small) -> None:
    save_model(tmp_path / "m", *small())
    listed = set(read_folder(tmp_path / "m").files)
    assert listed == {path.name for path in (tmp_path / "m").iterdir()} - {"manifest.json"}
