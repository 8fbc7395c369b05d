"""Functions that are hidden from torch.compile are in no graph, and the results are the same."""

import subprocess

import pytest

from tests.programs import PYTHON

COMPILED = """
import sys
import torch
from tests.support import build

family, hidden, values = sys.argv[1], sys.argv[2], eval(sys.argv[3])
torch.manual_seed(0)
model = build(family, {"layers": 2, "width": 16, "segment": 8} | values).eval()
tokens = torch.randint(256, (2, 9))
called = []

def collect(graph, _):
    called.extend(str(node.target) for node in graph.graph.nodes if node.op.startswith("call"))
    return graph.forward

losses_of = lambda tokens, targets: model.losses(tokens, targets)[0]
with torch.no_grad():
    losses = torch.compile(losses_of, backend=collect)(tokens[:, :-1], tokens[:, 1:])
    assert torch.allclose(losses, losses_of(tokens[:, :-1], tokens[:, 1:]))
assert called
assert not any(hidden in name for name in called), called
"""


@pytest.mark.parametrize(
    ("family", "hidden", "values"),
    [("lstm", "lstm", {}), ("reformer", "sort", {"heads": 2, "chunk": 4})],
    ids=["lstm", "reformer"],
)
def test_untraced_functions_are_in_no_graph(family: str, hidden: str, values: dict[str, int]) -> None:
    """In a separate process, because torch.compile cannot trace the shape checks of these tests."""
    subprocess.run([PYTHON, "-c", COMPILED, family, hidden, repr(values)], check=True)
