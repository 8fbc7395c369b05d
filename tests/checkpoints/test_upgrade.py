"""Model folders and states of format 1, written by longspan 0.1.0: they load and give the same values."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, load_file, save

from longspan.checkpoints.model_folder import load_model, save_model
from longspan.checkpoints.states import KEY, _digest, load_state
from longspan.checkpoints.upgrade import upgrade_config
from longspan.decoding.open import open_decoder
from longspan.decoding.sampling import Sampling
from longspan.errors import CheckpointError, StateError
from longspan.models.families import name_of
from longspan.shapes import Tensor
from longspan.text_model import TextModel

FIXTURES = Path(__file__).parent / "fixtures"
FAMILIES = {"paper": "transformer-xl", "variant": "longspan-xl", "compressive": "compressive", "vanilla": "vanilla"}
TOLERANCE = 1e-12


def expected(case: str) -> dict[str, Tensor]:
    return load_file(FIXTURES / f"{case}.expected.safetensors")


@torch.no_grad()
def stream_losses(folder: Path, values: dict[str, Tensor]) -> Tensor:
    model, ids, cuts = load_model(folder).model, values["tokens"], values["cuts"].tolist()
    state, losses = model.initial_state(2), []
    for start, end in pairwise(cuts):
        part, state = model.losses(ids[:, start:end], ids[:, start + 1 : end + 1], state)
        losses.append(part)
    return torch.cat(losses, 1)


@pytest.mark.parametrize("case", FAMILIES)
def test_a_model_folder_gives_the_same_losses(case: str) -> None:
    values = expected(case)
    assert values["losses"].std() > 0.1
    assert json.loads((FIXTURES / case / "config.json").read_text())["format"] == 1
    assert name_of(load_model(FIXTURES / case).model) == FAMILIES[case]
    torch.testing.assert_close(stream_losses(FIXTURES / case, values), values["losses"], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("case", FAMILIES)
def test_saved_again_it_is_format_2_with_the_same_losses(tmp_path: Path, case: str) -> None:
    loaded = load_model(FIXTURES / case)
    save_model(tmp_path / "m", loaded.model, loaded.tokenizer)
    assert json.loads((tmp_path / "m" / "config.json").read_text())["format"] == 2
    assert load_model(tmp_path / "m").model.reading == loaded.model.reading
    values = expected(case)
    assert torch.equal(stream_losses(tmp_path / "m", values), stream_losses(FIXTURES / case, values))


@pytest.mark.parametrize("case", FAMILIES)
@torch.no_grad()
def test_a_saved_state_continues_with_the_same_logits(case: str) -> None:
    loaded, values = load_model(FIXTURES / case), expected(case)
    state, _ = load_state(FIXTURES / f"{case}.state", loaded.model, model_hash=loaded.hash)
    decoder, first = open_decoder(loaded.model, state), int(values["prompt"]) - 1
    steps = range(first, first + len(values["logits"]))
    logits = torch.cat([decoder.step(values["tokens"][:1, position]).clone() for position in steps])
    torch.testing.assert_close(logits, values["logits"], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("case", FAMILIES)
def test_a_saved_session_generates_the_same_tokens(case: str) -> None:
    loaded = load_model(FIXTURES / case)
    session = TextModel(loaded.model, loaded.tokenizer, loaded.hash).session(state=FIXTURES / f"{case}.state")
    generated = expected(case)["generated"].tolist()
    assert len(set(generated)) > 5
    assert list(session.write(len(generated), Sampling(temperature=0.8))) == generated


def test_a_state_with_a_pointer_cache_loads_with_the_pointer_off() -> None:
    loaded = load_model(FIXTURES / "variant", overrides={"pointer": 0})
    state, _ = load_state(FIXTURES / "variant.state", loaded.model, model_hash=loaded.hash)
    assert len(state.caches) == loaded.model.config.layers
    assert state.reading.pointer == 0
    loaded.model(torch.tensor([[3]]), state)


def test_a_state_of_another_model_is_refused() -> None:
    loaded = load_model(FIXTURES / "paper")
    with pytest.raises(StateError, match=loaded.hash[:12]):
        load_state(FIXTURES / "variant.state", loaded.model, model_hash=loaded.hash)


@pytest.mark.parametrize("case", FAMILIES)
def test_a_damaged_state_is_refused(tmp_path: Path, case: str) -> None:
    """Format 1 has the checks of format 2: each tensor removed, added, cut to one row less or of another dtype."""
    loaded, content = load_model(FIXTURES / case), (FIXTURES / f"{case}.state").read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    about = json.loads(header["__metadata__"][KEY])
    tensors = load(content)
    names = [name for name in tensors if name.startswith("state.")]
    assert len(names) > 1
    for name in names:
        rest = {key: tensor for key, tensor in tensors.items() if key != name}
        tensor = tensors[name]
        part, _, index = name.rpartition(".")
        other = torch.int32 if tensor.dtype == torch.int64 else torch.int64
        for damaged in (
            rest,
            tensors | {f"{part}.9": tensor},
            tensors | {f"{name}x": tensor},
            rest | {f"{part}.{index}.0": tensor},
            tensors | {name: tensor[:0].clone()},
            tensors | {name: tensor.to(other)},
            tensors | {name: tensor - 1000 if name == "state.length" else tensor[..., :-1]},
        ):
            changed = {key: value for key, value in about.items() if key != "sha256"}
            damaged = {key: value.clone() for key, value in damaged.items()}
            changed["sha256"] = _digest(changed, damaged)
            (tmp_path / "s").write_bytes(save(damaged, {KEY: json.dumps(changed)}))
            with pytest.raises(CheckpointError):
                load_state(tmp_path / "s", loaded.model, model_hash=loaded.hash)


def test_keys_that_a_config_leaves_out_have_the_defaults_of_format_1() -> None:
    assert upgrade_config("transformer-xl", {"width": 8, "copy": 3}) == (
        "transformer-xl",
        {"width": 8, "norm": "post", "shared_biases": True},
        {"pointer": 3},
    )
    assert upgrade_config("transformer-xl", {"memory": 4, "copy": 0})[2] == {"memory": 4}
    family, values, _ = upgrade_config("transformer-xl", {"convolution": 3})
    assert family == "longspan-xl"
    assert (values["norm_type"], values["final_norm"], values["qk_norm"]) == ("layer", False, False)
    assert upgrade_config("transformer-xl", {"output_dropout": 0.1})[0] == "longspan-xl"
    assert upgrade_config("vanilla", {"segment": 5, "width": 8}) == ("vanilla", {"width": 8}, {"segment": 5})
