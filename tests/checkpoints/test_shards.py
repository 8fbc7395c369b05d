"""Shards are read like the files that one process would have written; parts that do not fit together are an error."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from longspan.checkpoints import store
from longspan.checkpoints.shards import OFFSETS, read_tensors
from longspan.errors import CheckpointError
from longspan.shapes import Tensor

NAMES = ("shard-00001-model-00001-of-00001.safetensors", "shard-00002-model-00001-of-00001.safetensors")
Part = tuple[list[int], Tensor]


def write(path: Path, *shards: dict[str, Part]) -> None:
    files = {}
    for name, parts in zip(NAMES, shards, strict=False):
        offsets = {tensor: {"saved_offsets": place} for tensor, (place, _) in parts.items()}
        files[name] = save({n: tensor for n, (_, tensor) in parts.items()}, {OFFSETS: json.dumps(offsets)})
    store.write_folder(path, files)


def read(path: Path, file: str = "model.safetensors") -> dict[str, Tensor]:
    return read_tensors(store.read_folder(path, ["model.safetensors"]), file)


def test_parts_are_joined_by_their_offsets(tmp_path: Path) -> None:
    whole = torch.arange(15.0).view(5, 3)
    scalar = torch.tensor(7, dtype=torch.int64)
    write(
        tmp_path / "c",
        {"model.safetensors/w": ([3, 0], whole[3:].clone()), "training.safetensors/n": ([], scalar)},
        {"model.safetensors/w": ([0, 0], whole[:3].clone()), "model.safetensors/b": ([0], torch.ones(2))},
    )
    found = read(tmp_path / "c")
    assert found.keys() == {"w", "b"}
    assert torch.equal(found["w"], whole)
    assert torch.equal(read(tmp_path / "c", "training.safetensors")["n"], scalar)


@pytest.mark.parametrize(
    "second",
    [
        ([2, 0], torch.ones(3, 3)),  # overlaps the first
        ([4, 0], torch.ones(2, 3)),  # leaves a gap
        ([3, -1], torch.ones(2, 3)),
        ([3], torch.ones(2, 3)),
        ([10**12, 0], torch.ones(2, 3)),
    ],
)
def test_parts_that_do_not_fit_together_are_an_error(tmp_path: Path, second: Part) -> None:
    first = {"model.safetensors/w": ([0, 0], torch.ones(3, 3))}
    write(tmp_path / "c", first, {"model.safetensors/w": second})
    with pytest.raises(CheckpointError, match="'w'"):
        read(tmp_path / "c")


def test_a_shard_without_offsets_is_an_error(tmp_path: Path) -> None:
    store.write_folder(tmp_path / "c", {NAMES[0]: save({"model.safetensors/w": torch.ones(2)})})
    with pytest.raises(CheckpointError, match=r"shard-00001"):
        read(tmp_path / "c")


def test_a_folder_is_complete_only_after_its_block(tmp_path: Path) -> None:
    with store.new_folder(tmp_path / "c") as folder:
        (folder.path / NAMES[0]).write_bytes(b"written by another process")
        folder.adopt(NAMES[0])
        folder.write("a.json", b"{}")
        assert not (tmp_path / "c").exists()
    assert set(store.read_folder(tmp_path / "c").files) == {NAMES[0], "a.json"}
    with pytest.raises(CheckpointError), store.new_folder(tmp_path / "d") as folder:
        folder.adopt("missing")
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
