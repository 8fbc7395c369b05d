"""Reading a text one segment at a time."""

import pytest
import torch

from longspan.contract import State
from longspan.errors import DataError
from longspan.segments import map_segments, read_segments
from tests.support import build

SHAPE = {"vocabulary": 19, "layers": 2, "width": 16, "heads": 2, "segment": 4, "memory": 5}


def test_every_call_gets_the_next_segment_and_the_state_of_the_last() -> None:
    model = build("transformer-xl", SHAPE).eval()
    text = torch.arange(11)[None]
    seen: list[tuple[list[int], list[int], int]] = []

    def call(tokens: torch.Tensor, targets: torch.Tensor, state: State) -> tuple[int, State]:
        seen.append((tokens[0].tolist(), targets[0].tolist(), int(state.length)))
        return len(seen), model.losses(tokens, targets, state)[1]

    found = list(map_segments(call, model.initial_state(1), text[:, :-1], text[:, 1:]))
    assert seen == [([0, 1, 2, 3], [1, 2, 3, 4], 0), ([4, 5, 6, 7], [5, 6, 7, 8], 4), ([8, 9], [9, 10], 5)]
    assert [(number, int(state.length)) for number, state in found] == [(1, 4), (2, 5), (3, 5)]


def test_a_text_without_tokens_leaves_the_state_as_it_is() -> None:
    model = build("transformer-xl", SHAPE).eval()
    state = model.initial_state(1)
    assert read_segments(model, torch.zeros(1, 0, dtype=torch.int64), state) is state


@pytest.mark.parametrize("family", ["transformer-xl", "longspan-xl", "vanilla", "lstm", "reformer"])
@pytest.mark.parametrize("token", [-1, 19])
def test_a_token_outside_the_vocabulary_is_refused(family: str, token: int) -> None:
    shape = {key: value for key, value in SHAPE.items() if key not in ("memory", "heads") or family != "lstm"}
    model = build(family, {key: value for key, value in shape.items() if key != "memory" or "xl" in family}).eval()
    with pytest.raises(DataError, match=rf"{token}.*18"):
        model(torch.tensor([[3, token]]))
    with pytest.raises(DataError, match=rf"{token}.*18"):
        model.losses(torch.tensor([[3, token]]), torch.tensor([[1, 2]]))
