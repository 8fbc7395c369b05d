"""The contract of all families: cutting the stream elsewhere, reordering the batch, resetting a row, and saving and
restoring the state do not change the losses."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from longspan.checkpoints.states import restore_state
from longspan.contract import LanguageModel, State
from longspan.decoding import open_decoder
from longspan.errors import DataError, StateError
from longspan.models.families import state_bytes
from longspan.segments import check_segment

from .conftest import (
    ALL,
    CUT_ANYWHERE,
    DEPENDS_ON_CUTS,
    LEARNED_40,
    MORE_THAN_THE_MEAN,
    OWN_OBJECTIVE,
    WITH_MEMORY,
    WITHOUT_MEMORY,
    MakeModel,
    stream,
)

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
FORMS = ["hidden states", "key-value cache"]
cuts_of_32 = st.lists(st.integers(1, 31), max_size=6, unique=True).map(sorted)
one_fixture = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def begin(model: LanguageModel, batch: int, form: str) -> State:
    """An empty state with this form of cache; some families have only one."""
    return model.initial_state(batch, trainable=form == "hidden states")


@torch.no_grad()
def losses_cut(model: LanguageModel, tokens, targets, cuts, state: State, starts=None) -> tuple[torch.Tensor, State]:
    """Losses of a stream that is cut into segments at these positions."""
    edges, pieces = [0, *cuts, tokens.shape[1]], []
    for a, b in pairwise(edges):
        here = None if starts is None else starts[:, a:b]
        losses, state = model.losses(tokens[:, a:b], targets[:, a:b], state, here)
        pieces.append(losses)
    return torch.cat(pieces, dim=1), state


@pytest.mark.parametrize("dtype", [torch.float64, pytest.param(torch.float32, marks=pytest.mark.torture)])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", WITH_MEMORY)
@given(cuts=cuts_of_32)
@one_fixture
def test_losses_do_not_depend_on_cuts(
    make: MakeModel, name: str, form: str, dtype: torch.dtype, cuts: list[int]
) -> None:
    model = make(name, dtype)
    tokens, targets = stream(2, 32)
    uncut, _ = losses_cut(model, tokens, targets, [], begin(model, 2, form))
    cut, _ = losses_cut(model, tokens, targets, cuts, begin(model, 2, form))
    torch.testing.assert_close(cut, uncut, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("name", ALL)
@torch.no_grad()
def test_last_gives_the_last_of_all_losses_and_the_same_state(make: MakeModel, name: str) -> None:
    model = make(name)
    tokens, targets = stream(2, 16)
    _, state = model.losses(tokens[:, :8], targets[:, :8], model.initial_state(2))
    every, expected = model.losses(tokens[:, 8:], targets[:, 8:], state)
    last, found = model.losses(tokens[:, 8:], targets[:, -1:], state, last=1)
    torch.testing.assert_close(last, every[:, -1:], rtol=0, atol=1e-12)
    for name, tensor in expected.tensors().items():
        torch.testing.assert_close(found.tensors()[name], tensor, rtol=0, atol=1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_losses_depend_on_cuts_when_the_memory_is_short(make: MakeModel, form: str) -> None:
    """Without same_length and with a memory of 5, a late query of a long segment sees more than an early one."""
    model = make("plain", memory=5)
    tokens, targets = stream(2, 32)
    uncut, _ = losses_cut(model, tokens, targets, [], begin(model, 2, form))
    cut, _ = losses_cut(model, tokens, targets, [8, 16, 24], begin(model, 2, form))
    torch.testing.assert_close(cut[:, :8], uncut[:, :8], rtol=0, atol=1e-10)
    assert (cut[:, 16:] - uncut[:, 16:]).abs().max() > 1e-3


@pytest.mark.parametrize("name", DEPENDS_ON_CUTS)
def test_cuts_decide_what_is_compressed(make: MakeModel, name: str) -> None:
    """The same cuts give the same losses. Other cuts compress at other times; until then losses are equal."""
    model = make(name)
    tokens, targets = stream(2, 32)
    uncut, _ = losses_cut(model, tokens, targets, [], model.initial_state(2))
    cut, _ = losses_cut(model, tokens, targets, [3, 5, 8, 16, 24], model.initial_state(2))
    again, _ = losses_cut(model, tokens, targets, [3, 5, 8, 16, 24], model.initial_state(2))
    torch.testing.assert_close(again, cut, rtol=0, atol=0)
    torch.testing.assert_close(cut[:, :8], uncut[:, :8], rtol=0, atol=1e-10)
    assert (cut[:, 16:] - uncut[:, 16:]).abs().max() > 1e-3


@pytest.mark.parametrize("name", WITHOUT_MEMORY)
def test_a_model_without_memory_reads_every_segment_independently(make: MakeModel, name: str) -> None:
    model = make(name)
    tokens, targets = stream(2, 32)
    assert not model.has_memory()
    uncut, _ = losses_cut(model, tokens, targets, [], model.initial_state(2))
    cut, state = losses_cut(model, tokens, targets, [16], model.initial_state(2))
    fresh, _ = losses_cut(model, tokens[:, 16:], targets[:, 16:], [], model.initial_state(2))
    torch.testing.assert_close(cut[:, 16:], fresh, rtol=0, atol=1e-10)
    assert (cut[:, 16:] - uncut[:, 16:]).abs().max() > 1e-3
    assert all(tensor.numel() == 0 for name, tensor in state.tensors().items() if name != "length")


@pytest.mark.parametrize("name", ALL)
def test_logits_do_not_depend_on_later_tokens(make: MakeModel, name: str) -> None:
    model = make(name)
    tokens, _ = stream(1, 20)
    changed = tokens.clone()
    changed[:, 12:] = (changed[:, 12:] + 1) % 23
    with torch.no_grad():
        a, _ = model(tokens)
        b, _ = model(changed)
    torch.testing.assert_close(a[:, :12], b[:, :12], rtol=0, atol=1e-12)
    assert (a[:, 12:] - b[:, 12:]).abs().max() > 1e-3


@pytest.mark.parametrize("name", ALL)
def test_losses_match_the_logits_in_token_order(make: MakeModel, name: str) -> None:
    model = make(name)
    tokens, targets = stream(3, 20)
    with torch.no_grad():
        logits, _ = model(tokens)
        losses, _ = model.losses(tokens, targets)
        mean, _ = model.training_loss(tokens, targets, model.initial_state(3), 0.0)
    expected = -logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    torch.testing.assert_close(losses, expected, rtol=0, atol=1e-10)
    if name not in MORE_THAN_THE_MEAN:
        torch.testing.assert_close(mean, expected.mean(), rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ALL)
def test_the_temperature_divides_logits_losses_and_the_training_loss(make: MakeModel, name: str) -> None:
    """Further terms of the training loss do not depend on it."""
    model, further = make(name), []
    tokens, targets = stream(2, 20)
    for temperature in (1.0, 2.5):
        state = model.initial_state(2, replace(model.reading, temperature=temperature))
        with torch.no_grad():
            logits, _ = model(tokens, state)
            losses, _ = model.losses(tokens, targets, state)
            total, _ = model.training_loss(tokens, targets, state, 0.0)
        if temperature == 1:
            at_one = losses
        expected = -logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
        torch.testing.assert_close(losses, expected, rtol=0, atol=1e-10)
        further.append(total - losses.mean())
    assert (losses - at_one).abs().max() > 1e-2
    if name not in OWN_OBJECTIVE:
        torch.testing.assert_close(further[1], further[0], rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ALL)
@given(order=st.permutations([0, 1, 2, 3]))
@one_fixture
def test_losses_do_not_depend_on_the_order_of_the_batch(make: MakeModel, name: str, order: list[int]) -> None:
    model = make(name)
    tokens, targets = stream(4, 24)
    plain, _ = losses_cut(model, tokens, targets, [10], model.initial_state(4))
    _, state = losses_cut(model, tokens[:, :10], targets[:, :10], [], model.initial_state(4))
    moved, _ = losses_cut(model, tokens[order, 10:], targets[order, 10:], [], state.rows(order))
    torch.testing.assert_close(moved, plain[order, 10:], rtol=0, atol=1e-10)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ALL)
def test_a_reset_row_starts_a_new_stream_and_the_others_continue(make: MakeModel, name: str, form: str) -> None:
    model = make(name)
    tokens, targets = stream(3, 24)
    _, state = losses_cut(model, tokens[:, :10], targets[:, :10], [4], begin(model, 3, form))
    untouched, _ = losses_cut(model, tokens[:, 10:], targets[:, 10:], [5], state)
    reset = state.reset(torch.tensor([False, True, False]))
    after, _ = losses_cut(model, tokens[:, 10:], targets[:, 10:], [5], reset)
    fresh, _ = losses_cut(model, tokens[1:2, 10:], targets[1:2, 10:], [5], begin(model, 1, form))
    torch.testing.assert_close(after[1:2], fresh, rtol=0, atol=1e-10)
    torch.testing.assert_close(after[[0, 2]], untouched[[0, 2]], rtol=0, atol=1e-10)
    if model.has_memory():
        assert (after[1] - untouched[1]).abs().max() > 1e-3


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", CUT_ANYWHERE)
@given(documents=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 23)), max_size=4), cuts=cuts_of_32)
@one_fixture
def test_a_document_start_equals_a_new_stream(
    make: MakeModel, name: str, form: str, documents, cuts: list[int]
) -> None:
    """For any cuts, the losses of a document equal those of the document alone."""
    model = make(name)
    tokens, targets = stream(2, 24)
    cuts = [c for c in cuts if c < 24] if model.has_memory() else []
    starts = torch.zeros(2, 24, dtype=torch.bool)
    for row, place in documents:
        starts[row, place] = True
    together, _ = losses_cut(model, tokens, targets, cuts, begin(model, 2, form), starts)
    for row in range(2):
        edges = sorted({0, 24, *(p for r, p in documents if r == row)})
        for a, b in pairwise(edges):
            alone, _ = losses_cut(
                model, tokens[row : row + 1, a:b], targets[row : row + 1, a:b], [], begin(model, 1, form)
            )
            torch.testing.assert_close(together[row : row + 1, a:b], alone, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", WITH_MEMORY)
def test_the_key_value_cache_gives_the_same_losses_as_hidden_states(make: MakeModel, name: str) -> None:
    model = make(name)
    tokens, targets = stream(2, 32)
    hidden, _ = losses_cut(model, tokens, targets, [3, 9, 20], begin(model, 2, "hidden states"))
    projected, _ = losses_cut(model, tokens, targets, [3, 9, 20], begin(model, 2, "key-value cache"))
    torch.testing.assert_close(projected, hidden, rtol=0, atol=1e-10)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ALL)
def test_a_stream_continues_from_a_restored_state(make: MakeModel, name: str, form: str) -> None:
    model = make(name)
    tokens, targets = stream(2, 20)
    _, state = losses_cut(model, tokens[:, :9], targets[:, :9], [], begin(model, 2, form))
    before = {key: tensor.clone() for key, tensor in state.tensors().items()}
    # A file may return its tensors in any order.
    tensors = {key: tensor.clone() for key, tensor in reversed(before.items())}
    restored = restore_state(model, tensors, state.reading)
    assert list(restored.tensors()) == list(before)
    a, _ = losses_cut(model, tokens[:, 9:], targets[:, 9:], [], state)
    b, _ = losses_cut(model, tokens[:, 9:], targets[:, 9:], [], restored)
    torch.testing.assert_close(a, b, rtol=0, atol=0)
    for key, tensor in state.tensors().items():
        torch.testing.assert_close(tensor, before[key], rtol=0, atol=0, msg=f"{key} was changed in place")


@pytest.mark.parametrize("name", ALL)
def test_a_state_has_no_gradient_and_a_bounded_size(make: MakeModel, name: str) -> None:
    model = make(name).train()
    tokens, targets = stream(2, 40 if name in LEARNED_40 else 100)
    _, state = model.losses(tokens, targets)
    assert all(not tensor.requires_grad for tensor in state.tensors().values())
    full = model.initial_state(1, filled=True)
    assert int(state.length.max()) <= max((getattr(cache, "positions", 0) for cache in full.caches), default=0)
    model.eval()
    with torch.no_grad():
        _, state = model.losses(tokens, targets)
    assert state.nbytes_per_row() <= state_bytes(model)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ALL)
def test_every_segment_has_its_own_backward_pass(make: MakeModel, name: str, form: str) -> None:
    """In eval mode too: nothing in the state keeps the graph of an earlier segment."""
    model = make(name)
    tokens, targets = stream(2, 40)
    state = begin(model, 2, form)
    for begins in range(0, 40, 4):
        part = slice(begins, begins + 4)
        losses, state = model.losses(tokens[:, part], targets[:, part], state)
        losses.mean().backward()
        assert not any(tensor.requires_grad for tensor in (*state.tensors().values(), *state.shared))


@pytest.mark.parametrize("name", CUT_ANYWHERE)
@pytest.mark.parametrize("split", [0, 5, 19])
def test_a_decoder_gives_the_losses_of_the_model(make: MakeModel, name: str, split: int) -> None:
    """One token at a time after a prompt; half-way, a new decoder continues from the state of the first."""
    model = make(name, segment=32) if name in WITHOUT_MEMORY else make(name)
    tokens, targets = stream(2, 30)
    uncut, _ = losses_cut(model, tokens, targets, [], model.initial_state(2))
    decoder = open_decoder(model, batch=2)
    if split:
        decoder.prefill(tokens[:, :split])
    for place in range(split, 30):
        if place == 24:
            decoder = open_decoder(model, decoder.state())
        logits = decoder.step(tokens[:, place])
        loss = -logits.log_softmax(-1).gather(-1, targets[:, place, None])[:, 0]
        torch.testing.assert_close(loss, uncut[:, place], rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["plain", "convolution"])
def test_a_decoder_accepts_rows_of_unequal_length(make: MakeModel, name: str) -> None:
    model = make(name)
    tokens, targets = stream(2, 30)
    _, state = losses_cut(model, tokens[:, :12], targets[:, :12], [], model.initial_state(2))
    state = state.reset(torch.tensor([True, False]))
    expected, _ = losses_cut(model, tokens[:, 12:], targets[:, 12:], [], state)
    decoder = open_decoder(model, state)
    for place in range(12, 30):
        loss = -decoder.step(tokens[:, place]).log_softmax(-1).gather(-1, targets[:, place, None])[:, 0]
        torch.testing.assert_close(loss, expected[:, place - 12], rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["same-length", "convolution-same-length"])
def test_a_rolling_cache_is_overwritten_in_place(make: MakeModel, name: str) -> None:
    """After 40 steps on 6 slots, a token sees exactly the last 6 positions."""
    model = make(name)
    tokens, targets = stream(1, 46)
    uncut, _ = losses_cut(model, tokens, targets, [], model.initial_state(1))
    decoder = open_decoder(model)
    sizes = set()
    for place in range(46):
        loss = -decoder.step(tokens[:, place]).log_softmax(-1).gather(-1, targets[:, place, None])[:, 0]
        torch.testing.assert_close(loss, uncut[:, place], rtol=0, atol=1e-10)
        sizes.add(decoder.keys[0].data_ptr())  # type: ignore[attr-defined]
    assert len(sizes) == 1, "the cache must not be reallocated"


@pytest.mark.parametrize("name", ALL)
def test_a_state_of_another_batch_is_refused(make: MakeModel, name: str) -> None:
    model = make(name)
    with pytest.raises(StateError, match="rows"):
        model.losses(*stream(2, 4), model.initial_state(3))


def test_a_state_of_another_model_is_refused(make: MakeModel) -> None:
    with pytest.raises(StateError, match="2 layers"):
        make("plain").losses(*stream(2, 4), make("lstm").initial_state(2))
    with pytest.raises(StateError, match="0 caches"):
        make("plain").losses(*stream(2, 4), make("sinusoid").initial_state(2))


def test_a_state_with_or_without_convolution_inputs_is_refused_by_the_other_kind_of_model(make: MakeModel) -> None:
    with pytest.raises(StateError, match="KeyValueCache"):
        make("convolution").losses(*stream(2, 4), make("plain").initial_state(2))
    with pytest.raises(StateError, match="ConvolutionCache"):
        make("plain").losses(*stream(2, 4), make("convolution").initial_state(2))


def test_a_state_of_a_convolution_with_other_taps_is_refused(make: MakeModel) -> None:
    with pytest.raises(StateError, match=r"3 inputs.*model\.convolution=2"):
        make("convolution", convolution=2).losses(*stream(2, 4), make("convolution").initial_state(2))


def test_a_state_without_a_pointer_cache_is_refused(make: MakeModel) -> None:
    model = make("pointer")
    plain = model.initial_state(2, replace(model.reading, pointer=0))
    with pytest.raises(StateError, match="pointer=11"):
        model.losses(*stream(2, 4), replace(plain, reading=model.reading))


@pytest.mark.parametrize("segment", [1, 3, 8])
@pytest.mark.parametrize("same_length", [True, False])
@pytest.mark.parametrize(("memory", "taps"), [(1, 0), (5, 0), (8, 0), (11, 0), (3, 3), (11, 2)])
def test_reach_is_the_distance_of_the_farthest_influence(
    make: MakeModel, memory: int, taps: int, same_length: bool, segment: int
) -> None:
    """A changed token changes the last loss of a long stream if and only if it is within reach."""
    settings = {"memory": memory, "same_length": same_length, "segment": segment}
    model = make("convolution", **settings, convolution=taps) if taps else make("plain", **settings)
    reach = model.reach()
    count = (reach // segment + 3) * segment
    tokens, targets = stream(1, count)
    cuts = list(range(segment, count, segment))
    plain, _ = losses_cut(model, tokens, targets, cuts, model.initial_state(1))
    for lag, visible in ((reach, True), (reach + 1, False)):
        changed = tokens.clone()
        changed[0, count - 1 - lag] = (changed[0, count - 1 - lag] + 1) % 23
        moved, _ = losses_cut(model, changed, targets, cuts, model.initial_state(1))
        difference = float((moved[0, -1] - plain[0, -1]).abs())
        assert (difference > 1e-14) == visible, (lag, difference)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["plain", "convolution", "rotary"])
def test_a_stream_can_continue_with_a_shorter_memory(make: MakeModel, name: str, form: str) -> None:
    """Only the last positions count, as if the caches had been trimmed."""
    model = make(name)
    tokens, targets = stream(2, 30)
    _, state = losses_cut(model, tokens[:, :20], targets[:, :20], [], begin(model, 2, form))
    short = replace(state, reading=replace(state.reading, memory=4))
    cut = replace(short, caches=tuple(cache.trim(4) for cache in state.caches), length=state.length.clamp(max=4))
    a, _ = losses_cut(model, tokens[:, 20:], targets[:, 20:], [], short)
    b, _ = losses_cut(model, tokens[:, 20:], targets[:, 20:], [], cut)
    torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    unchanged, _ = losses_cut(model, tokens[:, 20:], targets[:, 20:], [], state)
    assert (a - unchanged).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["memory-0", "sinusoid"])
def test_a_model_accepts_the_state_of_its_window_decoder(make: MakeModel, name: str) -> None:
    """It reads the segment without the window, and so without memory; no window of older tokens is left after it."""
    model = make(name)
    decoder = open_decoder(model)
    decoder.prefill(stream(1, 5)[0])
    losses, after = model.losses(*stream(1, 4), decoder.state())
    fresh, expected = model.losses(*stream(1, 4))
    torch.testing.assert_close(losses, fresh)
    assert after.tensors().keys() == expected.tensors().keys()
    torch.testing.assert_close(after.tensors(), expected.tensors())


def test_a_token_window_is_refused_where_it_would_be_lost(make: MakeModel) -> None:
    model = make("memory-0")
    decoder = open_decoder(model)
    decoder.prefill(stream(1, 5)[0])
    state = replace(decoder.state(), reading=replace(model.reading, memory=7))
    with pytest.raises(StateError, match="5 tokens"):
        model.losses(*stream(1, 4), state)
    with pytest.raises(StateError, match="5 tokens"):
        open_decoder(model, state).step(torch.tensor([3]))


def test_a_model_without_memory_refuses_the_caches_of_another_family(make: MakeModel) -> None:
    with pytest.raises(StateError, match="KeyValueCache"):
        make("sinusoid").losses(*stream(2, 4), make("plain").initial_state(2))


@pytest.mark.parametrize("name", ALL)
def test_an_empty_segment_is_refused(make: MakeModel, name: str) -> None:
    model = make(name)
    tokens, targets = stream(2, 4)
    for rows, length in ((2, 0), (0, 4)):
        with pytest.raises(DataError, match=rf"\[{rows}, {length}\]"):
            model(tokens[:rows, :length])
        with pytest.raises(DataError, match=rf"\[{rows}, {length}\]"):
            model.losses(tokens[:rows, :length], targets[:rows, :length])


@pytest.mark.parametrize(
    ("tokens", "beside", "values"),
    [
        (torch.zeros(5, dtype=torch.int64), {}, r"\[5\].*torch.int64"),
        (torch.zeros(2, 5), {}, r"\[2, 5\].*torch.float32"),
        (torch.ones(2, 5).long(), {"targets": torch.ones(2, 3).long()}, r"targets.*\[2, 3\].*\[2, 5\]"),
        (torch.ones(2, 5).long(), {"starts": torch.ones(1, 5).bool()}, r"starts.*\[1, 5\].*\[2, 5\]"),
        (torch.ones(2, 5).long(), {"targets": torch.ones(2, 5).long(), "last": 2}, r"targets.*\[2, 5\].*\[2, 2\]"),
        (torch.ones(2, 5).long(), {"last": 6}, r"last=6.*5"),
        (torch.ones(2, 5).long(), {"last": 0}, r"last=0.*5"),
    ],
)
def test_a_segment_of_wrong_shape_or_dtype_is_refused(
    tokens: torch.Tensor, beside: dict[str, Any], values: str
) -> None:
    with pytest.raises(DataError, match=values):
        check_segment(tokens, **beside)
