"""Mutated checkpoints and states: loading never crashes, never gives other weights, and raises one class of error.

Half of the mutations get a new manifest that matches them, so that only the checks of the contents can find the damage.
"""

import hashlib
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save

from longspan.checkpoints.manifest import MANIFEST
from longspan.checkpoints.model_folder import load_model, save_model
from longspan.checkpoints.states import load_state, save_state
from longspan.contract import LanguageModel
from longspan.errors import CheckpointError
from longspan.models.families import name_of
from longspan.tokenizers import Tokenizer

Small = Callable[..., tuple[LanguageModel, Tokenizer]]
Files = dict[str, bytes]
FIXTURES = Path(__file__).parent / "fixtures"
WEIGHTS = "model.safetensors"
ODD: list[Any] = [-1, 0, 1, 3, 10**6, 10**30, 1.5, float("nan"), True, None, "x", "", [], [1], {}, {"a": 1}]


def flip(content: bytes, choose: random.Random, end: int | None = None) -> bytes:
    changed = bytearray(content)
    for _ in range(choose.choice([1, 1, 1, 2, 8])):
        changed[choose.randrange(min(end or len(content), len(content)))] ^= 1 << choose.randrange(8)
    return bytes(changed)


def damage(files: Files, choose: random.Random) -> Files:
    """Damage by a disk or a user: the manifest is unchanged, or is the damaged file."""
    name, other = choose.sample(sorted(files.keys() - {"README.md"}), 2)
    content, cut = files[name], choose.randrange(len(files[name]))
    kind = choose.randrange(8)
    if kind == 0:
        return {key: value for key, value in files.items() if key != name}
    if kind == 1:
        return files | {name: files[other], other: content}
    if kind == 2:
        return files | {"another.safetensors": content}
    length = choose.randrange(1, 64)
    changed = {
        3: content[:cut],
        4: content + choose.randbytes(length),
        5: content[:cut] + choose.randbytes(length) + content[cut + length :],
        6: content[:cut] + bytes(len(content) - cut),
    }
    return files | {name: changed.get(kind, flip(content, choose))}


def reshape(files: Files, choose: random.Random) -> Files:
    """A valid file of weights that does not match the config: other shapes, names, dtypes or number of tensors."""
    tensors = load(files[WEIGHTS])
    name = choose.choice(sorted(tensors))
    tensor = tensors[name]
    kind = choose.randrange(8)
    if kind == 0:
        tensors[name] = torch.cat([tensor, tensor])
    elif kind == 1:
        tensors[name] = tensor[:-1].clone()
    elif kind == 2:
        tensors[name] = tensor.reshape(-1, 1).clone()
    elif kind == 3:
        tensors[name] = tensor.to(choose.choice([torch.float16, torch.float64, torch.int32, torch.bfloat16]))
    elif kind == 4:
        del tensors[name]
    elif kind == 5:
        tensors[f"{name}.more"] = tensor.clone()
    elif kind == 6:
        tensors[f"{name}_"] = tensors.pop(name)
    else:
        tensors = {key: torch.cat([value, value], -1) for key, value in tensors.items()}
    return files | {WEIGHTS: save(tensors)}


def change_settings(files: Files, choose: random.Random) -> Files:
    """A config or tokenizer in valid JSON that does not match the weights, or is not valid at all."""
    name = choose.choice(["config.json", "config.json", "tokenizer.json"])
    values = json.loads(files[name])
    table = values
    if name == "config.json" and choose.random() < 0.7:
        table = values["reading"] if "reading" in values and choose.random() < 0.1 else values["model"]
    key = choose.choice(sorted(table))
    kind = choose.randrange(4)
    if kind == 0:
        del table[key]
    elif kind == 1:
        table[f"{key}_"] = table[key]
    elif kind == 2 and type(table[key]) is int:
        table[key] = table[key] + choose.choice([-1, 1, 2, 10])
    else:
        table[key] = choose.choice(ODD)
    return files | {name: json.dumps(values).encode()}


def garble(files: Files, choose: random.Random) -> Files:
    """Bits flipped in config, tokenizer or the header of the weights (only the manifest protects the values)."""
    name = choose.choice(["config.json", "tokenizer.json", WEIGHTS, WEIGHTS])
    header = 8 + int.from_bytes(files[WEIGHTS][:8], "little")
    return files | {name: flip(files[name], choose, header if name == WEIGHTS else None)}


def with_manifest(files: Files) -> Files:
    listed = {
        name: {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in files.items()
        if name != MANIFEST
    }
    return files | {MANIFEST: json.dumps({"format": 1, "files": listed}).encode()}


def mutate(files: Files, choose: random.Random) -> Files:
    mutation = choose.choice([damage, damage, damage, reshape, change_settings, garble])
    changed = mutation(files, choose)
    return changed if mutation is damage else with_manifest(changed)


def weights(model: LanguageModel) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("form", ["plain", "adaptive"])
def test_mutated_models(tmp_path: Path, small: Small, trials: Callable[[int, int], int], form: str) -> None:
    save_model(tmp_path / "m", *small(form))
    check_mutations(tmp_path / "m", trials, form)


@pytest.mark.parametrize("case", ["paper", "variant"])
def test_mutated_models_of_format_1(tmp_path: Path, trials: Callable[[int, int], int], case: str) -> None:
    shutil.copytree(FIXTURES / case, tmp_path / "m")
    check_mutations(tmp_path / "m", trials, case)


def check_mutations(folder: Path, trials: Callable[[int, int], int], seed: str) -> None:
    """Every mutation of the folder is refused, or loads with the same weights and tokenizer size."""
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    loaded, choose = load_model(folder), random.Random(seed)
    good = weights(loaded.model)
    refused: list[str] = []
    for _ in range(trials(120, 3000)):
        changed = mutate(files, choose)
        shutil.rmtree(folder)
        folder.mkdir()
        for name, content in changed.items():
            (folder / name).write_bytes(content)
        try:
            found = load_model(folder)
        except CheckpointError as error:
            refused.append(str(error))
            continue
        # A model that still loads was changed where the weights do not depend on it, for example in its reading.
        kept = weights(found.model)
        if name_of(found.model) == name_of(loaded.model):
            assert kept.keys() == good.keys()
            assert all(torch.equal(tensor, good[name]) for name, tensor in kept.items())
        else:  # a setting that makes the paper's model of format 1 our variant, whose tensors have other names
            assert json.loads(files["config.json"])["format"] == 1
            assert sorted(t.numpy().tobytes() for t in kept.values()) == sorted(
                t.numpy().tobytes() for t in good.values()
            )
        if changed[MANIFEST] == files[MANIFEST]:
            assert changed == files or set(changed) != set(files)
        assert found.tokenizer.size == loaded.tokenizer.size
    assert len(refused) > trials(120, 3000) * 0.8
    assert not [message for message in refused if "\n" in message]


def test_mutated_states(tmp_path: Path, small: Small, trials: Callable[[int, int], int]) -> None:
    model, _ = small("plain")
    _, state = model(torch.randint(0, 256, (3, 9)))
    path = tmp_path / "state"
    save_state(path, state, model_hash="a" * 64, extra={"last": torch.tensor([1, 2])})
    content, choose = path.read_bytes(), random.Random(0)
    refused: list[str] = []
    for _ in range(trials(100, 2000)):
        cut = choose.randrange(len(content))
        ways = [flip(content, choose), flip(content, choose, 900), content[:cut], content + b"x", content[cut:]]
        changed = choose.choice([*ways, content[:cut] + choose.randbytes(9) + content[cut + 9 :]])
        path.write_bytes(changed)
        try:
            found, extra = load_state(path, model, model_hash="a" * 64)
        except CheckpointError as error:
            refused.append(str(error))
            continue
        assert all(torch.equal(tensor, found.tensors()[name]) for name, tensor in state.tensors().items())
        assert torch.equal(extra["last"], torch.tensor([1, 2]))
    assert len(refused) > trials(100, 2000) * 0.8
    assert not [message for message in refused if "\n" in message]
