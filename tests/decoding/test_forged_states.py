"""State files with a valid checksum and invalid content: refused with one of our errors, or usable."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save

from longspan.checkpoints.states import KEY, _digest
from longspan.decoding.sampling import Sampling
from longspan.errors import LongspanError
from longspan.shapes import Tensor
from longspan.text_model import TextModel
from longspan.tokenizers import ByteTokenizer
from tests.contract.test_restored_states import altered
from tests.support import build

SMALL = {"layers": 1, "width": 8, "heads": 2, "segment": 4}
ODD: list[Any] = [None, -1, 2, 10**30, 1.5, float("nan"), True, "x", [], {}, [[[]]]]


def text_model(**values: Any) -> TextModel:
    torch.manual_seed(5)
    return TextModel(build("transformer-xl", SMALL | {"memory": 6} | values).eval(), ByteTokenizer(), "a" * 64)


def write(path: Path, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
    """A file in the format of `save_state`, with any content."""
    tensors = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    about = {key: value for key, value in about.items() if key != "sha256"}
    about["sha256"] = _digest(about, tensors)
    path.write_bytes(save(tensors, {KEY: json.dumps(about)}))


def forgeries(tensors: dict[str, Tensor], about: dict[str, Any]) -> Iterator[tuple[dict[str, Tensor], dict[str, Any]]]:
    state = {name.removeprefix("state."): t for name, t in tensors.items() if name.startswith("state.")}
    extra = {name: t for name, t in tensors.items() if name.startswith("extra.")}
    for other in altered(state):
        yield {f"state.{name}": tensor for name, tensor in other.items()} | extra, about
    for name, tensor in extra.items():
        yield {key: value for key, value in tensors.items() if key != name}, about
        for made in (tensor[:0], tensor[None], torch.cat([tensor, tensor]), tensor.float(), tensor + 1, tensor * 0 - 1):
            yield tensors | {name: made}, about
    yield tensors | {"other": torch.zeros(1), "extra.more": torch.zeros(1)}, about
    for key in ("format", "model", "reading", "version"):
        yield tensors, {name: value for name, value in about.items() if name != key}
        for odd in ODD:
            yield tensors, about | {key: odd}


def test_forged_state_files_are_refused_or_usable(tmp_path: Path) -> None:
    model, path = text_model(), tmp_path / "s.state"
    model.save_session(model.session("abcdefgh"), path)
    content = path.read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    tensors, about = load(content), json.loads(header["__metadata__"][KEY])
    refused: list[str] = []
    tried = 0
    for made in forgeries(tensors, about):
        write(path, *made)
        tried += 1
        try:
            session = model.session(state=path)
            written = list(session.write(2, Sampling()))
        except LongspanError as error:
            refused.append(str(error))
        else:
            assert len(written) == 2
    assert len(refused) > tried * 0.6
    assert not any("\n" in message for message in refused)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("memory", [6, 0])
def test_a_state_continues_in_another_dtype(tmp_path: Path, dtype: torch.dtype, memory: int) -> None:
    saving, loading = text_model(memory=memory), text_model(memory=memory)
    saving.model.to(dtype)
    saving.save_session(saving.session("abcdefgh"), tmp_path / "s")
    restored = loading.session(state=tmp_path / "s")
    assert len(list(restored.write(4, Sampling(temperature=0)))) == 4


def test_a_generator_of_another_device_is_replaced_by_the_seed(tmp_path: Path) -> None:
    """The state of a CUDA generator has 16 bytes."""
    model, path = text_model(), tmp_path / "s"
    session = model.session("abc", seed=1)
    model.save_session(session, path)
    content = path.read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    about = json.loads(header["__metadata__"][KEY])
    write(path, load(content) | {"extra.random": torch.zeros(16, dtype=torch.uint8)}, about)
    continued, seeded = model.session(state=path), model.session(state=path, seed=0)
    assert list(continued.write(9, Sampling())) == list(seeded.write(9, Sampling()))
