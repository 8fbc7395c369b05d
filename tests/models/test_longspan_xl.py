"""longspan-xl: equal to the paper's model with its parts turned off, and the short convolution."""

import pytest
import torch
from torch.nn import functional as F

from longspan.cache import SegmentMask
from longspan.config import keys
from longspan.contract import LanguageModel, State
from longspan.decoding.open import open_decoder
from longspan.errors import ConfigError
from longspan.models.families import family, state_bytes
from longspan.nn.positions import log_distance_sinusoid
from longspan.training.optimizers import hidden_matrices
from tests.models.paper import PAPER, load_paper_weights, paper_name
from tests.support import build

SMALL = {"vocabulary": 11, "layers": 2, "width": 8, "heads": 2, "segment": 4, "memory": 6}


def stream_losses(model: LanguageModel, tokens: torch.Tensor, starts: torch.Tensor) -> tuple[torch.Tensor, State]:
    """Losses of a stream cut into segments of unequal length, and the last state."""
    state, losses, at = model.initial_state(tokens.shape[0]), [], 0
    for size in (4, 1, 7, 4):
        part = slice(at, at + size)
        loss, state = model.losses(tokens[:, part], tokens[:, at + 1 : at + size + 1], state, starts[:, part])
        losses.append(loss)
        at += size
    return torch.cat(losses, dim=1), state


@pytest.mark.parametrize("training", [True, False], ids=["hidden states", "key-value cache"])
@pytest.mark.parametrize(
    "values",
    [
        {},
        {"norm": "pre"},
        {"shared_biases": False, "head_width": 5},
        {"same_length": True, "clamp": 3, "discount": 2.0},
        {"memory": 0},
        {"cutoffs": [4, 8], "div_val": 2, "tie_projections": True},
    ],
    ids=["default", "pre-norm", "own-biases", "same-length-clamp", "memory-0", "adaptive"],
)
def test_with_all_parts_off_it_is_transformer_xl_to_the_last_bit(values: dict, training: bool) -> None:
    """Same weights, float64: losses, states and every gradient are equal, with document starts in the stream."""
    torch.manual_seed(3)
    given = SMALL | {"dropout": 0.0} | values
    paper = build("transformer-xl", given).double().train(training)
    with torch.no_grad():
        for parameter in paper.parameters():
            parameter.normal_(0, 0.4)
    ours = build("longspan-xl", PAPER | given).double().train(training)
    assert load_paper_weights(ours, paper) == []
    tokens, starts = torch.randint(11, (3, 17)), torch.zeros(3, 16, dtype=torch.bool)
    starts[0, 5] = starts[1, 9] = starts[1, 10] = True
    found, state = stream_losses(ours, tokens, starts)
    expected, wanted = stream_losses(paper, tokens, starts)
    assert torch.equal(found, expected)
    assert state.tensors().keys() == wanted.tensors().keys()
    assert all(torch.equal(a, b) for a, b in zip(state.tensors().values(), wanted.tensors().values(), strict=True))
    assert ours.reach() == paper.reach()
    assert ours.parameter_count == paper.parameter_count
    if training:
        found.mean().backward()
        expected.mean().backward()
        # Without memory the shared layer skips the concatenation, and gradients are summed in another order.
        atol = 0.0 if paper.has_memory() else 1e-15
        for name, parameter in ours.named_parameters():
            wanted_grad = paper.get_parameter(paper_name(name)).grad
            torch.testing.assert_close(parameter.grad, wanted_grad, rtol=0, atol=atol, msg=name)


def test_log_distances_need_relative_positions() -> None:
    with pytest.raises(ConfigError, match=r"log_distances=true needs model\.position='relative'"):
        build("longspan-xl", SMALL | {"position": "shaw", "log_distances": True})


@torch.no_grad()
def test_log_distances_change_r_of_every_layer_and_nothing_else() -> None:
    model = build("longspan-xl", SMALL | {"log_distances": True}).double().eval()
    state = model.initial_state(1, trainable=True)
    found, _ = model.positions(state, SegmentMask.of(state, 0, 4, None))
    R = log_distance_sinusoid(4, 8, model.embedding.tables[0])
    for layer, r in zip(model.layers, found, strict=True):
        torch.testing.assert_close(r, layer.distances(R))
    plain = build("longspan-xl", SMALL)
    assert plain.state_dict().keys() == model.state_dict().keys()


@torch.no_grad()
def test_the_convolution_is_applied_to_the_input_of_every_layer_and_to_its_memory() -> None:
    """Three segments against one conv1d over the complete stream before each layer."""
    values = PAPER | {"memory": 12, "convolution": 3, "dropout": 0.0}
    model = build("longspan-xl", SMALL | values).double()
    for parameter in model.parameters():
        parameter.normal_(0, 0.3)
    tokens, state, segments = torch.randint(11, (2, 12)), model.initial_state(2, trainable=True), []
    for segment in tokens.split(4, dim=1):
        hidden, state = model.hidden_states(segment, state)
        segments.append(hidden)
    found = [torch.cat(parts, dim=1) for parts in zip(*segments, strict=True)]
    h = model.embedding(tokens)
    mask = SegmentMask.of(model.initial_state(2), 0, 12, None)
    positions, _ = model.positions(model.initial_state(2, trainable=True), mask)
    for n, layer in enumerate(model.layers):
        torch.testing.assert_close(found[n], h, rtol=0, atol=1e-12)
        taps = torch.cat([layer.convolution.weight.flip(0), torch.ones(1, 8)])  # the input itself counts once
        mixed = F.conv1d(F.pad(h.transpose(1, 2), (3, 0)), taps.t()[:, None], groups=8).transpose(1, 2)
        torch.testing.assert_close(state.caches[n].attention.hidden, mixed, rtol=0, atol=1e-12)
        torch.testing.assert_close(state.caches[n].inputs, h[:, -3:], rtol=0, atol=1e-12)
        layer.convolution = None
        h, _ = layer(mixed, None, mask, positions[n])
    torch.testing.assert_close(found[-1], h, rtol=0, atol=1e-12)


@torch.no_grad()
def test_a_decoder_can_start_right_after_a_document_start() -> None:
    """Its cached convolution inputs hold nothing of the previous document, which most of the last tokens belong to."""
    model = build("longspan-xl", SMALL | {"memory": 6}).double().eval()
    assert model.config.convolution == 3
    for parameter in model.parameters():
        parameter.normal_(0, 0.3)
    tokens, starts = torch.randint(11, (2, 8)), torch.zeros(2, 5, dtype=torch.bool)
    starts[:, 4] = True
    _, state = model.hidden_states(tokens[:, :5], starts=starts)
    alone, _ = model(tokens[:, 4:])
    decoder = open_decoder(model, state)
    for place in range(5, 8):
        torch.testing.assert_close(decoder.step(tokens[:, place]), alone[:, place - 4], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["longspan-xl", "rotary", "vanilla"])
def test_a_convolution_adds_one_parameter_and_one_cached_input_per_tap_unit_and_layer(name: str) -> None:
    known = {*keys(family(name).Config), *family(name).settings}
    values = {key: value for key, value in SMALL.items() if key in known}
    plain, mixed = (build(name, values | {"convolution": taps}) for taps in (0, 3))
    assert mixed.parameter_count - plain.parameter_count == 2 * 3 * 8
    assert state_bytes(mixed) - state_bytes(plain) == (4 * 2 * 3 * 8 if mixed.has_memory() else 0)
    assert hidden_matrices(mixed) == hidden_matrices(plain)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"convolution": 7}, r"memory=6.*model\.convolution=7"),
        ({"convolution": -1}, r"model\.convolution=-1"),
        ({"max_distance": -1}, r"model\.max_distance=-1"),
        ({"pointer": 7}, r"pointer=7.*model\.pointer_width"),
        ({"pointer_width": -1}, r"model\.pointer_width=-1"),
    ],
)
def test_an_invalid_config_is_refused_with_the_key_and_its_value(values: dict, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        build("longspan-xl", SMALL | values)
