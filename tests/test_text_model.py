"""TextModel: text in and out, and the model contract on tokens."""

from pathlib import Path

import pytest
import torch

import longspan
from longspan.checkpoints.model_folder import save_model
from longspan.errors import ConfigError, DataError, DeviceError, UnknownNameError
from longspan.scoring.dynamic import Dynamics
from longspan.scoring.score import score as score_ids
from longspan.tokenizers import ByteTokenizer
from tests.support import build


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = build("transformer-xl", {"layers": 2, "width": 32, "heads": 2, "segment": 8, "memory": 16})
    save_model(tmp_path / "m", model, ByteTokenizer())
    return tmp_path / "m"


def test_text_and_tokens_give_the_same_losses_and_hidden_states(folder: Path) -> None:
    model, text = longspan.load(folder), "a text of some length"
    ids = torch.tensor(list(text.encode()))[None]
    with torch.no_grad():
        losses, _ = model.losses(ids[:, :8], ids[:, 1:9], model.initial_state(1))
        hidden, _ = model.model.hidden_states(ids[:, :8])
        logits, state = model(ids[:, :8], None, torch.zeros(1, 8, dtype=torch.bool))
    score, layers = model.score(text), model.hidden_states(text)
    torch.testing.assert_close(torch.from_numpy(score.losses[:8]), losses[0])
    assert (score.scored, len(score.losses), len(layers)) == (len(text) - 1, len(text) - 1, 3)
    assert score.bits_per_byte == pytest.approx(score.bits)  # of the predicted bytes, all but the first
    torch.testing.assert_close(layers[1][:8], hidden[1][0])
    assert logits.shape == (1, 8, 256)
    assert int(state.length) == 8


def test_score_takes_streams_and_dynamics(folder: Path) -> None:
    model, text = longspan.load(folder), "a text that is long enough for three streams"
    reference = score_ids(model.model, model.tokenizer.encode(text), streams=3)
    for found in (
        model.score(text, streams=3),
        model.score([text], streams=3)[0],
        longspan.score(text, model, streams=3),
    ):
        assert (found.streams, found.nats) == (3, reference.nats)
    slow, fast = Dynamics(rate=1e-6), Dynamics(rate=1e-2)
    scores = {one: model.score(text, method="dynamic", dynamics=one).nats for one in (slow, fast)}
    assert scores[slow] == pytest.approx(model.score(text).nats, abs=1e-3)
    assert abs(scores[fast] - scores[slow]) > 1e-2
    assert longspan.score([text], model, method="dynamic", dynamics=fast)[0].nats == scores[fast]
    with pytest.raises(ConfigError, match=r"streams=3.*'sliding'"):
        model.score(text, method="sliding", streams=3)
    with pytest.raises(ConfigError, match=r"rate=0\.01.*'dynamic'"):
        model.score(text, dynamics=fast)


def test_hidden_states_take_a_string_bytes_or_a_list(folder: Path) -> None:
    model, texts = longspan.load(folder), ["the first text", "a second one"]
    together = model.hidden_states(texts)
    assert isinstance(together, list)
    for text, layers in zip(texts, together, strict=True):
        assert [layer.shape for layer in layers] == [(len(text), 32)] * 3
        torch.testing.assert_close(model.hidden_states(text), layers, rtol=0, atol=0)
        torch.testing.assert_close(model.hidden_states(text.encode()), layers, rtol=0, atol=0)
    assert model.hidden_states([]) == []
    with pytest.raises(DataError, match="0 tokens"):
        model.hidden_states(["a", ""])


def test_inference_mode_and_changed_weights(folder: Path) -> None:
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


def test_members_of_the_model_can_be_used_and_others_are_refused(folder: Path) -> None:
    model = longspan.load(folder, device="cpu")
    assert model.config is model.model.config
    assert model.reading is model.model.reading
    assert model.parameter_count == sum(parameter.numel() for parameter in model.parameters())
    other = longspan.Reading(segment=8, memory=0)
    assert (model.reach(), model.reach(other)) == (model.model.reach(), model.model.reach(other))
    assert (model.has_memory(), model.has_memory(other)) == (True, False)
    assert model.initial_state(3, other, filled=True).batch == 3
    assert model.reading_with(memory=5) == longspan.Reading(segment=8, memory=5)
    with pytest.raises(AttributeError, match="scoer"):
        model.scoer("x")  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="reading"):
        model.reading = other  # type: ignore[misc]


def test_a_model_can_be_moved_and_converted(folder: Path) -> None:
    model = longspan.load(folder, device="cpu")
    before = model.score("a text").nats
    assert model.to("cpu", "float64") is model
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}
    assert model.device == torch.device("cpu")
    assert model.score("a text").nats == pytest.approx(before)
    with pytest.raises(UnknownNameError, match=r"device.*gpu"):
        model.to("gpu")
    with pytest.raises(DeviceError, match="bfloat16"):
        model.to(dtype="bfloat16")


def test_the_sampling_temperature_multiplies_that_of_the_reading(folder: Path) -> None:
    """2 and 0.5 cancel exactly, because a division by a power of two does not round."""
    plain, flat = longspan.load(folder, device="cpu"), longspan.load(folder, device="cpu", temperature=2)
    texts = [plain.generate("a", 40, seed=5), flat.generate("a", 40, seed=5, temperature=0.5)]
    assert texts[0] == texts[1]
    assert flat.generate("a", 40, seed=5) == plain.generate("a", 40, seed=5, temperature=2) != texts[0]


def test_a_negative_number_of_tokens_is_refused(folder: Path) -> None:
    model = longspan.load(folder)
    assert model.generate("a", 0) == ""
    with pytest.raises(ConfigError, match="max_new_tokens=-1"):
        model.generate("a", -1)


def test_an_unavailable_device_or_precision_is_refused(folder: Path) -> None:
    with pytest.raises(DeviceError, match="bfloat16"):
        longspan.load(folder, dtype=torch.bfloat16)
    with pytest.raises(UnknownNameError, match=r"device.*gpu"):
        longspan.load(folder, device="gpu")
    if not torch.cuda.is_available():
        with pytest.raises(DeviceError, match=r"'cuda'.* 0 "):
            longspan.load(folder, device="cuda")
