"""The Reformer: reversible layers, their memory use, and hashed attention."""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from longspan.contract import LanguageModel
from longspan.errors import ConfigError
from longspan.models import reformer as module
from longspan.training.recipe import build_recipe, load_recipe
from tests.support import build
from tests.training.conftest import content, losses, make_text, train

SMALL = {"vocabulary": 11, "layers": 2, "width": 16, "heads": 2, "inner": 24, "segment": 32, "chunk": 4, "dropout": 0.0}


def tokens_and_targets(batch: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(11, (batch, count + 1), generator=torch.Generator().manual_seed(4))
    return ids[:, :-1], ids[:, 1:]


def stored_loss(model: LanguageModel, tokens, targets, starts=None) -> torch.Tensor:
    """The mean loss through `hidden_states`, which stores every activation."""
    hidden, _ = model.hidden_states(tokens, None, starts)
    return model.head.losses(hidden[-1], targets).mean()


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("pieces", [1, 3])
def test_gradients_equal_those_of_stored_activations(dropout: float, pieces: int) -> None:
    """Twelve layers in float32, with the same random numbers for hashing and dropout, and a document start."""
    changes = {"layers": 12, "rounds": 3, "dropout": dropout, "attention_dropout": dropout, "pieces": pieces}
    model = build("reformer", SMALL | changes)
    tokens, targets = tokens_and_targets(2, 30)
    starts = torch.zeros(2, 30, dtype=torch.bool)
    starts[1, 13] = True
    found = {}
    for stored in (True, False):
        torch.manual_seed(9)
        loss = (
            stored_loss(model, tokens, targets, starts)
            if stored
            else model.training_loss(tokens, targets, starts=starts)[0]
        )
        found[stored] = (loss.detach(), *torch.autograd.grad(loss, list(model.parameters())))
    assert torch.equal(found[True][0], found[False][0])
    for a, b in zip(found[False], found[True], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
        assert float((a - b).norm() / b.norm().clamp(min=1e-9)) < 1e-5


def test_the_backward_pass_does_not_hash_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recomputed input has other rounding errors and could fall into another bucket."""
    model = build("reformer", SMALL)
    calls = []
    monkeypatch.setattr(module, "hash_buckets", lambda *a, real=module.hash_buckets: calls.append(1) or real(*a))
    loss, _ = model.training_loss(*tokens_and_targets(2, 32))
    assert len(calls) == 2
    loss.backward()
    assert len(calls) == 2


class Saved:
    """Bytes that autograd stores for the backward pass, without weights: current and peak."""

    def __init__(self, model: LanguageModel) -> None:
        self.weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.held: dict[int, int] = {}
        self.now = self.peak = 0

    def pack(self, tensor: torch.Tensor) -> Any:
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        packed = type("Packed", (), {})()
        packed.tensor = tensor
        if address not in self.weights:
            self.held[address] = self.held.get(address, 0) + 1
            self.now += size if self.held[address] == 1 else 0
            self.peak = max(self.peak, self.now)
            weakref.finalize(packed, self.free, address, size)
        return packed

    def free(self, address: int, size: int) -> None:
        self.held[address] -= 1
        self.now -= size if self.held[address] == 0 else 0


def saved_bytes(layers: int, stored: bool, pieces: int = 1, inner: int = 512) -> tuple[int, int]:
    """After the forward pass, and the peak until the end of the backward pass."""
    torch.manual_seed(0)
    model = build("reformer", SMALL | {"layers": layers, "width": 64, "pieces": pieces, "inner": inner, "dropout": 0.1})
    tokens, targets = tokens_and_targets(2, 64)
    saved = Saved(model)
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda packed: packed.tensor):
        loss = stored_loss(model, tokens, targets) if stored else model.training_loss(tokens, targets)[0]
        after = saved.now
        loss.backward()
    del loss
    gc.collect()
    return after, saved.peak


def test_memory_does_not_grow_with_depth() -> None:
    """Each further layer stores only its buckets: one byte per head, round and token."""
    (shallow, shallow_peak), (deep, deep_peak) = saved_bytes(4, stored=False), saved_bytes(24, stored=False)
    buckets = 2 * 2 * 2 * 64  # rows, heads, rounds, tokens; a byte each
    assert deep - shallow == 20 * buckets
    assert deep_peak - shallow_peak == 20 * buckets
    assert deep_peak < 1.02 * shallow_peak
    assert saved_bytes(24, stored=True)[1] > 5 * saved_bytes(4, stored=True)[1]


def test_feed_forward_in_pieces_needs_less_memory() -> None:
    assert saved_bytes(4, False, pieces=8, inner=2048)[1] < 0.5 * saved_bytes(4, False, pieces=1, inner=2048)[1]


@pytest.mark.gpu
def test_memory_on_cuda_does_not_grow_with_depth() -> None:
    def peak(layers: int) -> int:
        values = {"vocabulary": 256, "layers": layers, "width": 256, "heads": 4, "segment": 4096, "dropout": 0.1}
        model = build("reformer", values).cuda()
        tokens = torch.randint(256, (2, 4096), device="cuda")
        torch.cuda.reset_peak_memory_stats()
        model.training_loss(tokens, tokens)[0].backward()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()  # without weights and gradients

    assert peak(24) < 1.05 * peak(4)


def test_one_bucket_is_a_reversible_transformer() -> None:
    """Against torch's attention, in float32."""
    model = build("reformer", SMALL | {"buckets": 1, "chunk": 32, "final_norm": False}).eval()
    tokens, _ = tokens_and_targets(2, 32)
    seen = torch.ones(32, 32).tril(-1).bool()
    seen[0, 0] = True
    with torch.no_grad():
        hidden, _ = model.hidden_states(tokens)
        x1 = x2 = hidden[0]
        for n, layer in enumerate(model.layers):
            x = layer.f.norm(x2)
            query, value = (m(x).view(2, 32, 2, 8).transpose(1, 2) for m in (layer.f.query, layer.f.value))
            read = F.scaled_dot_product_attention(
                query, query / query.norm(dim=-1, keepdim=True), value, attn_mask=seen, scale=1.0
            )
            x1 = x1 + layer.f.output(read.transpose(1, 2).reshape(2, 32, 16))
            x2 = x2 + layer.g(x1)
            torch.testing.assert_close(hidden[n + 1], (x1 + x2) / 2, rtol=0, atol=1e-5)
    assert len(hidden) == 3


def test_evaluation_uses_fixed_hashes_and_training_new_ones() -> None:
    model = build("reformer", SMALL | {"buckets": 8, "chunk": 2})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    tokens, targets = tokens_and_targets(2, 32)
    assert not torch.equal(model.losses(tokens, targets)[0], model.losses(tokens, targets)[0])
    model.eval()
    before = torch.get_rng_state()
    first = model.losses(tokens, targets)[0]
    assert torch.equal(first, model.losses(tokens, targets)[0])
    assert torch.equal(before, torch.get_rng_state())
    again = build("reformer", SMALL | {"buckets": 8, "chunk": 2}).eval()
    again.load_state_dict(model.state_dict())
    assert torch.equal(first, again.losses(tokens, targets)[0])


@pytest.mark.parametrize("weight_dropout", [0.0, 0.2])
def test_a_resumed_run_equals_an_uninterrupted_one_to_the_last_bit(
    weight_dropout: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {
        "model": {key: value for key, value in SMALL.items() if key != "segment"}
        | {"family": "reformer", "dropout": 0.1},
        "training": {
            "segment": 16,
            "steps": 6,
            "batch": 3,
            "lr": 0.01,
            "save_every": 1,
            "keep": 9,
            "weight_dropout": weight_dropout,
        },
    }
    recipe, text = build_recipe(values, "small"), make_text(300)
    complete, part = tmp_path / "complete", tmp_path / "part"
    assert train(recipe, complete, text, monkeypatch).finished
    start = str(complete / "checkpoint-3")
    assert train(recipe, part, text, monkeypatch, resume=start).took_steps == 3
    assert content(part / "checkpoint-6") == content(complete / "checkpoint-6")
    assert losses(complete)[-1] < losses(complete)[0]


def test_the_default_number_of_buckets_follows_from_the_chunk() -> None:
    config = build("reformer", SMALL | {"chunk": 3}).config
    assert config.buckets == 128  # 2 * 128 / 3, rounded up to a power of two
    assert config.factors == (8, 16)
    assert build("reformer", SMALL | {"chunk": 500}).config.buckets == 2


def test_the_recipes_have_the_expected_number_of_parameters() -> None:
    recipe = load_recipe("enwik8-reformer")
    with torch.device("meta"):
        count = module.Reformer(recipe.model).parameter_count
    assert count == recipe.expected.parameters
    assert abs(count / 41.06e6 - 1) < 0.01
    with torch.device("meta"):
        count = module.Reformer(load_recipe("demo-reformer").model).parameter_count
    assert abs(count / 890_112 - 1) < 0.02


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"norm": "post"}, r"model\.norm.*post"),
        ({"rounds": 0}, r"model\.rounds=0.* 1"),
        ({"chunk": 0}, r"model\.chunk=0.* 1"),
        ({"pieces": -1}, r"model\.pieces=-1.* 1"),
        ({"buckets": 12}, r"model\.buckets=12.*1048576.* 8$"),
        ({"buckets": 0}, r"model\.buckets=0.* 1$"),
    ],
)
def test_an_invalid_config_is_refused_with_the_key_and_its_value(values: dict, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        build("reformer", SMALL | values)
