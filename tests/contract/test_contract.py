"""The law: cutting the stream elsewhere, reordering the batch, resetting a row, saving and restoring change nothing."""

import inspect
from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from longspan.contract import LanguageModel, State, require_next, require_segment
from longspan.errors import DataError, StateError

from .conftest import (
    ALL,
    CUT_ANYWHERE,
    LEARNED_40,
    MINDS_CUTS,
    MORE_THAN_THE_MEAN,
    WITH_MEMORY,
    WITHOUT_MEMORY,
    MakeModel,
    stream,
)

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
FORMS = ["hidden", "projected"]
cuts_of_32 = st.lists(st.integers(1, 31), max_size=6, unique=True).map(sorted)
one_fixture = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def begin(model: LanguageModel, batch: int, form: str) -> State:
    """An empty state with the form of memory asked for; families with one form have only that."""
    if "projected" in inspect.signature(model.initial_state).parameters:
        return model.initial_state(batch, projected=form == "projected")  # type: ignore[call-arg]
    return model.initial_state(batch)


@torch.no_grad()
def losses_cut(model: LanguageModel, tokens, targets, cuts, state: State, starts=None) -> tuple[torch.Tensor, State]:
    """Losses of a stream read in the pieces between the cuts."""
    edges, pieces = [0, *cuts, tokens.shape[1]], []
    for a, b in pairwise(edges):
        here = None if starts is None else starts[:, a:b]
        losses, state = model.losses(tokens[:, a:b], targets[:, a:b], state, here)
        pieces.append(losses)
    return torch.cat(pieces, dim=1), state


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", WITH_MEMORY)
@given(cuts=cuts_of_32)
@one_fixture
def test_cuts_change_nothing(make: MakeModel, name: str, form: str, dtype: torch.dtype, cuts: list[int]) -> None:
    model = make(name, dtype)
    tokens, targets = stream(2, 32)
    whole, _ = losses_cut(model, tokens, targets, [], begin(model, 2, form))
    cut, _ = losses_cut(model, tokens, targets, cuts, begin(model, 2, form))
    torch.testing.assert_close(cut, whole, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("name", ALL)
@torch.no_grad()
def test_the_loss_after_a_segment_is_the_last_of_all_its_losses(make: MakeModel, name: str) -> None:
    model = make(name)
    tokens, targets = stream(2, 16)
    _, state = model.losses(tokens[:, :8], targets[:, :8], model.initial_state(2))
    every, expected = model.losses(tokens[:, 8:], targets[:, 8:], state)
    last, found = model.next_losses(tokens[:, 8:], targets[:, -1], state)
    torch.testing.assert_close(last, every[:, -1], rtol=0, atol=1e-12)
    for name, tensor in expected.tensors().items():
        torch.testing.assert_close(found.tensors()[name], tensor, rtol=0, atol=1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_cuts_do_matter_where_the_memory_is_too_short(make: MakeModel, form: str) -> None:
    """Without same_length and with 5 states of memory, a query late in a long segment sees more than one early on."""
    model = make("plain", memory=5)
    tokens, targets = stream(2, 32)
    whole, _ = losses_cut(model, tokens, targets, [], begin(model, 2, form))
    cut, _ = losses_cut(model, tokens, targets, [8, 16, 24], begin(model, 2, form))
    torch.testing.assert_close(cut[:, :8], whole[:, :8], rtol=0, atol=1e-10)
    assert (cut[:, 16:] - whole[:, 16:]).abs().max() > 1e-3


@pytest.mark.parametrize("name", MINDS_CUTS)
def test_cuts_do_matter_where_they_decide_what_is_compressed(make: MakeModel, name: str) -> None:
    """The same cuts give the same losses; other cuts compress at other times, and only until then change nothing."""
    model = make(name)
    tokens, targets = stream(2, 32)
    whole, _ = losses_cut(model, tokens, targets, [], model.initial_state(2))
    cut, _ = losses_cut(model, tokens, targets, [3, 5, 8, 16, 24], model.initial_state(2))
    again, _ = losses_cut(model, tokens, targets, [3, 5, 8, 16, 24], model.initial_state(2))
    torch.testing.assert_close(again, cut, rtol=0, atol=0)
    torch.testing.assert_close(cut[:, :8], whole[:, :8], rtol=0, atol=1e-10)
    assert (cut[:, 16:] - whole[:, 16:]).abs().max() > 1e-3


@pytest.mark.parametrize("name", WITHOUT_MEMORY)
def test_a_model_without_memory_fails_where_it_should(make: MakeModel, name: str) -> None:
    model = make(name)
    tokens, targets = stream(2, 32)
    assert not model.has_memory
    whole, _ = losses_cut(model, tokens, targets, [], model.initial_state(2))
    cut, state = losses_cut(model, tokens, targets, [16], model.initial_state(2))
    fresh, _ = losses_cut(model, tokens[:, 16:], targets[:, 16:], [], model.initial_state(2))
    torch.testing.assert_close(cut[:, 16:], fresh, rtol=0, atol=1e-10)
    assert (cut[:, 16:] - whole[:, 16:]).abs().max() > 1e-3
    assert all(tensor.numel() == 0 for part in state.parts.values() for tensor in part)


@pytest.mark.parametrize("name", ALL)
def test_the_future_does_not_matter(make: MakeModel, name: str) -> None:
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
def test_losses_are_those_of_the_logits_in_token_order(make: MakeModel, name: str) -> None:
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
@given(order=st.permutations([0, 1, 2, 3]))
@one_fixture
def test_batch_order_never_matters(make: MakeModel, name: str, order: list[int]) -> None:
    model = make(name)
    tokens, targets = stream(4, 24)
    plain, _ = losses_cut(model, tokens, targets, [10], model.initial_state(4))
    _, state = losses_cut(model, tokens[:, :10], targets[:, :10], [], model.initial_state(4))
    moved, _ = losses_cut(model, tokens[order, 10:], targets[order, 10:], [], state.rows(order))
    torch.testing.assert_close(moved, plain[order, 10:], rtol=0, atol=1e-10)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ALL)
def test_a_reset_row_is_a_fresh_stream_and_the_others_do_not_notice(make: MakeModel, name: str, form: str) -> None:
    model = make(name)
    tokens, targets = stream(3, 24)
    _, state = losses_cut(model, tokens[:, :10], targets[:, :10], [4], begin(model, 3, form))
    untouched, _ = losses_cut(model, tokens[:, 10:], targets[:, 10:], [5], state)
    reset = state.reset(torch.tensor([False, True, False]))
    after, _ = losses_cut(model, tokens[:, 10:], targets[:, 10:], [5], reset)
    fresh, _ = losses_cut(model, tokens[1:2, 10:], targets[1:2, 10:], [5], begin(model, 1, form))
    torch.testing.assert_close(after[1:2], fresh, rtol=0, atol=1e-10)
    torch.testing.assert_close(after[[0, 2]], untouched[[0, 2]], rtol=0, atol=1e-10)
    if model.has_memory:
        assert (after[1] - untouched[1]).abs().max() > 1e-3


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", CUT_ANYWHERE)
@given(begins=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 23)), max_size=4), cuts=cuts_of_32)
@one_fixture
def test_a_document_begins_as_a_fresh_stream(make: MakeModel, name: str, form: str, begins, cuts: list[int]) -> None:
    """Whatever the cuts, the losses after a document's first token are those of that document alone."""
    model = make(name)
    tokens, targets = stream(2, 24)
    cuts = [c for c in cuts if c < 24] if model.has_memory else []
    starts = torch.zeros(2, 24, dtype=torch.bool)
    for row, place in begins:
        starts[row, place] = True
    together, _ = losses_cut(model, tokens, targets, cuts, begin(model, 2, form), starts)
    for row in range(2):
        edges = sorted({0, 24, *(p for r, p in begins if r == row)})
        for a, b in pairwise(edges):
            alone, _ = losses_cut(
                model, tokens[row : row + 1, a:b], targets[row : row + 1, a:b], [], begin(model, 1, form)
            )
            torch.testing.assert_close(together[row : row + 1, a:b], alone, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", WITH_MEMORY)
def test_cached_keys_and_values_give_what_hidden_states_give(make: MakeModel, name: str) -> None:
    model = make(name)
    tokens, targets = stream(2, 32)
    hidden, _ = losses_cut(model, tokens, targets, [3, 9, 20], begin(model, 2, "hidden"))
    projected, _ = losses_cut(model, tokens, targets, [3, 9, 20], begin(model, 2, "projected"))
    torch.testing.assert_close(projected, hidden, rtol=0, atol=1e-10)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ALL)
def test_a_state_taken_apart_and_put_together_goes_on(make: MakeModel, name: str, form: str) -> None:
    model = make(name)
    tokens, targets = stream(2, 20)
    _, state = losses_cut(model, tokens[:, :9], targets[:, :9], [], begin(model, 2, form))
    before = {key: tensor.clone() for key, tensor in state.tensors().items()}
    # A file hands its tensors out in any order.
    restored = State.from_tensors({key: tensor.clone() for key, tensor in reversed(before.items())}, state.version)
    assert list(restored.tensors()) == list(before)
    a, _ = losses_cut(model, tokens[:, 9:], targets[:, 9:], [], state)
    b, _ = losses_cut(model, tokens[:, 9:], targets[:, 9:], [], restored)
    torch.testing.assert_close(a, b, rtol=0, atol=0)
    for key, tensor in state.tensors().items():
        torch.testing.assert_close(tensor, before[key], rtol=0, atol=0, msg=f"{key} was changed in place")


@pytest.mark.parametrize("name", ALL)
def test_a_state_carries_no_gradient_and_no_more_than_the_memory(make: MakeModel, name: str) -> None:
    model = make(name).train()
    tokens, targets = stream(2, 40 if name in LEARNED_40 else 100)
    _, state = model.losses(tokens, targets)
    assert all(not tensor.requires_grad for tensor in state.tensors().values())
    assert int(state.length.max()) <= getattr(model.config, "capacity", getattr(model.config, "memory", 0))
    model.eval()
    with torch.no_grad():
        _, state = model.losses(tokens, targets)
    assert state.nbytes_per_row() - 8 <= model.state_size * 8


@pytest.mark.parametrize("name", CUT_ANYWHERE)
@pytest.mark.parametrize("split", [0, 5, 19])
def test_a_decoder_steps_as_the_model_reads(make: MakeModel, name: str, split: int) -> None:
    """Token by token, with a prompt read at once before it and a state exported and taken up on the way."""
    model = make(name, segment=64) if name in WITHOUT_MEMORY else make(name)
    tokens, targets = stream(2, 30)
    whole, _ = losses_cut(model, tokens, targets, [], model.initial_state(2))
    decoder = model.decoder(batch=2)
    if split:
        decoder.read(tokens[:, :split])
    for place in range(split, 30):
        if place == 24:
            decoder = model.decoder(decoder.state())
        logits = decoder.step(tokens[:, place])
        loss = -logits.log_softmax(-1).gather(-1, targets[:, place, None])[:, 0]
        torch.testing.assert_close(loss, whole[:, place], rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["plain", "convolution"])
def test_a_decoder_takes_rows_of_unequal_age(make: MakeModel, name: str) -> None:
    model = make(name)
    tokens, targets = stream(2, 30)
    _, state = losses_cut(model, tokens[:, :12], targets[:, :12], [], model.initial_state(2))
    state = state.reset(torch.tensor([True, False]))
    expected, _ = losses_cut(model, tokens[:, 12:], targets[:, 12:], [], state)
    decoder = model.decoder(state)
    for place in range(12, 30):
        loss = -decoder.step(tokens[:, place]).log_softmax(-1).gather(-1, targets[:, place, None])[:, 0]
        torch.testing.assert_close(loss, expected[:, place - 12], rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["same-length", "convolution-same-length"])
def test_a_ring_turns_many_times_over(make: MakeModel, name: str) -> None:
    """Forty steps on a ring of six slots still see the last six positions and nothing else."""
    model = make(name)
    tokens, targets = stream(1, 46)
    whole, _ = losses_cut(model, tokens, targets, [], model.initial_state(1))
    decoder = model.decoder()
    sizes = set()
    for place in range(46):
        loss = -decoder.step(tokens[:, place]).log_softmax(-1).gather(-1, targets[:, place, None])[:, 0]
        torch.testing.assert_close(loss, whole[:, place], rtol=0, atol=1e-10)
        sizes.add(decoder.keys[0].data_ptr())  # type: ignore[attr-defined]
    assert len(sizes) == 1, "the ring was allocated anew"


@pytest.mark.parametrize("name", ALL)
def test_a_state_of_another_batch_is_refused(make: MakeModel, name: str) -> None:
    model = make(name)
    with pytest.raises(StateError, match="rows"):
        model.losses(*stream(2, 4), model.initial_state(3))


def test_a_state_of_another_model_is_refused(make: MakeModel) -> None:
    with pytest.raises(StateError, match="layers"):
        make("plain").losses(*stream(2, 4), make("sinusoid").initial_state(2))


def test_a_state_of_another_convolution_is_refused(make: MakeModel) -> None:
    with_tails, without = make("convolution"), make("plain")
    with pytest.raises(StateError, match=r"and 'tails' for its model\.convolution=3"):
        with_tails.losses(*stream(2, 4), without.initial_state(2))
    with pytest.raises(StateError, match="and 'tails'"):
        with_tails.decoder(without.initial_state(2))
    with pytest.raises(StateError, match=r"holds \['keys', 'tails', 'values'\]"):
        without.losses(*stream(2, 4), with_tails.initial_state(2))
    with pytest.raises(StateError, match=r"of a model\.convolution=3 and this model has 2"):
        make("convolution", convolution=2).losses(*stream(2, 4), with_tails.initial_state(2))


def test_a_state_of_another_format_is_refused(make: MakeModel) -> None:
    with pytest.raises(StateError, match="format"):
        State.from_tensors(make("plain").initial_state(1).tensors(), version=99)


@pytest.mark.parametrize("segment", [1, 3, 8])
@pytest.mark.parametrize("same_length", [True, False])
@pytest.mark.parametrize(("memory", "taps"), [(1, 0), (5, 0), (8, 0), (11, 0), (3, 3), (11, 2)])
def test_reach_is_how_far_a_change_is_felt(
    make: MakeModel, memory: int, taps: int, same_length: bool, segment: int
) -> None:
    """Change one token of a long stream: the last segment's losses move if and only if it lies within reach."""
    model = make("plain", memory=memory, same_length=same_length, segment=segment, convolution=taps)
    count = (model.reach // segment + 3) * segment
    tokens, targets = stream(1, count)
    cuts = list(range(segment, count, segment))
    plain, _ = losses_cut(model, tokens, targets, cuts, model.initial_state(1))
    for lag, felt in ((model.reach, True), (model.reach + 1, False)):
        changed = tokens.clone()
        changed[0, count - 1 - lag] = (changed[0, count - 1 - lag] + 1) % 23
        moved, _ = losses_cut(model, changed, targets, cuts, model.initial_state(1))
        difference = float((moved[0, -1] - plain[0, -1]).abs())
        assert (difference > 1e-14) == felt, (lag, difference)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["plain", "convolution"])
def test_a_state_of_a_longer_memory_is_cut_to_the_last_positions(make: MakeModel, name: str, form: str) -> None:
    long, short = make(name), make(name, memory=4)
    tokens, targets = stream(2, 30)
    _, state = losses_cut(long, tokens[:, :20], targets[:, :20], [], begin(long, 2, form))
    last = {name: tuple(t[..., -4:, :] for t in part) for name, part in state.parts.items()}
    cut = State(state.length.clamp(max=4), last)
    a, _ = losses_cut(short, tokens[:, 20:], targets[:, 20:], [], state)
    b, _ = losses_cut(short, tokens[:, 20:], targets[:, 20:], [], cut)
    torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_a_window_decoder_s_state_can_be_handed_to_its_model(make: MakeModel) -> None:
    model = make("memory-0")
    decoder = model.decoder()
    decoder.read(stream(1, 5)[0])
    losses, _ = model.losses(*stream(1, 4), decoder.state())
    fresh, _ = model.losses(*stream(1, 4))
    torch.testing.assert_close(losses, fresh)


def test_a_state_with_a_gap_is_refused(make: MakeModel) -> None:
    tensors = make("plain").initial_state(1).tensors()
    del tensors["keys.0"]
    with pytest.raises(StateError, match="missing"):
        State.from_tensors(tensors)


@pytest.mark.parametrize("name", ALL)
def test_an_empty_segment_is_refused(make: MakeModel, name: str) -> None:
    model = make(name)
    tokens, targets = stream(2, 4)
    for rows, length in ((2, 0), (0, 4)):
        with pytest.raises(DataError, match=rf"the segment is empty, of shape \[{rows}, {length}\]"):
            model(tokens[:rows, :length])
        with pytest.raises(DataError, match="the segment is empty"):
            model.losses(tokens[:rows, :length], targets[:rows, :length])


@pytest.mark.parametrize(
    ("tokens", "beside", "sentence"),
    [
        (torch.zeros(5, dtype=torch.int64), {}, r"torch.int64 of shape \[5\]; hand over whole numbers"),
        (torch.zeros(2, 5), {}, r"torch.float32 of shape \[2, 5\]"),
        (torch.ones(2, 5).long(), {"targets": torch.ones(2, 3).long()}, r"targets have shape \[2, 3\] and the tokens"),
        (torch.ones(2, 5).long(), {"starts": torch.ones(1, 5).bool()}, r"starts have shape \[1, 5\] and the tokens"),
    ],
)
def test_what_is_no_segment_is_told(tokens: torch.Tensor, beside: dict[str, torch.Tensor], sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        require_segment(tokens, **beside)


@pytest.mark.parametrize("shape", [(2, 5), (3,), (0,)])
def test_what_is_no_target_for_each_row_is_told(shape: tuple[int, ...]) -> None:
    with pytest.raises(DataError, match=r"targets have shape \[.*\] and the tokens 2 rows"):
        require_next(torch.ones(2, 5).long(), torch.ones(shape).long(), None)
