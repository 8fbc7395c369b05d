"""The figures of the README: what they draw, and their size."""

from pathlib import Path

import numpy as np
import pytest

from longspan.data.encoded import Excerpt
from longspan.errors import ConfigError
from longspan.experiments.figures.architecture import draw_architecture
from longspan.experiments.figures.memory_figure import MemoryCurve, draw_memory, measure_memories
from longspan.scoring.score import score
from tests.support import build

IMAGES = Path(__file__).parents[3] / "docs/images"
SMALL = {"vocabulary": 30, "layers": 2, "width": 16, "heads": 2, "inner": 16, "segment": 8, "dropout": 0.0}
LARGEST = 60_000  # bytes


@pytest.fixture
def ids() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 30, 101).astype(np.uint8)


def test_every_point_is_a_score_with_that_memory(ids: np.ndarray) -> None:
    net = build("transformer-xl", SMALL | {"memory": 20, "same_length": True}).eval()
    done: list[tuple[int, int]] = []
    curve = measure_memories(net, ids, (20, 0, 5, 20), progress=lambda *counts: done.append(counts))
    assert (curve.memories, curve.scored) == ((0, 5, 20), 100)
    assert curve.bits[2] == score(net, ids).bits
    for memory, bits, same_length in zip(curve.memories, curve.bits, (False, True, True), strict=True):
        other = build("transformer-xl", SMALL | {"memory": memory, "same_length": same_length}).eval()
        other.load_state_dict(net.state_dict())
        assert bits == score(other, ids, method="stream").bits
    assert done[-1] == (300, 300)
    assert done == sorted(done)


def test_points_reset_the_state_at_document_starts(ids: np.ndarray) -> None:
    net, text = build("transformer-xl", SMALL | {"memory": 20}).eval(), Excerpt(ids, np.array([0, 50]))
    assert measure_memories(net, text, (20,)).bits[0] == score(net, text).bits != score(net, ids).bits


def test_a_model_without_memory_is_refused(ids: np.ndarray) -> None:
    with pytest.raises(ConfigError, match=r"Vanilla.*memories=\[4, 8\]"):
        measure_memories(build("vanilla", SMALL).eval(), ids, (4, 8))


def test_the_curve_shows_its_values(tmp_path: Path) -> None:
    draw_memory(MemoryCurve((16, 1024), (2.125, 1.5), 99), tmp_path, unit="byte", title="a $ title", default=1024)
    shown = (tmp_path / "memory.svg").read_text()
    for text in ("2.125", "1.500", "16", "1,024", "loss (bits per byte)", "memory length of the model"):
        assert f"<!-- {text} -->" in shown


def test_the_diagram_is_reproducible(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        draw_architecture(tmp_path / name)
    drawn = (tmp_path / "one/architecture.svg").read_bytes()
    assert drawn == (tmp_path / "two/architecture.svg").read_bytes()
    assert len(drawn) < LARGEST


@pytest.mark.parametrize("name", ["memory", "architecture"])
def test_committed_figures_are_small(name: str) -> None:
    assert (IMAGES / f"{name}.svg").stat().st_size < LARGEST
