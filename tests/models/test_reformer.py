"""What is the Reformer's own, beyond the contract."""

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
from longspan.models.families import build
from longspan.training.recipe import build_recipe, load_recipe
from tests.training.conftest import content, losses, make_text, train

SMALL = {"vocabulary": 11, "layers": 2, "width": 16, "heads": 2, "inner": 24, "segment": 32, "chunk": 4, "dropout": 0.0}


def tokens_and_targets(batch: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(11, (batch, count + 1), generator=torch.Generator().manual_seed(4))
    return ids[:, :-1], ids[:, 1:]


def kept_loss(model: LanguageModel, tokens, targets, starts=None) -> torch.Tensor:
    """The mean loss through `hidden_states`, which keeps every activation."""
    hidden, _ = model.hidden_states(tokens, None, starts)
    return model.head.losses(hidden[-1], targets).mean()


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("pieces", [1, 3])
def test_gradients_are_those_of_kept_activations(dropout: float, pieces: int) -> None:
    """Twelve layers in float32, hashing and dropout drawn alike, documents that begin on the way."""
    changes = {"layers": 12, "rounds": 3, "dropout": dropout, "attention_dropout": dropout, "pieces": pieces}
    model = build("reformer", SMALL | changes)
    tokens, targets = tokens_and_targets(2, 30)
    starts = torch.zeros(2, 30, dtype=torch.bool)
    starts[1, 13] = True
    found = {}
    for kept in (True, False):
        torch.manual_seed(9)
        loss = (
            kept_loss(model, tokens, targets, starts)
            if kept
            else model.training_loss(tokens, targets, starts=starts)[0]
        )
        found[kept] = (loss.detach(), *torch.autograd.grad(loss, list(model.parameters())))
    assert torch.equal(found[True][0], found[False][0])
    for a, b in zip(found[False], found[True], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
        assert float((a - b).norm() / b.norm().clamp(min=1e-9)) < 1e-5


def test_nothing_is_hashed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """An input that comes back rounded a little differently could fall into another bucket."""
    model = build("reformer", SMALL)
    calls = []
    monkeypatch.setattr(module, "hash_buckets", lambda *a, real=module.hash_buckets: calls.append(1) or real(*a))
    loss, _ = model.training_loss(*tokens_and_targets(2, 32))
    assert len(calls) == 2
    loss.backward()
    assert len(calls) == 2


class Saved:
    """Bytes that autograd holds for the backward pass, weights aside: now and at most."""

    def __init__(self, model: LanguageModel) -> None:
        self.weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.held: dict[int, int] = {}
        self.now = self.most = 0

    def pack(self, tensor: torch.Tensor) -> Any:
        storage = tensor.untyped_storage()
        place, size = storage.data_ptr(), storage.nbytes()
        parcel = type("Parcel", (), {})()
        parcel.tensor = tensor
        if place not in self.weights:
            self.held[place] = self.held.get(place, 0) + 1
            self.now += size if self.held[place] == 1 else 0
            self.most = max(self.most, self.now)
            weakref.finalize(parcel, self.free, place, size)
        return parcel

    def free(self, place: int, size: int) -> None:
        self.held[place] -= 1
        self.now -= size if self.held[place] == 0 else 0


def saved_bytes(layers: int, kept: bool, pieces: int = 1, inner: int = 512) -> tuple[int, int]:
    """After the forward pass, and at most until the backward pass is over."""
    torch.manual_seed(0)
    model = build("reformer", SMALL | {"layers": layers, "width": 64, "pieces": pieces, "inner": inner, "dropout": 0.1})
    tokens, targets = tokens_and_targets(2, 64)
    saved = Saved(model)
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda parcel: parcel.tensor):
        loss = kept_loss(model, tokens, targets) if kept else model.training_loss(tokens, targets)[0]
        after = saved.now
        loss.backward()
    del loss
    gc.collect()
    return after, saved.most


def test_memory_does_not_grow_with_depth() -> None:
    """From 4 to 24 layers a backward pass keeps more of one thing: a byte per head, round and token of each layer."""
    (shallow, shallow_most), (deep, deep_most) = saved_bytes(4, kept=False), saved_bytes(24, kept=False)
    buckets = 2 * 2 * 2 * 64  # rows, heads, rounds, tokens; a byte each
    assert deep - shallow == 20 * buckets
    assert deep_most - shallow_most == 20 * buckets
    assert deep_most < 1.02 * shallow_most
    assert saved_bytes(24, kept=True)[1] > 5 * saved_bytes(4, kept=True)[1]


def test_pieces_need_less_memory() -> None:
    assert saved_bytes(4, False, pieces=8, inner=2048)[1] < 0.5 * saved_bytes(4, False, pieces=1, inner=2048)[1]


@pytest.mark.gpu
def test_memory_on_cuda_does_not_grow_with_depth() -> None:
    def most(layers: int) -> int:
        values = {"vocabulary": 256, "layers": layers, "width": 256, "heads": 4, "segment": 4096, "dropout": 0.1}
        model = build("reformer", values).cuda()
        tokens = torch.randint(256, (2, 4096), device="cuda")
        torch.cuda.reset_peak_memory_stats()
        model.training_loss(tokens, tokens)[0].backward()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()  # weights and gradients aside

    assert most(24) < 1.05 * most(4)


def test_one_bucket_is_a_transformer_in_two_streams() -> None:
    """Written out with torch's own attention, in float32."""
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


def test_evaluation_hashes_alike_and_training_anew() -> None:
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
def test_a_run_goes_on_to_the_last_bit(weight_dropout: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {
        "model": {**SMALL, "family": "reformer", "segment": 16, "dropout": 0.1},
        "training": {"steps": 6, "batch": 3, "lr": 0.01, "save_every": 1, "keep": 9, "weight_dropout": weight_dropout},
    }
    recipe, text = build_recipe(values, "small"), make_text(300)
    whole, part = tmp_path / "whole", tmp_path / "part"
    assert train(recipe, whole, text, monkeypatch).finished
    start = str(whole / "checkpoint-3")
    assert train(recipe, part, text, monkeypatch, resume=start).took_steps == 3
    assert content(part / "checkpoint-6") == content(whole / "checkpoint-6")
    assert losses(whole)[-1] < losses(whole)[0]


def test_buckets_are_settled_by_the_training_segment() -> None:
    config = build("reformer", SMALL | {"segment": 100, "chunk": 3}).config
    assert config.buckets == 128  # 2 x 100 / 3, and up
    assert config.factors == (8, 16)
    assert build("reformer", SMALL | {"segment": 2}).config.buckets == 2


def test_the_recipe_has_as_many_parameters_as_the_others() -> None:
    recipe = load_recipe("enwik8-reformer")
    with torch.device("meta"):
        count = module.Reformer(recipe.model).parameter_count
    assert count == recipe.expected.parameters
    assert abs(count / 41.06e6 - 1) < 0.01
    with torch.device("meta"):
        count = module.Reformer(load_recipe("demo-reformer").model).parameter_count
    assert abs(count / 890_112 - 1) < 0.02


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"norm": "post"}, "model.norm"),
        ({"rounds": 0}, "model.rounds=0 must be at least 1"),
        ({"chunk": 0}, "model.chunk=0 must be at least 1"),
        ({"pieces": -1}, "model.pieces=-1 must be at least 1"),
        ({"buckets": 12}, "model.buckets=12 is no power of two between 1 and 1048576; try 8"),
        ({"buckets": 0}, "model.buckets=0 is no power of two .* try 1"),
    ],
)
def test_a_config_that_cannot_be_says_why(values: dict, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        build("reformer", SMALL | values)
