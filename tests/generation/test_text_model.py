"""`longspan.load`: text in and out, the contract below."""

from pathlib import Path

import pytest
import torch

import longspan
from longspan.checkpoints.model_folder import save_model
from longspan.errors import ConfigError, DeviceError, UnknownNameError
from longspan.models.families import build
from longspan.tokens import ByteTokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = build("transformer-xl", {"layers": 2, "width": 32, "heads": 2, "segment": 8, "memory": 16})
    save_model(tmp_path / "m", model, ByteTokenizer())
    return tmp_path / "m"


def test_text_and_tokens_agree(folder: Path) -> None:
    model, text = longspan.load(folder), "a text of some length"
    ids = torch.tensor(list(text.encode()))[None]
    with torch.no_grad():
        losses, _ = model.losses(ids[:, :8], ids[:, 1:9], model.initial_state(1))
        hidden, _ = model.model.hidden_states(ids[:, :8])
        logits, state = model(ids[:, :8], None, torch.zeros(1, 8, dtype=torch.bool))
    score, layers = model.score(text), model.hidden_states(text)
    torch.testing.assert_close(torch.from_numpy(score.losses[:8]), losses[0])
    assert (score.tokens, len(score.losses), len(layers)) == (len(text), len(text) - 1, 3)
    torch.testing.assert_close(layers[1][:8], hidden[1][0])
    assert logits.shape == (1, 8, 256)
    assert int(state.length) == 8


def test_everything_works_in_inference_mode_and_after_weights_have_moved(folder: Path) -> None:
    with torch.inference_mode():
        model = longspan.load(folder)
        model.generate("a", 4)
        before = model.score("the same text twice").nats
        for parameter in model.parameters():
            parameter.data.mul_(1.5)
        after = model.score("the same text twice").nats
    fresh = longspan.load(folder)
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.mul_(1.5)
    assert after != before
    assert abs(after - fresh.score("the same text twice").nats) < 1e-6


def test_fewer_than_no_tokens_are_refused(folder: Path) -> None:
    model = longspan.load(folder)
    assert model.generate("a", 0) == ""
    with pytest.raises(ConfigError, match="max_new_tokens=-1 must not be negative"):
        model.generate("a", -1)


def test_a_device_or_precision_that_is_not_there(folder: Path) -> None:
    with pytest.raises(DeviceError, match="bfloat16"):
        longspan.load(folder, dtype=torch.bfloat16)
    with pytest.raises(UnknownNameError, match="device"):
        longspan.load(folder, device="gpu")
    if not torch.cuda.is_available():
        with pytest.raises(DeviceError, match="no device 'cuda'"):
            longspan.load(folder, device="cuda")
