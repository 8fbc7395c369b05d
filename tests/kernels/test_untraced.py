"""What is hidden from a compiler is in no graph of it, and says the same."""

import subprocess
import sys

import pytest

COMPILED = """
import sys
import torch
from longspan.models.families import build

family, hidden, values = sys.argv[1], sys.argv[2], eval(sys.argv[3])
torch.manual_seed(0)
model = build(family, {"layers": 2, "width": 16, "segment": 8} | values).eval()
tokens = torch.randint(256, (2, 9))
called = []

def look(graph, _):
    called.extend(str(node.target) for node in graph.graph.nodes if node.op.startswith("call"))
    return graph.forward

read = lambda tokens, targets: model.losses(tokens, targets)[0]
with torch.no_grad():
    losses = torch.compile(read, backend=look)(tokens[:, :-1], tokens[:, 1:])
    assert torch.allclose(losses, read(tokens[:, :-1], tokens[:, 1:]))
assert called
assert not any(hidden in name for name in called), called
"""


@pytest.mark.parametrize(
    ("family", "hidden", "values"),
    [("lstm", "lstm", {}), ("reformer", "sort", {"heads": 2, "chunk": 4})],
    ids=["lstm", "reformer"],
)
def test_no_graph_holds_it(family: str, hidden: str, values: dict[str, int]) -> None:
    """In a process of its own: the shape checks of these tests are nothing a compiler could see through."""
    subprocess.run([sys.executable, "-c", COMPILED, family, hidden, repr(values)], check=True)
