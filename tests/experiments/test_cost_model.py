"""The arithmetic of docs/scale.md, against cases computed by hand and against the models themselves."""

from pathlib import Path

import pytest

from longspan.experiments.cost_model import (
    ACHIEVED,
    LATENCY,
    NETWORK,
    NVLINK,
    SHAPES,
    SUSTAINED,
    Shape,
    Traffic,
    ddp,
    fsdp,
    memory,
    table,
)
from longspan.models.families import outline
from longspan.training.recipe import load_recipe
from longspan.training.utilisation import flops_per_token

SMALL = Shape("small", 1000, 2, 16, 8, 4, 3)


def test_bytes_on_the_wire() -> None:
    # A reduce-scatter of 4,000 bytes among 8 GPUs sends 7 parts of 500 bytes; an all-gather the same again.
    assert ddp(SMALL, 8) == Traffic(2 * 7 * 500, 0.0, 1)
    # With 4 nodes, each GPU also exchanges its eighth, 500 bytes, in 4 parts of 125.
    assert ddp(SMALL, 32) == Traffic(2 * 7 * 500, 2 * 3 * 125, 1)
    # 2,000 bytes of weights forward, the same backward, 4,000 of gradients; three calls per layer and for the rest.
    assert fsdp(SMALL, 8) == Traffic(7 * 1000, 0.0, 9)
    assert fsdp(SMALL, 32) == Traffic(7 * 1000, 3 * 250, 9)
    assert memory(SMALL, 8, sharded=False) == 16_000
    assert memory(SMALL, 8, sharded=True) == 2_000


def test_seconds() -> None:
    traffic = Traffic(NVLINK, 2 * NETWORK, 10)
    assert traffic.seconds(64) == pytest.approx(3 / ACHIEVED + 10 * LATENCY * 6)
    # 24 tokens, 6 FLOPs per parameter, and 12 per layer, unit of width and each of 4 + 4.5 keys.
    assert SMALL.flops == 24 * (6000 + 12 * 2 * 16 * 8.5)
    assert SMALL.compute == SMALL.flops / SUSTAINED
    # The host needs three parts of 86.06 / 13 ms to launch two layers and the rest; large shapes hide that.
    assert SMALL.alone("fsdp") == pytest.approx(3 * 6.62e-3, rel=1e-3)
    assert SHAPES[2].alone("fsdp") == SHAPES[2].compute > 25 * 6.62e-3
    assert SMALL.alone("ddp") == pytest.approx(SMALL.compute * 48.0 / 47.1, rel=1e-3)


@pytest.mark.parametrize(("shape", "recipe"), [(SHAPES[0], "enwik8-base"), (SHAPES[1], "enwik8-large")])
def test_shapes_are_those_of_the_recipes(shape: Shape, recipe: str) -> None:
    found = load_recipe(recipe)
    model = outline(found.family, found.model)
    assert abs(model.parameter_count - shape.parameters) < 30_000  # the vocabulary of the text is not that of the file
    reading = found.training_reading()
    assert (reading.segment, reading.memory) == (shape.segment, shape.memory)
    assert flops_per_token(shape.parameters, model.config, reading) == pytest.approx(shape.flops / shape.tokens)


def test_the_table_of_the_page_is_that_of_the_script() -> None:
    page = Path(__file__).parents[2] / "docs/scale.md"
    assert table() in page.read_text(encoding="utf-8")
