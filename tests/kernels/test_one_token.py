"""A one-token step against the model's own layers: without kernels, in Triton's interpreter, recorded on CUDA."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from longspan.contract import StreamDecoder
from longspan.generation.sampling import Sampling
from longspan.generation.session import Session
from longspan.kernels import one_token
from longspan.memory import recorded
from longspan.memory.recorded import RecordedDecoder, can_record
from longspan.memory.ring import RingDecoder
from longspan.models.families import build

pytest.importorskip("triton")
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here, not interpreted")
SHAPE = {"vocabulary": 19, "layers": 2, "width": 24, "heads": 1, "head_width": 10, "inner": 40, "segment": 8}
FORMS: dict[str, dict[str, Any]] = {
    "plain": {"memory": 40},
    "clamp": {"memory": 5, "clamp": 2, "same_length": True, "shared_biases": False},
    "pre": {"memory": 20, "norm": "pre", "final_norm": True, "activation": "squared-relu"},
    "rms": {"memory": 12, "norm": "pre", "norm_type": "rms", "biases": False, "activation": "gelu"},
    "shaw": {"memory": 12, "position": "shaw", "final_norm": True},
    "adaptive": {"memory": 12, "cutoffs": [7], "div_val": 2},
    "convolution": {"memory": 12, "convolution": 3, "norm_type": "rms"},
    "normed-heads": {"memory": 5, "same_length": True, "heads": 2, "qk_norm": True, "convolution": 2, "norm": "pre"},
}
# Those the kernels do not have.
ALL_FORMS = FORMS | {"gated": {"memory": 12, "activation": "swiglu"}, "swish": {"memory": 12, "activation": "swish"}}


class Unrecorded(RecordedDecoder):
    """The same step without a graph, for a machine that has none."""

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        self.tokens.copy_(tokens)
        with torch.no_grad():
            logits = self.compute()
        self.count.add_(1)
        self.advance()
        return logits


def walk(form: str, rows: int, device: str, dtype: torch.dtype, kind: type[RecordedDecoder | RingDecoder]) -> float:
    """The largest difference from the general decoder over a prompt, some steps, another prompt and some more."""
    torch.manual_seed(5)
    model = build("transformer-xl", {**SHAPE, **ALL_FORMS[form]}).to(device, dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    state = model.initial_state(rows, projected=True)
    ours: RecordedDecoder | RingDecoder = kind(model, state, 0)
    exact = StreamDecoder(model, state)
    far = 0.0
    for prompt, steps in ((3, 3), (11, 2)):
        tokens = torch.randint(19, (rows, prompt), device=device)
        ours.read(tokens)
        exact.read(tokens)
        for _ in range(steps):
            token = torch.randint(19, (rows,), device=device)
            got, wanted = ours.step(token), exact.step(token)
            far = max(far, float((got.double() - wanted.double()).abs().max() / wanted.double().abs().max()))
    for part, tensors in exact.state().parts.items():
        for a, b in zip(ours.state().parts[part], tensors, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-5 if dtype == torch.float32 else 0.1)
    return far


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("form", ALL_FORMS)
def test_steps_without_kernels_are_those_of_the_layers(form: str, rows: int) -> None:
    assert walk(form, rows, "cpu", torch.float32, RingDecoder) < 1e-5


def test_the_logits_of_a_step_may_be_written_to() -> None:
    logits = build("transformer-xl", SHAPE).eval().decoder().step(torch.zeros(1, dtype=torch.int64))
    logits[:, 0] = 7.0
    assert logits[0, 0] == 7.0


def test_a_model_in_training_drops_at_every_step() -> None:
    model = build("transformer-xl", {**SHAPE, "memory": 4, "dropout": 0.5}).train()
    token = torch.zeros(1, dtype=torch.int64)
    assert not torch.equal(model.decoder().step(token), model.decoder().step(token))


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize(("form", "rows"), [*((form, 1) for form in FORMS), ("plain", 5), ("rms", 5)])
def test_interpreted_steps_are_those_of_the_layers(form: str, rows: int) -> None:
    assert walk(form, rows, "cpu", torch.float32, Unrecorded) < 1e-5


@interpreted
def test_parts_of_a_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_token, "SLOTS", 16)
    assert one_token.split_count(1, 41) > 1
    assert walk("plain", 1, "cpu", torch.float32, Unrecorded) < 1e-5


class Replayed:
    """A recording for a machine that has none: what it was told is done when it is replayed."""

    def __init__(self, work: Callable[[], Any], generator: torch.Generator | None = None) -> None:
        del generator
        self.replay = work


@interpreted
@pytest.mark.slow
def test_what_is_tried_before_a_recording_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """The token of the first step is taken in once, by the tails too."""
    monkeypatch.setattr(recorded, "run_aside", lambda work: work())
    monkeypatch.setattr(recorded, "record", Replayed)
    assert walk("convolution", 1, "cpu", torch.float32, RecordedDecoder) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 17, 64])
@pytest.mark.parametrize("form", FORMS)
def test_recorded_steps_are_those_of_the_layers(form: str, rows: int) -> None:
    assert walk(form, rows, "cuda", torch.float32, RecordedDecoder) < 1e-4


@pytest.mark.gpu
def test_a_model_in_bfloat16_is_recorded_and_allocates_nothing_per_token() -> None:
    assert walk("plain", 1, "cuda", torch.bfloat16, RecordedDecoder) < 5e-2
    model = build("transformer-xl", {**SHAPE, "memory": 300}).cuda().bfloat16().eval()
    assert can_record(model)
    decoder, token = model.decoder(), torch.zeros(1, dtype=torch.int64, device="cuda")
    decoder.step(token)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(20):
        decoder.step(token)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@pytest.mark.gpu
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.7, top_k=5, top_p=0.9, min_p=0.01)])
def test_a_recorded_choice_follows_the_seed(sampling: Sampling) -> None:
    """Two sessions of one seed write the same, another seed writes something else, and a pause changes nothing."""
    torch.manual_seed(1)
    model = build("transformer-xl", {**SHAPE, "memory": 30}).cuda().eval()

    def written(seed: int, pieces: tuple[int, ...]) -> list[int]:
        session = Session(model, seed=seed)
        session.read([1, 2, 3])
        return [token for piece in pieces for token in session.write(piece, sampling)]

    assert written(1, (40,)) == written(1, (40,)) == written(1, (7, 33))
    assert written(1, (40,)) != written(2, (40,))
    decoder = model.decoder()
    decoder.read(torch.tensor([[1, 2]], device="cuda"))
    greedy, token = [], torch.tensor([3], device="cuda")
    for _ in range(20):
        token = decoder.step(token).argmax(-1)
        greedy.append(int(token))
    session = Session(model)
    session.read([1, 2, 3])
    assert list(session.write(20, Sampling(temperature=0.0))) == greedy
