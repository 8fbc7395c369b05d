"""Import of Transformer-XL models of other implementations. The expected losses are in the parity fixtures."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import longspan
from longspan.checkpoints.model_folder import load_model, save_model
from longspan.errors import CheckpointError, ConfigError
from longspan.interop.transfo_xl import import_transfo_xl
from longspan.models.transformer_xl import TransformerXL
from longspan.tokenizers import ByteTokenizer, WordTokenizer

FIXTURES = Path(__file__).parent.parent / "parity" / "fixtures"
SAME = {"pickled": "adaptive_div4", "pickled_legacy": "tied", "authors": "adaptive_div4"}
NAMES = ["plain", "same_length", "adaptive_div4", "adaptive_div1", "pre_norm", "tied", *SAME]


def imported(name: str) -> TransformerXL:
    if name == "authors":
        return import_transfo_xl(FIXTURES / name / "model.pt", config_path=FIXTURES / name / "config.json")
    return import_transfo_xl(FIXTURES / name)


@torch.no_grad()
def losses(model: TransformerXL, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Our losses over the segments of a stream, and those of `transformers`."""
    expected = load_file(FIXTURES / SAME.get(name, name) / "expected.safetensors")
    ids, segment = expected["tokens"], int(expected["segment"])
    found, state = [], None
    for start in range(0, ids.shape[1] - 1, segment):
        end = start + segment
        part, state = model.losses(ids[:, start:end], ids[:, start + 1 : end + 1], state)
        found.append(part)
    return torch.cat(found, 1), expected["losses"]


@pytest.mark.parametrize("name", NAMES)
def test_losses_are_the_same_also_after_saving(tmp_path: Path, name: str) -> None:
    model = imported(name)
    found, expected = losses(model, name)
    assert (found - expected).abs().max() < 1e-5
    words = WordTokenizer(tuple(f"w{k}" for k in range(model.config.vocabulary)))
    save_model(tmp_path / "m", model, words, notes=["imported"])
    again, _ = losses(load_model(tmp_path / "m").model, name)
    assert torch.equal(again, found)


def test_tied_tensors_are_tied_again() -> None:
    model = imported("adaptive_div4")
    assert model.config.tie_embedding
    assert model.config.tie_projections
    assert model.head.projections[1] is model.embedding.projections[1]
    assert model.config.shared_biases
    assert not imported("plain").config.shared_biases


def test_the_tokenizer_must_have_the_size_of_the_vocabulary() -> None:
    with pytest.raises(ConfigError, match=r"256 tokens.*plain.* 23;"):
        longspan.import_model(FIXTURES / "plain", ByteTokenizer())


def authors_arguments(**changes: Any) -> dict[str, Any]:
    """Arguments of the authors' train.py for the model in `authors`."""
    made = {"n_layer": 2, "n_head": 2, "d_head": 6, "d_embed": 32, "d_model": 16, "d_inner": 24, "div_val": 4}
    more = {"adaptive": True, "cutoffs": [20, 40], "tie_projs": [False, True, True], "tied": True, "mem_len": 10}
    return made | more | {"tgt_len": 8, "ext_len": 0, "clamp_len": -1, "attn_type": 0, "dataset": "wt103"} | changes


def test_the_authors_arguments(tmp_path: Path) -> None:
    (tmp_path / "args.json").write_text(json.dumps(authors_arguments()))
    model = import_transfo_xl(FIXTURES / "authors" / "model.pt", config_path=tmp_path / "args.json")
    assert model.config.vocabulary == 60
    assert (model.reading.segment, model.reading.memory, model.reading.clamp) == (8, 10, 0)
    found, expected = losses(model, "authors")
    assert (found - expected).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        ({"n_layer": 3}, r"2 layers.*n_layer=3"),
        ({"n_layer": "two"}, r"2 layers.*n_layer='two'"),
        ({"d_model": 18}, r"layers\.0\..*\[16.*\b18\b"),
        ({"d_model": 10**30}, r"width=10{30}"),
        ({"d_inner": "x"}, r"inner=.x.*integer"),
        ({"attn_type": 2}, r"attn_type=2.* 0 "),
        ({"layer_norm_epsilon": 1e-6}, r"layer_norm_epsilon=1e-06.* 1e-05 "),
        ({"cutoffs": [20]}, r"emb_layers\.1\.weight.*\[20, 8\].*\[40, 8\]"),
        ({"cutoffs": 20}, r"cutoffs=20.*list"),
        ({"cutoffs": None}, r"cutoffs=None.*list"),
        ({"tied": False, "tie_projs": [False] * 3, "n_token": 61}, r"emb_layers\.2\.weight.*\[20, 2\].*\[21, 2\]"),
        ({"model_type": "gpt2"}, "gpt2"),
        ({"mem_len": -3}, "memory=-3"),
        ({"clamp_len": "near"}, "clamp=.near"),
    ],
)
def test_settings_that_do_not_fit(tmp_path: Path, changes: dict[str, Any], pattern: str) -> None:
    (tmp_path / "args.json").write_text(json.dumps(authors_arguments(**changes)))
    with pytest.raises(CheckpointError, match=pattern) as caught:
        import_transfo_xl(FIXTURES / "authors" / "model.pt", config_path=tmp_path / "args.json")
    assert "\n" not in str(caught.value)


def edited(tmp_path: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    shutil.copytree(FIXTURES / "adaptive_div4", tmp_path / "m")
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    edit(tensors)
    (tmp_path / "m" / "model.safetensors").unlink()
    save_file(tensors, tmp_path / "m" / "model.safetensors")
    return tmp_path / "m"


def test_tensors_that_do_not_fit(tmp_path: Path) -> None:
    norm = "transformer.layers.0.pos_ff.layer_norm.bias"
    projection = "transformer.word_emb.emb_projs.1"
    edits: list[tuple[Callable[[dict[str, torch.Tensor]], object], str]] = [
        (lambda t: t.pop(norm), r"has no 'layers\.0\.pos_ff\.layer_norm\.bias'"),
        (lambda t: t.update(stray=torch.zeros(1)), "'stray'"),
        (lambda t: t.update({norm: torch.zeros(17)}), r"layer_norm\.bias'.*\[17\].*\[16\]"),
        (lambda t: t.update({norm: torch.zeros(16, dtype=torch.int32)}), r"layer_norm\.bias'.*int32"),
        (lambda t: t.update({"crit.out_projs.1": t[projection] + 1}), r"crit\.out_projs\.1'.*emb_projs\.1'"),
    ]
    for number, (edit, pattern) in enumerate(edits):
        with pytest.raises(CheckpointError, match=pattern):
            import_transfo_xl(edited(tmp_path / str(number), edit))


def test_paths_without_a_model(tmp_path: Path) -> None:
    for source, pattern in (
        (tmp_path / "no", f"no {tmp_path}/no;"),
        (tmp_path, r"model\.safetensors nor pytorch_model\.bin"),
        (FIXTURES / "authors", r"model\.safetensors nor pytorch_model\.bin"),
    ):
        with pytest.raises(CheckpointError, match=pattern):
            import_transfo_xl(source)
    with pytest.raises(CheckpointError, match="config"):
        import_transfo_xl(FIXTURES / "authors" / "model.pt")
