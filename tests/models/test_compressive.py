"""What is the Compressive Transformer's own: against Transformer-XL, against lists, and who learns from what."""

import math
from itertools import pairwise

import pytest
import torch
from torch.nn import functional as F

from longspan.contract import UNBOUNDED, LanguageModel, State
from longspan.errors import ConfigError, StateError
from longspan.layers.positions import distance_sinusoid
from longspan.models.families import build

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


def read(model: LanguageModel, tokens, targets, cuts, starts=None) -> tuple[torch.Tensor, State]:
    state, pieces = model.initial_state(tokens.shape[0]), []
    for a, b in pairwise([0, *cuts, tokens.shape[1]]):
        here = None if starts is None else starts[:, a:b]
        losses, state = model.losses(tokens[:, a:b], targets[:, a:b], state, here)
        pieces.append(losses)
    return torch.cat(pieces, dim=1), state


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_without_compressed_memory_it_is_transformer_xl(norm: str) -> None:
    """Losses over streamed segments with documents, and every gradient, in float32."""
    xl = make(torch.float32, "transformer-xl", memory=6, norm=norm)
    model = make(torch.float32, memory=6, compressed=0, norm=norm)
    model.load_state_dict(xl.state_dict())
    tokens, targets = text(2, 23)
    starts = torch.zeros(2, 23, dtype=torch.bool)
    starts[0, 9] = starts[1, 17] = True
    cuts = [4, 9, 12, 19]
    expected, _ = read(xl, tokens, targets, cuts, starts)
    found, state = read(model, tokens, targets, cuts, starts)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert state.parts["compressed"][0].shape[1] == 0
    expected.mean().backward()
    found.mean().backward()
    for (name, a), (_, b) in zip(model.named_parameters(), xl.named_parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=1e-5, msg=name)


def compress_by_hand(model, n: int, old: list, newer: list, usage: list) -> list:
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
    weight, bias = model.compressors[n].convolution.weight, model.compressors[n].convolution.bias
    return [bias + sum(weight[:, :, k] @ line[i * rate + k * step] for k in range(rate)) for i in range(len(blocks))]


@torch.no_grad()
def losses_by_hand(model, tokens: torch.Tensor, targets: torch.Tensor, cuts: list[int]) -> torch.Tensor:
    """One row, position by position, with memories that are lists."""
    c = model.config
    memory: list[list] = [[] for _ in range(c.layers)]
    compressed: list[list] = [[] for _ in range(c.layers)]
    found = []
    for a, b in pairwise([0, *cuts, len(tokens)]):
        h = [model.embedding.tables[0][t] * c.width**0.5 for t in tokens[a:b]]
        for n, layer in enumerate(model.layers):
            context = [*compressed[n], *memory[n], *h]
            before, used, out = len(context) - len(h), [0.0] * len(context), []
            R = distance_sinusoid(len(context), c.width, torch.device("cpu")).flip(0)
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
            count = max(0, len(line) - c.memory) // c.rate * c.rate
            usage = used[len(compressed[n]) :][:count]
            new = compress_by_hand(model, n, line[:count], line[count:], usage) if count else []
            compressed[n] = [*compressed[n], *new][-c.compressed :]
            memory[n] = line[count:]
            h = out
        found.append(model.head.losses(torch.stack(h)[None], targets[None, a:b])[0])
    return torch.cat(found)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cuts", [[4, 8, 12], [3, 4, 10, 11]], ids=["whole-blocks", "waiting"])
def test_it_is_what_lists_give(kind: str, cuts: list[int]) -> None:
    """Attention to compressed memory, memory and segment, slot by slot, in float64; blocks that must wait as well."""
    model = make(compression=kind, memory=4, compressed=3, rate=2).eval()
    tokens, targets = text(1, 16)
    found, _ = read(model, tokens, targets, cuts)
    expected = losses_by_hand(model, tokens[0], targets[0], cuts)
    torch.testing.assert_close(found[0], expected, rtol=0, atol=1e-10)
    without, _ = read(make(memory=4, compressed=0).eval(), tokens, targets, cuts)
    assert (found[0] - without[0]).abs().max() > 1e-3


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("kind", ["convolution", "dilated"])
def test_the_compressor_learns_from_its_own_loss_and_nothing_else_does(kind: str, norm: str) -> None:
    model = make(compression=kind, compressed=3, rate=2, norm=norm).train()
    tokens, targets = text(2, 12)
    _, state = read(model, tokens[:, :8], targets[:, :8], [4])
    model.losses(tokens[:, 8:], targets[:, 8:], state)[0].mean().backward()
    of_text = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    loss, _ = model.training_loss(tokens[:, 8:], targets[:, 8:], state)
    loss.backward()
    for name, parameter in model.named_parameters():
        if name.startswith("compressors."):
            assert of_text[name] is None, name
            assert parameter.grad.abs().max() > 1e-6, name
        else:
            torch.testing.assert_close(parameter.grad, of_text[name], rtol=0, atol=0, msg=name)


def test_the_reconstruction_loss_is_that_of_the_paper() -> None:
    """Softmax attention of the segment over the old memories and over their slots, written out; one row of the two
    has just begun, and is left out."""
    model = make(compression="convolution", layers=1, compressed=3, rate=2).train()
    tokens, targets = text(2, 8)
    _, state = model.losses(tokens[:, :4], targets[:, :4])
    state = state.reset(torch.tensor([False, True]))
    loss, _ = model.training_loss(tokens[:, 4:], targets[:, 4:], state)
    wrong = loss - model.losses(tokens[:, 4:], targets[:, 4:], state)[0].mean()
    layer, h = model.layers[0], model.embedding(tokens[:1, 4:])[0]
    old = state.parts["hidden"][0][0]
    slots = F.conv1d(
        old.t()[None], model.compressors[0].convolution.weight, model.compressors[0].convolution.bias, stride=2
    )[0].t()

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
    torch.testing.assert_close(wrong, expected, rtol=0, atol=1e-12)


def test_a_compressor_taught_alone_reconstructs_better() -> None:
    model = make(compression="convolution", layers=1, compressed=8, rate=2).train()
    tokens, targets = text(4, 8)
    _, state = model.losses(tokens[:, :4], targets[:, :4])
    of_text = model.losses(tokens[:, 4:], targets[:, 4:], state)[0].mean().item()
    optimizer = torch.optim.Adam(model.compressors.parameters(), lr=0.02)
    wrong = []
    for _ in range(40):
        loss, _ = model.training_loss(tokens[:, 4:], targets[:, 4:], state)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        wrong.append(loss.item() - of_text)
    assert wrong[-1] < 0.3 * wrong[0]


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_the_document_before_is_left(kind: str) -> None:
    """Whatever the cuts and wherever the document begins: change every token before it, and no loss of it moves."""
    model = make(compression=kind, compressed=3, rate=3, memory=4).eval()
    tokens, targets = text(1, 24)
    for begin in (6, 13):
        starts = torch.zeros(1, 24, dtype=torch.bool)
        starts[0, begin] = True
        changed = tokens.clone()
        changed[0, :begin] = (changed[0, :begin] + 3) % 11
        for cuts in ([4, 8, 12, 16, 20], [7, 8, 9, 17]):
            a, state = read(model, tokens, targets, cuts, starts)
            b, other = read(model, changed, targets, cuts, starts)
            torch.testing.assert_close(a[0, begin:], b[0, begin:], rtol=0, atol=1e-12)
            assert int(state.length[0]) == int(other.length[0])
            assert 0 < int(state.length[0]) <= model.config.capacity


@pytest.mark.parametrize("segment", [3, 4])
@pytest.mark.parametrize("kind", ["mean", "convolution"])
def test_reach_is_how_far_a_change_is_felt(kind: str, segment: int) -> None:
    """Over one period of segments and blocks: the farthest change felt lies exactly `reach` back."""
    model = make(compression=kind, compressed=3, rate=2, memory=5, segment=segment).eval()
    count = (model.reach // segment + 4) * segment
    tokens, targets = text(1, count)
    cuts = list(range(segment, count, segment))
    plain, _ = read(model, tokens, targets, cuts)
    felt = 0
    for place in range(2 * segment):
        changed = tokens.clone()
        changed[0, place] = (changed[0, place] + 1) % 11
        moved, _ = read(model, changed, targets, cuts)
        last = int(torch.nonzero((moved - plain)[0].abs() > 1e-14).max())
        felt = max(felt, last - place)
    assert felt == model.reach


def test_what_is_most_used_depends_on_a_past_without_bound() -> None:
    """A first segment that left every slot long ago has swayed a choice, and that choice the next."""
    values = {"compressed": 3, "rate": 4, "memory": 5, "segment": 8}
    model, carried = make(compression="most-used", **values).eval(), make(compression="mean", **values).reach
    tokens, targets = text(64, 144)
    cuts = list(range(8, 144, 8))
    changed = tokens.clone()
    changed[:, :8] = (changed[:, :8] + 1) % 11
    with torch.no_grad():
        plain, _ = read(model, tokens, targets, cuts)
        moved, _ = read(model, changed, targets, cuts)
    last = int(torch.nonzero(((moved - plain).abs() > 1e-14).any(0)).max())
    assert last - 7 > carried
    assert model.reach == UNBOUNDED


def test_reach_is_the_paper_s_where_segments_are_whole_blocks() -> None:
    """l (n_m + c n_cm), and the part of a segment that the last query has before it."""
    model = build("compressive", SMALL | {"memory": 8, "compressed": 6, "rate": 4, "layers": 3})
    assert model.reach == 3 * (8 + 4 * 6) + 3


def test_one_token_at_a_time_the_memory_stays_within_bounds() -> None:
    """Blocks fill up as tokens come: every second step compresses, and forty steps are as small as ten."""
    model = make(compressed=3, rate=2, memory=4).eval()
    decoder = model.decoder()
    sizes = []
    for token in text(1, 40)[0][0]:
        decoder.step(token[None])
        state = decoder.state()
        sizes.append((int(state.length[0]), state.parts["compressed"][0].shape[1], state.parts["hidden"][0].shape[1]))
    assert sizes[:8] == [(1, 0, 1), (2, 0, 2), (3, 0, 3), (4, 0, 4), (5, 0, 5), (5, 1, 4), (6, 1, 5), (6, 2, 4)]
    assert set(sizes[10:]) == {(7, 3, 4), (8, 3, 5)}


def test_a_state_of_another_kind_and_a_config_that_cannot_be_say_why() -> None:
    xl = make(family="transformer-xl")
    with pytest.raises(StateError, match="needs 'compressed' and 'hidden'"):
        make(compressed=2).losses(*text(1, 4), xl.initial_state(1))
    for values, sentence in (
        ({"memory": 0, "compressed": 4}, "lets nothing in"),
        ({"compressed": -1}, "must not be negative"),
        ({"rate": 0}, "at least 1"),
        ({"compression": "means"}, "did you mean 'mean'"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            build("compressive", SMALL | values)
