"""Row-wise int8: the error bound of the format, tied weights, damaged files, and the printed cost."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from longspan.api import create
from longspan.checkpoints.int8 import SCALE, quantised, restored
from longspan.checkpoints.model_folder import WEIGHTS, load_model
from longspan.errors import CheckpointError
from longspan.training.export import export_cost, export_model


def test_the_error_is_at_most_half_a_scale() -> None:
    weight = torch.randn(5, 33, generator=torch.Generator().manual_seed(0)) * torch.tensor(
        [[1e-8], [1], [0], [9e9], [3]]
    )
    stored = quantised({"w": weight, "b": torch.ones(3), "n": torch.tensor([7])})
    assert {name: tensor.dtype for name, tensor in stored.items()} == {
        "w": torch.int8, "w" + SCALE: torch.float32, "b": torch.float32, "n": torch.int64
    }  # fmt: skip
    scale = stored["w" + SCALE]
    torch.testing.assert_close(scale[[0, 1, 3, 4]], weight.abs().amax(1)[[0, 1, 3, 4]] / 127)
    error = (restored(stored, "x")["w"] - weight).abs()
    assert (error <= 0.5001 * scale[:, None]).all()
    assert (error[2] == 0).all()


def test_an_exported_model_loads_and_its_cost_is_that_of_scoring(tmp_path: Path) -> None:
    model = create("transformer-xl", {"layers": 2, "width": 64, "heads": 2}, seed=1)
    model.save(tmp_path / "m")
    made = export_model(tmp_path / "m", tmp_path / "q", int8=True)
    assert made.dtype == "int8"
    assert made.bytes < 0.3 * (tmp_path / "m" / WEIGHTS).stat().st_size
    again = load_model(tmp_path / "q")
    expected = restored(quantised(dict(model.model.state_dict())), "x")
    for name, tensor in again.model.state_dict().items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=0)
    text = tmp_path / "t.txt"
    text.write_text("It was late. " * 20)
    cost = export_cost(tmp_path / "m", tmp_path / "q", text)
    assert cost.before == pytest.approx(model.score(text.read_text()).bits, rel=1e-6)
    assert 0 < abs(cost.after - cost.before) < 0.05


@pytest.mark.parametrize("damage", ["scale missing", "scale of another shape", "matrix missing", "infinite scale"])
def test_damaged_files_are_refused(damage: str) -> None:
    stored = quantised({"w": torch.ones(2, 3)})
    if damage == "scale missing":
        del stored["w" + SCALE]
        assert restored(stored, "f")["w"].dtype == torch.int8  # the model folder refuses int8 where it needs floats
        return
    if damage == "matrix missing":
        del stored["w"]
    else:
        stored["w" + SCALE] = torch.ones(3) if "shape" in damage else torch.tensor([1.0, torch.inf])
    with pytest.raises(CheckpointError, match="f has 'w"):
        restored(stored, "f")


def test_a_matrix_without_its_scale_is_refused_on_load(tmp_path: Path) -> None:
    from longspan.checkpoints import manifest

    create("lstm", {"layers": 1, "width": 8}, seed=1).save(tmp_path / "m")
    export_model(tmp_path / "m", tmp_path / "q", int8=True)
    path = tmp_path / "q" / WEIGHTS
    tensors = load_file(path)
    del tensors[next(name for name in tensors if name.endswith(SCALE))]
    save_file(tensors, path)
    (tmp_path / "q" / manifest.MANIFEST).unlink()
    with pytest.raises(CheckpointError):
        load_model(tmp_path / "q")
