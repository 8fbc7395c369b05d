"""Read-ahead with the Triton kernels in the interpreter: the step, the random numbers, the choice and the penalties."""

from typing import Any

import pytest
import torch

from longspan import cuda_graphs
from longspan.contract import Decoder, LanguageModel, State
from longspan.cuda_graphs import GraphDecoder
from longspan.decoding import samplers, session, written_tokens
from longspan.decoding.fused import FusedDecoder
from longspan.decoding.sampling import Sampling
from longspan.decoding.session import Session
from longspan.decoding.step_layers import step_layers
from tests.decoding.test_read_ahead import CountingGenerator, FakeGraph
from tests.models.paper import PAPER
from tests.support import build

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here, not interpreted"),
    pytest.mark.torture,
]
SHAPE = {"vocabulary": 19, "layers": 1, "width": 16, "heads": 1, "inner": 16, "segment": 8, "memory": 3}


def open_fused(model: LanguageModel, state: State | None = None, **_: Any) -> Decoder:
    state = model.initial_state(1, trainable=False) if state is None else state
    return GraphDecoder(FusedDecoder(model, state, step_layers(model, state) or [], int(state.length[0])))


@pytest.mark.parametrize("zero_copy", [True, False])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, frequency_penalty=1.0)])
def test_tokens_are_those_of_a_plain_loop(sampling: Sampling, zero_copy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "warm_up", lambda work: work())
    monkeypatch.setattr(cuda_graphs, "capture", FakeGraph)
    for module in (samplers, written_tokens):
        monkeypatch.setattr(module, "kernel_samples", lambda *_: True)
    monkeypatch.setattr(samplers, "ZERO_COPY", zero_copy)
    monkeypatch.setattr(session, "open_decoder", open_fused)
    monkeypatch.setattr(session, "new_generator", lambda _, seed: CountingGenerator().manual_seed(seed))
    torch.manual_seed(3)
    model = build("longspan-xl", SHAPE | PAPER | {"convolution": 2}).eval()
    found = []
    for ahead in (False, True):
        monkeypatch.setattr(written_tokens, "READ_AHEAD", ahead)
        made = Session(model, seed=5)
        made.read([1, 2, 3])
        text = [token for _, token in zip(range(5), made.write(9, sampling), strict=False)]
        found.append([*text, *made.write(3, sampling), made.generator.get_offset()])
    assert found[0] == found[1]
    assert len(set(found[0])) > 3
