"""Steps that are launched before the host has read a token: the tokens and states of a plain loop.

Without a GPU, a replay of a CUDA graph runs the work, a generator counts draws like that of a GPU, and the sampling
kernel is replaced by a few lines of torch. `tests/kernels/test_sampling_kernel.py` checks the kernel.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from longspan import cuda_graphs
from longspan.contract import Decoder, LanguageModel, State
from longspan.cuda_graphs import GraphDecoder
from longspan.decoding import samplers, session, written_tokens
from longspan.decoding.rolling import RollingDecoder
from longspan.decoding.sampling import Sampling
from longspan.decoding.session import Session
from longspan.decoding.step_layers import step_layers
from longspan.errors import GenerationError
from longspan.text_model import TextModel
from longspan.tokenizers import ByteTokenizer
from tests.models.paper import PAPER
from tests.support import build

SHAPE = {"vocabulary": 256, "layers": 2, "width": 8, "heads": 2, "inner": 8, "segment": 4, "memory": 3}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "paper": ("transformer-xl", {}),
    "untied": ("transformer-xl", {"tie_embedding": False}),
    "window": ("longspan-xl", PAPER | {"same_length": True, "convolution": 2}),
}
FREE = Sampling(temperature=0.9, top_k=40)
PENALTIES = Sampling(frequency_penalty=1.5, repetition_penalty=1.2)
KINDS = [
    ("paper", FREE),
    ("window", PENALTIES),
    pytest.param("paper", Sampling(temperature=0, presence_penalty=2.0), marks=pytest.mark.torture),
    pytest.param("window", Sampling(temperature=0), marks=pytest.mark.torture),
]
COUNT = 5
"""The cache is filled on the way."""


class StaticDecoder(RollingDecoder):
    """A decoder that can be captured, with torch's kernels."""

    static = True
    steps = 0

    def buffers(self) -> list[torch.Tensor]:
        return self.history

    def advance(self) -> None:
        type(self).steps += 1
        super().advance()


class CountingGenerator(torch.Generator):
    """The part of a CUDA generator that sessions use: a seed, and an offset in multiples of four."""

    seed_and_offset = (0, 0)

    def manual_seed(self, seed: int) -> "CountingGenerator":
        self.seed_and_offset = seed, 0
        return self

    def initial_seed(self) -> int:
        return self.seed_and_offset[0]

    def get_offset(self) -> int:
        return self.seed_and_offset[1]

    def set_offset(self, offset: int) -> Any:
        assert offset >= 0
        assert offset % 4 == 0
        self.seed_and_offset = self.seed_and_offset[0], offset

    def get_state(self) -> torch.Tensor:
        return torch.tensor(self.seed_and_offset).view(torch.uint8)

    def set_state(self, state: torch.Tensor) -> Any:
        self.seed_and_offset = tuple(state.view(torch.int64).tolist())


class FakeGraph(torch.cuda.CUDAGraph):
    def __new__(cls, *_: Any) -> "FakeGraph":
        return object.__new__(cls)

    def __init__(self, work: Callable[[], Any], generator: torch.Generator | None = None) -> None:
        assert generator is None
        self.replay = work  # type: ignore[method-assign]


def choose(logits: torch.Tensor, settings: Sampling, counts: torch.Tensor | None, seed: int, draw: int) -> torch.Tensor:
    """A token that depends on the settings, the counts, the seed and the number of the draw."""
    return settings.choose(logits, torch.Generator().manual_seed(1000 * seed + draw), counts)


def choose_tokens(
    logits: torch.Tensor, *, places: Any, counts: torch.Tensor | None = None, **settings: Any
) -> torch.Tensor:
    """What the kernel does with `places` and `counts`."""
    seed, draw, turn = places.random[0].tolist()
    chosen = choose(logits, Sampling(**settings), counts, seed, draw)
    fed = chosen if places.found is None else chosen.clamp(min=0)
    if places.found is not None:
        places.found[turn % 2] = chosen
    places.tokens.copy_(fed)
    places.random[:, 1:] += 1
    if counts is not None:
        counts[0, fed.clamp(min=0)] += 1
    return places.tokens


def open_static(model: LanguageModel, state: State | None = None, **options: Any) -> Decoder:
    state = model.initial_state(1, options.get("reading"), trainable=False) if state is None else state
    layers = step_layers(model, state)
    assert layers is not None
    return GraphDecoder(StaticDecoder(model, state, layers, int(state.length[0])))


@pytest.fixture(autouse=True)
def _fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "warm_up", lambda work: work())
    monkeypatch.setattr(cuda_graphs, "capture", FakeGraph)
    for module in (samplers, written_tokens):
        monkeypatch.setattr(module, "kernel_samples", lambda *_: True)
    monkeypatch.setattr(samplers.kernel, "choose_tokens", choose_tokens)
    monkeypatch.setattr(session, "open_decoder", open_static)
    monkeypatch.setattr(session, "new_generator", lambda _, seed: CountingGenerator().manual_seed(seed))
    monkeypatch.setattr(StaticDecoder, "steps", 0)


def make(name: str) -> LanguageModel:
    family, values = MODELS[name]
    torch.manual_seed(2)
    model = build(family, SHAPE | values).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.5)
    return model


@pytest.fixture(scope="module")
def models() -> dict[str, LanguageModel]:
    return {name: make(name) for name in MODELS}


class Plain:
    """The definition: one step after another, from a prompt or a state."""

    def __init__(self, model: LanguageModel, sampling: Sampling, prompt: list[int], state: State | None = None) -> None:
        self.model, self.sampling = model, sampling
        before = model.initial_state(1, trainable=False) if state is None else state
        self.decoder = RollingDecoder(model, before, step_layers(model, before) or [], int(before.length[0]))
        if len(prompt) > 1:
            self.decoder.prefill(torch.tensor([prompt[:-1]]))
        self.tokens, self.states = prompt[-1:], [self.decoder.state()]

    def write(self, count: int, draw: int = 0) -> "Plain":
        """`count` tokens with the draws from number `draw` on; penalties count from here."""
        counts = torch.zeros(1, 256) if self.sampling.penalises else None
        for n in range(count):
            logits = self.decoder.step(torch.tensor(self.tokens[-1:]))
            self.tokens.append(int(choose(logits, self.sampling, counts, 7, draw + n)))
            if counts is not None:
                counts[0, self.tokens[-1]] += 1
            self.states.append(self.decoder.state())
        return self

    def after(self, stop: int, count: int) -> "Plain":
        """Another call that writes `count` tokens after the first `stop`."""
        other = Plain(self.model, self.sampling, self.tokens[stop : stop + 1], self.states[stop])
        return other.write(count, draws(self.sampling, stop))


PROMPT = [1, 2]


def start(model: LanguageModel) -> Session:
    made = Session(model, seed=7)
    made.read(PROMPT)
    return made


def draws(sampling: Sampling, count: int) -> int:
    return 0 if sampling.greedy else count


def assert_states_equal(found: State, expected: State, *, lost: bool) -> None:
    """Bit for bit. `lost`: a sliding window's oldest position, which no token sees any more, may be zero."""
    assert found.length.tolist() == expected.length.tolist()
    for name, tensor in expected.tensors().items():
        other = found.tensors()[name]
        if lost and tensor.dim() == 4:
            tensor, other = tensor[:, :, 1:], other[:, :, 1:]
        assert torch.equal(other, tensor), name


@pytest.mark.parametrize(("name", "sampling"), KINDS)
def test_tokens_are_those_of_a_plain_loop_wherever_the_caller_stops(
    models: dict[str, LanguageModel], name: str, sampling: Sampling
) -> None:
    """State, generator and the tokens of a second call as well. No step is computed after the last token."""
    whole = Plain(models[name], sampling, PROMPT).write(COUNT)
    for stop in range(COUNT + 1):
        made, found = start(models[name]), []
        StaticDecoder.steps = 0
        for token in made.write(COUNT, sampling) if stop else ():
            found.append(token)
            if len(found) == stop:
                break
        assert found == whole.tokens[1 : stop + 1]
        assert StaticDecoder.steps == (stop + (0 < stop < COUNT))
        assert made.pending == whole.tokens[stop]
        assert made.generator.get_offset() == 4 * draws(sampling, stop)
        assert_states_equal(made.decoder.state(), whole.states[stop], lost=name == "window")
        after = whole.after(stop, 2)
        assert list(made.write(2, sampling)) == after.tokens[1:]
        for one, other in zip(
            made.decoder.state().tensors().values(), after.states[-1].tensors().values(), strict=True
        ):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-5)  # other slots, so other roundings


@pytest.mark.parametrize(("name", "sampling"), KINDS)
def test_a_state_that_is_taken_between_tokens_changes_none(
    models: dict[str, LanguageModel], name: str, sampling: Sampling, tmp_path: Path
) -> None:
    """Fork and save after the first token and after the cache is full, and continue all of them."""
    text = TextModel(models[name], ByteTokenizer())
    whole = Plain(models[name], sampling, PROMPT).write(COUNT)
    made, found = start(models[name]), []
    for token in made.write(COUNT, sampling):
        found.append(token)
        if len(found) % 4 == 1:
            text.save_session(made, tmp_path / "one.state")
            loaded = text.session(state=tmp_path / "one.state")
            for other in (made.fork(), loaded):
                assert list(other.write(2, sampling)) == whole.after(len(found), 2).tokens[1:]
            assert_states_equal(made.decoder.state(), whole.states[len(found)], lost=name == "window")
    assert found == whole.tokens[1:]


def test_calls_that_take_turns_on_one_session(models: dict[str, LanguageModel]) -> None:
    """Each continues from its own last token, with the draws of the session; so does a call after a prompt."""
    made = start(models["paper"])
    settings = {"one": FREE, "other": Sampling(top_k=9)}
    writing = {name: made.write(6, sampling) for name, sampling in settings.items()}
    plain, last = Plain(models["paper"], FREE, PROMPT), {"": PROMPT[-1]}
    order = ["one", "one", "other", "one", "other", "other", "one"]
    for draw, name in enumerate(order):
        logits = plain.decoder.step(torch.tensor([last.get(name, last[""])]))
        last[name] = last[""] = int(choose(logits, settings[name], None, 7, draw))
        assert next(writing[name]) == last[name] == made.pending
    made.read([9, 8])
    plain.decoder.prefill(torch.tensor([[last[""], 9]]))
    expected = Plain(models["paper"], FREE, [8], plain.decoder.state()).write(3, len(order)).tokens[1:]
    assert list(made.write(3, FREE)) == expected


@pytest.mark.parametrize("stop", ["th", *(pytest.param(stop, marks=pytest.mark.torture) for stop in ("", "e"))])
def test_text_and_stop_strings(models: dict[str, LanguageModel], stop: str) -> None:
    """The text before a stop string, and the text after it from the same session."""
    with torch.no_grad():
        models["paper"].head.biases[0][[*b"the "]] = 9.0  # type: ignore[index, union-attr]
    text, found = TextModel(models["paper"], ByteTokenizer()), []
    for ahead in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(written_tokens, "READ_AHEAD", ahead)
            made = text.session("once", seed=5)
            stops = [stop] if stop else []
            found.append(["".join(text.stream(made, 16, FREE, stop=stops)) for _ in range(2)])
    assert found[0] == found[1]
    assert any(found[0])
    assert not stop or stop not in "".join(found[0][0])


@pytest.mark.parametrize("sampling", [FREE, Sampling(temperature=0)])
def test_logits_that_are_not_finite(sampling: Sampling) -> None:
    """The fourth token has an embedding of NaN, so the fifth has no logits."""
    model = make("untied")
    tokens = Plain(model, sampling, PROMPT).write(4).tokens[1:]
    first = tokens.index(tokens[3])
    with torch.no_grad():
        model.embedding.tables[0][tokens[3]] = float("nan")  # type: ignore[index, union-attr]
    made = start(model)
    with pytest.raises(GenerationError, match=f"token {first + 2} "):
        list(made.write(COUNT, sampling))
    assert made.pending == tokens[first]
    assert made.generator.get_offset() == 4 * draws(sampling, first + 2)
