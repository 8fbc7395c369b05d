"""The Compressive Transformer against Transformer-XL and against an implementation with lists; which loss trains
what."""

import math
from itertools import pairwise

import pytest
import torch
from torch.nn import functional as F

from longspan.contract import UNBOUNDED, LanguageModel, State
from longspan.decoding.open import open_decoder
from longspan.errors import ConfigError, StateError
from longspan.nn.positions import distance_sinusoid
from tests.models.paper import load_paper_weights, paper_name
from tests.support import build

SMALL = {"vocabulary": 11, "layers": 2, "width": 8, "heads": 2, "inner": 12, "segment": 4, "dropout": 0.0}
KINDS = ["mean", "max", "convolution", "dilated", "most-used"]


def make(dtype: torch.dtype = torch.float64, family: str = "compressive", **values: object) -> LanguageModel:
    torch.manual_seed(3)
    model = build(family, {**SMALL, "memory": 4, **values}).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.4)
    return model


def text(rows: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(11, (rows, count + 1), generator=torch.Generator().manual_seed(5))
    return ids[:, :-1], ids[:, 1:]


def stream_losses(model: LanguageModel, tokens, targets, cuts, starts=None) -> tuple[torch.Tensor, State]:
    state, pieces = model.initial_state(tokens.shape[0]), []
    for a, b in pairwise([0, *cuts, tokens.shape[1]]):
        here = None if starts is None else starts[:, a:b]
        losses, state = model.losses(tokens[:, a:b], targets[:, a:b], state, here)
        pieces.append(losses)
    return torch.cat(pieces, dim=1), state


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_without_compressed_memory_it_equals_transformer_xl(norm: str) -> None:
    """Losses over streamed segments with documents, and every gradient, in float32."""
    xl = make(torch.float32, "transformer-xl", memory=6, norm=norm)
    model = make(torch.float32, memory=6, compressed=0, norm=norm)
    assert load_paper_weights(model, xl) == []
    tokens, targets = text(2, 23)
    starts = torch.zeros(2, 23, dtype=torch.bool)
    starts[0, 9] = starts[1, 17] = True
    cuts = [4, 9, 12, 19]
    expected, _ = stream_losses(xl, tokens, targets, cuts, starts)
    found, state = stream_losses(model, tokens, targets, cuts, starts)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert state.caches[0].compressed.shape[1] == 0
    expected.mean().backward()
    found.mean().backward()
    for name, a in model.named_parameters():
        b = xl.get_parameter(paper_name(name))
        torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=1e-5, msg=name)


def compress_list(model, n: int, old: list, newer: list, usage: list) -> list:
    """The compression function on a list of vectors, block by block."""
    rate, kind = model.config.rate, model.config.compression
    blocks = [old[i : i + rate] for i in range(0, len(old), rate)]
    if kind == "mean":
        return [sum(block) / rate for block in blocks]
    if kind == "max":
        return [torch.stack(block).max(dim=0).values for block in blocks]
    if kind == "most-used":
        best = sorted(sorted(range(len(old)), key=lambda i: -usage[i])[: len(blocks)])
        return [old[i] for i in best]
    step, line = (2 if kind == "dilated" else 1), [*old, *newer, *[torch.zeros_like(old[0])] * rate]
    convolution = model.layers[n].compressor.convolution
    weight, bias = convolution.weight, convolution.bias
    return [bias + sum(weight[:, :, k] @ line[i * rate + k * step] for k in range(rate)) for i in range(len(blocks))]


@torch.no_grad()
def list_losses(model, tokens: torch.Tensor, targets: torch.Tensor, cuts: list[int]) -> torch.Tensor:
    """Losses of one row, position by position, with memories that are Python lists."""
    c = model.config
    memory: list[list] = [[] for _ in range(c.layers)]
    compressed: list[list] = [[] for _ in range(c.layers)]
    found = []
    for a, b in pairwise([0, *cuts, len(tokens)]):
        h = [model.embedding.tables[0][t] * c.width**0.5 for t in tokens[a:b]]
        for n, layer in enumerate(model.layers):
            context = [*compressed[n], *memory[n], *h]
            before, used, out = len(context) - len(h), [0.0] * len(context), []
            R = distance_sinusoid(len(context), c.width, model.u).flip(0)
            D = c.width // c.heads
            for i, x in enumerate(h):
                heads = []
                for k in range(c.heads):
                    part = slice(k * D, (k + 1) * D)
                    q = layer.attention.query.weight[part] @ x
                    scores = []
                    for j in range(before + i + 1):
                        key = layer.attention.key.weight[part] @ context[j]
                        r = layer.distances.projection.weight[part] @ R[before + i - j]
                        scores.append(((q + model.u[k]) @ key + (q + model.w[k]) @ r) / math.sqrt(D))
                    weights = torch.softmax(torch.stack(scores), 0)
                    for j, weight in enumerate(weights):
                        used[j] += float(weight)
                    heads.append(
                        sum(wt * (layer.attention.value.weight[part] @ context[j]) for j, wt in enumerate(weights))
                    )
                y = layer.attention_residual.norm(x + layer.attention.output.weight @ torch.cat(heads))
                inner = layer.feed_forward
                out.append(layer.feed_forward_residual.norm(y + inner.down(torch.relu(inner.up(y)))))
            line = [*memory[n], *h]
            count = max(0, len(line) - model.reading.memory) // c.rate * c.rate
            usage = used[len(compressed[n]) :][:count]
            new = compress_list(model, n, line[:count], line[count:], usage) if count else []
            compressed[n] = [*compressed[n], *new][-c.compressed :]
            memory[n] = line[count:]
            h = out
        found.append(model.head.losses(torch.stack(h)[None], targets[None, a:b])[0])
    return torch.cat(found)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cuts", [[4, 8, 12], [3, 4, 10, 11]], ids=["complete-blocks", "incomplete-blocks"])
def test_losses_equal_those_of_the_implementation_with_lists(kind: str, cuts: list[int]) -> None:
    """Attention to compressed memory, memory and segment in float64, also with incomplete blocks that wait in the
    memory."""
    model = make(compression=kind, memory=4, compressed=3, rate=2).eval()
    tokens, targets = text(1, 16)
    found, _ = stream_losses(model, tokens, targets, cuts)
    expected = list_losses(model, tokens[0], targets[0], cuts)
    torch.testing.assert_close(found[0], expected, rtol=0, atol=1e-10)
    without, _ = stream_losses(make(memory=4, compressed=0).eval(), tokens, targets, cuts)
    assert (found[0] - without[0]).abs().max() > 1e-3


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("kind", ["convolution", "dilated"])
def test_the_compression_loss_trains_only_the_compressor(kind: str, norm: str) -> None:
    model = make(compression=kind, compressed=3, rate=2, norm=norm).train()
    tokens, targets = text(2, 12)
    _, state = stream_losses(model, tokens[:, :8], targets[:, :8], [4])
    model.losses(tokens[:, 8:], targets[:, 8:], state)[0].mean().backward()
    without_compression = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    loss, _ = model.training_loss(tokens[:, 8:], targets[:, 8:], state)
    loss.backward()
    for name, parameter in model.named_parameters():
        if ".compressor." in name:
            assert without_compression[name] is None, name
            assert parameter.grad.abs().max() > 1e-6, name
        else:
            torch.testing.assert_close(parameter.grad, without_compression[name], rtol=0, atol=0, msg=name)


def test_the_reconstruction_loss_equals_that_of_the_paper() -> None:
    """Softmax attention of the segment over the old memories and over their slots. One of the two rows has just
    started, so it does not count."""
    model = make(compression="convolution", layers=1, compressed=3, rate=2).train()
    tokens, targets = text(2, 8)
    _, state = model.losses(tokens[:, :4], targets[:, :4])
    state = state.reset(torch.tensor([False, True]))
    loss, _ = model.training_loss(tokens[:, 4:], targets[:, 4:], state)
    found = loss - model.losses(tokens[:, 4:], targets[:, 4:], state)[0].mean()
    layer, h = model.layers[0], model.embedding(tokens[:1, 4:])[0]
    old, convolution = state.caches[0].hidden[0], layer.compressor.convolution
    slots = F.conv1d(old.t()[None], convolution.weight, convolution.bias, stride=2)[0].t()

    def attend(memory: torch.Tensor) -> torch.Tensor:
        heads = []
        for k in range(2):
            q, key, value = (
                x @ getattr(layer.attention, name).weight[4 * k : 4 * k + 4].t()
                for x, name in ((h, "query"), (memory, "key"), (memory, "value"))
            )
            heads.append(torch.softmax(q @ key.t() / 2, dim=-1) @ value)
        return torch.cat(heads, dim=-1)

    expected = (attend(old) - attend(slots)).square().mean()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_training_the_compressor_alone_lowers_its_loss() -> None:
    model = make(compression="convolution", layers=1, compressed=8, rate=2).train()
    tokens, targets = text(4, 8)
    _, state = model.losses(tokens[:, :4], targets[:, :4])
    without_compression = model.losses(tokens[:, 4:], targets[:, 4:], state)[0].mean().item()
    optimizer = torch.optim.Adam(model.layers[0].compressor.parameters(), lr=0.02)
    errors = []
    for _ in range(40):
        loss, _ = model.training_loss(tokens[:, 4:], targets[:, 4:], state)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        errors.append(loss.item() - without_compression)
    assert errors[-1] < 0.3 * errors[0]


@pytest.mark.parametrize("kind", KINDS)
def test_no_slot_depends_on_the_previous_document(kind: str) -> None:
    """Changing every token before a document start changes no loss after it, for several segmentations."""
    model = make(compression=kind, compressed=3, rate=3, memory=4).eval()
    tokens, targets = text(1, 24)
    for begin in (6, 13):
        starts = torch.zeros(1, 24, dtype=torch.bool)
        starts[0, begin] = True
        changed = tokens.clone()
        changed[0, :begin] = (changed[0, :begin] + 3) % 11
        for cuts in ([4, 8, 12, 16, 20], [7, 8, 9, 17]):
            a, state = stream_losses(model, tokens, targets, cuts, starts)
            b, other = stream_losses(model, changed, targets, cuts, starts)
            torch.testing.assert_close(a[0, begin:], b[0, begin:], rtol=0, atol=1e-12)
            assert int(state.length[0]) == int(other.length[0])
            assert 0 < int(state.length[0]) <= 3 + 4 + 3 - 1, (
                "compressed slots, memory, and positions that wait in an incomplete block"
            )


@pytest.mark.parametrize("segment", [3, 4])
@pytest.mark.parametrize("kind", ["mean", "convolution"])
def test_reach_is_the_distance_of_the_farthest_influence(kind: str, segment: int) -> None:
    """Over one period of segments and blocks, the farthest influence is exactly at distance `reach`."""
    model = make(compression=kind, compressed=3, rate=2, memory=5, segment=segment).eval()
    count = (model.reach() // segment + 4) * segment
    tokens, targets = text(1, count)
    cuts = list(range(segment, count, segment))
    plain, _ = stream_losses(model, tokens, targets, cuts)
    farthest = 0
    for place in range(2 * segment):
        changed = tokens.clone()
        changed[0, place] = (changed[0, place] + 1) % 11
        moved, _ = stream_losses(model, changed, targets, cuts)
        last = int(torch.nonzero((moved - plain)[0].abs() > 1e-14).max())
        farthest = max(farthest, last - place)
    assert farthest == model.reach()


def test_most_used_compression_has_unbounded_context() -> None:
    """The first segment has left every slot, but influenced which positions were chosen, and so later choices."""
    values = {"compressed": 3, "rate": 4, "memory": 5, "segment": 8}
    model, bounded = make(compression="most-used", **values).eval(), make(compression="mean", **values).reach()
    tokens, targets = text(64, 144)
    cuts = list(range(8, 144, 8))
    changed = tokens.clone()
    changed[:, :8] = (changed[:, :8] + 1) % 11
    with torch.no_grad():
        plain, _ = stream_losses(model, tokens, targets, cuts)
        moved, _ = stream_losses(model, changed, targets, cuts)
    last = int(torch.nonzero(((moved - plain).abs() > 1e-14).any(0)).max())
    assert last - 7 > bounded
    assert model.reach() == UNBOUNDED


def test_reach_equals_that_of_the_paper_when_segments_are_complete_blocks() -> None:
    """l (n_m + c n_cm), plus the tokens of the segment before the last query."""
    model = build("compressive", SMALL | {"memory": 8, "compressed": 6, "rate": 4, "layers": 3})
    assert model.reach() == 3 * (8 + 4 * 6) + 3


def test_the_caches_of_a_decoder_stay_bounded() -> None:
    """Every second step completes a block and compresses it; the sizes after 40 steps are those after 10."""
    model = make(compressed=3, rate=2, memory=4).eval()
    decoder = open_decoder(model)
    sizes = []
    for token in text(1, 40)[0][0]:
        decoder.step(token[None])
        state = decoder.state()
        compressed, hidden = state.caches[0]
        sizes.append((int(state.length[0]), compressed.shape[1], hidden.shape[1]))
    assert sizes[:8] == [(1, 0, 1), (2, 0, 2), (3, 0, 3), (4, 0, 4), (5, 0, 5), (5, 1, 4), (6, 1, 5), (6, 2, 4)]
    assert set(sizes[10:]) == {(7, 3, 4), (8, 3, 5)}


def test_states_of_other_families_and_invalid_configs_are_refused() -> None:
    xl = make(family="transformer-xl")
    with pytest.raises(StateError, match=r"Memory.*CompressedCache"):
        make(compressed=2).losses(*text(1, 4), xl.initial_state(1))
    for values, named in (
        ({"memory": 0, "compressed": 4}, r"memory=0.*model\.compressed=4"),
        ({"compressed": -1}, r"model\.compressed=-1"),
        ({"rate": 0}, r"model\.rate=0.* 1"),
        ({"compression": "means"}, r"'means'.*'mean'"),
    ):
        with pytest.raises(ConfigError, match=named):
            build("compressive", SMALL | values)
