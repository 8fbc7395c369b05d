"""A state goes on where it stopped, with the model that made it and no other."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from longspan.checkpoints.states import load_state, save_state
from longspan.contract import LanguageModel, State
from longspan.errors import CheckpointError, StateError
from longspan.tokens import Tokenizer

Small = Callable[..., tuple[LanguageModel, Tokenizer]]
MINE, OTHER = "a" * 64, "b" * 64


@pytest.mark.parametrize("form", ["plain", "untied", "adaptive", "vanilla"])
@torch.no_grad()
def test_a_restored_state_goes_on_as_if_nothing_had_happened(tmp_path: Path, small: Small, form: str) -> None:
    model, tokens = small(form)
    ids = torch.randint(0, tokens.size, (2, 12))
    _, state = model(ids[:, :7])
    save_state(tmp_path / "s", state, model_hash=MINE, extra={"sampler": torch.arange(5), "flag": torch.tensor(True)})
    again, extra = load_state(tmp_path / "s", model_hash=MINE)
    assert torch.equal(extra["sampler"], torch.arange(5))
    assert extra["flag"].item() is True
    assert torch.equal(model(ids[:, 7:], again)[0], model(ids[:, 7:], state)[0])
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


def test_an_empty_state(tmp_path: Path, small: Small) -> None:
    state = small()[0].initial_state(3)
    save_state(tmp_path / "s", state, model_hash=MINE)
    again, extra = load_state(tmp_path / "s", model_hash=MINE)
    assert extra == {}
    assert {name: tensor.shape for name, tensor in again.tensors().items()} == {
        name: tensor.shape for name, tensor in state.tensors().items()
    }


def test_another_model_refuses_it_and_names_both(tmp_path: Path, small: Small) -> None:
    save_state(tmp_path / "s", small()[0].initial_state(1), model_hash=MINE)
    with pytest.raises(StateError, match=f"{MINE[:12]}.*{OTHER[:12]}"):
        load_state(tmp_path / "s", model_hash=OTHER)


def test_the_same_state_is_the_same_file(tmp_path: Path, small: Small) -> None:
    model, _ = small()
    _, state = model(torch.zeros(1, 5, dtype=torch.int64))
    for name in ("a", "b"):
        save_state(tmp_path / name, state, model_hash=MINE)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_foreign_files(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with pytest.raises(CheckpointError, match="no state file"):
        load_state(path, model_hash=MINE)
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_state(tmp_path, model_hash=MINE)
    for content, word in (
        (b"", "not readable safetensors"),
        (b"hello there, this is text", "not readable safetensors"),
        (save({"length": torch.zeros(1)}), "no state file of longspan"),
        (save({"length": torch.zeros(1)}, {"longspan": json.dumps({"format": 2})}), "format 2"),
        (save({"length": torch.zeros(1)}, {"longspan": json.dumps({"format": 1})}), "SHA-256"),
    ):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=word):
            load_state(path, model_hash=MINE)


def test_rows_must_agree(tmp_path: Path) -> None:
    for state in (
        State(torch.zeros(2, dtype=torch.int64), {"hidden": (torch.zeros(3, 4),)}),
        State(torch.zeros(2, dtype=torch.int32), {}),
    ):
        save_state(tmp_path / "s", state, model_hash=MINE)
        with pytest.raises(CheckpointError):
            load_state(tmp_path / "s", model_hash=MINE)
