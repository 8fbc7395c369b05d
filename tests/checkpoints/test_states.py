"""A saved state continues its stream, with the model that made it and no other."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from longspan.cache import KeyValueCache, TokenWindow
from longspan.checkpoints.states import load_state, save_state
from longspan.contract import LanguageModel, State
from longspan.decoding.open import open_decoder
from longspan.errors import CheckpointError, StateError
from longspan.tokenizers import Tokenizer

Small = Callable[..., tuple[LanguageModel, Tokenizer]]
MINE, OTHER = "a" * 64, "b" * 64


@pytest.mark.parametrize("form", ["plain", "untied", "adaptive", "vanilla"])
@torch.no_grad()
def test_a_restored_state_continues_with_the_same_logits(tmp_path: Path, small: Small, form: str) -> None:
    model, tokens = small(form)
    ids = torch.randint(0, tokens.size, (2, 12))
    _, state = model(ids[:, :7])
    save_state(tmp_path / "s", state, model_hash=MINE, extra={"sampler": torch.arange(5), "flag": torch.tensor(True)})
    again, extra = load_state(tmp_path / "s", model, model_hash=MINE)
    assert torch.equal(extra["sampler"], torch.arange(5))
    assert extra["flag"].item() is True
    assert again.reading == state.reading
    assert torch.equal(model(ids[:, 7:], again)[0], model(ids[:, 7:], state)[0])
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


def test_the_reading_of_a_state_is_restored(tmp_path: Path, small: Small) -> None:
    """Also where it is not the model's own."""
    model, _ = small()
    reading = replace(model.reading, memory=3, clamp=2)
    state = model.initial_state(1, reading)
    save_state(tmp_path / "s", state, model_hash=MINE)
    assert load_state(tmp_path / "s", model, model_hash=MINE)[0].reading == reading != model.reading


def test_an_empty_state(tmp_path: Path, small: Small) -> None:
    model, _ = small()
    state = model.initial_state(3)
    save_state(tmp_path / "s", state, model_hash=MINE)
    again, extra = load_state(tmp_path / "s", model, model_hash=MINE)
    assert extra == {}
    assert {name: tensor.shape for name, tensor in again.tensors().items()} == {
        name: tensor.shape for name, tensor in state.tensors().items()
    }


def test_a_state_of_another_model_is_refused_and_both_are_named(tmp_path: Path, small: Small) -> None:
    model, _ = small()
    save_state(tmp_path / "s", model.initial_state(1), model_hash=MINE)
    with pytest.raises(StateError, match=f"{MINE[:12]}.*{OTHER[:12]}"):
        load_state(tmp_path / "s", model, model_hash=OTHER)


def test_the_same_state_is_the_same_file(tmp_path: Path, small: Small) -> None:
    model, _ = small()
    _, state = model(torch.zeros(1, 5, dtype=torch.int64))
    for name in ("a", "b"):
        save_state(tmp_path / name, state, model_hash=MINE)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_files_that_are_not_states(tmp_path: Path, small: Small) -> None:
    model, path = small()[0], tmp_path / "s.state"
    with pytest.raises(CheckpointError, match=r"no state file .*s\.state"):
        load_state(path, model, model_hash=MINE)
    with pytest.raises(CheckpointError, match=rf"{tmp_path.name} cannot be read"):
        load_state(tmp_path, model, model_hash=MINE)
    for content, pattern in (
        (b"", r"s\.state .*safetensors"),
        (b"hello there, this is text", r"s\.state .*safetensors"),
        (save({"length": torch.zeros(1)}), r"s\.state is not a longspan state file"),
        (save({"length": torch.zeros(1)}, {"longspan": json.dumps({"format": 3})}), r"format 3.* 1 and 2"),
        (save({"length": torch.zeros(1)}, {"longspan": json.dumps({"format": True})}), r"format True.* 1 and 2"),
        (save({"length": torch.zeros(1)}, {"longspan": json.dumps({"format": 2})}), "SHA-256"),
        (save({"length": torch.zeros(1)}, {"longspan": json.dumps({"format": 1})}), "SHA-256"),
    ):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=pattern):
            load_state(path, model, model_hash=MINE)


def test_rows_must_agree(tmp_path: Path, small: Small) -> None:
    """Caches of another number of rows than the lengths, and lengths of another dtype."""
    model, _ = small()
    _, state = model.eval()(torch.zeros(2, 5, dtype=torch.int64))
    keys, values = state.caches[0]
    three = KeyValueCache(*(torch.cat([tensor, tensor[:1]]) for tensor in (keys, values)))
    for damaged, pattern in (
        (replace(state, caches=(three, *state.caches[1:])), r"0\.(keys|values).*\[3, .*\[2, "),
        (replace(state, length=state.length.int()), "int32.*int64"),
        (State((), state.length, state.reading), r"length.*0\.keys"),
    ):
        save_state(tmp_path / "s", damaged, model_hash=MINE)
        with pytest.raises(CheckpointError, match=pattern):
            load_state(tmp_path / "s", model, model_hash=MINE)


def test_tokens_must_be_in_the_vocabulary(tmp_path: Path, small: Small) -> None:
    model, _ = small("vanilla")
    decoder = open_decoder(model)
    decoder.prefill(torch.tensor([[3, 255]]))
    state = decoder.state()
    save_state(tmp_path / "s", state, model_hash=MINE)
    assert load_state(tmp_path / "s", model, model_hash=MINE)[0].tensors()["0.tokens"].flatten().tolist() == [3, 255]
    for shift in (1, -4):
        window = TokenWindow(state.caches[0].tokens + shift)
        save_state(tmp_path / "s", replace(state, caches=(window,)), model_hash=MINE)
        with pytest.raises(CheckpointError, match=rf"0\.tokens.* {3 + shift} to {255 + shift}.* 0 and 255"):
            load_state(tmp_path / "s", model, model_hash=MINE)
