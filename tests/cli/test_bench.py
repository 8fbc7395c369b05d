"""`longspan bench` on a tiny shape: its output and its operation counts. No test depends on a time."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from longspan.errors import ConfigError
from longspan.experiments.bench import families, timing
from longspan.experiments.bench.families import Case, slope
from longspan.experiments.bench.peak import SavedTensors, peak_bytes
from longspan.models.families import known_families
from longspan.models.transformer_xl import TransformerXL
from longspan.models.vanilla import Vanilla
from tests.support import build

from .conftest import Cli

pytestmark = pytest.mark.slow

SHAPE = {"vocabulary": 16, "layers": 3, "width": 16, "heads": 2, "inner": 32, "dropout": 0.0}
TINY = timing.Preset(
    SHAPE,
    attention=((5, 2),),
    train=(2, 8, 8),
    lengths=(6,),
    segment=4,
    generate=((1, 6), (2, 5)),
    texts=(8, 16, 32),
)
CPU = torch.device("cpu")
LINE = {"what", "rival", "unit", "ours", "theirs", "tflops", "their_tflops", "by_count", "memory_ratio", "ratio"}
LINE |= {"share"}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny preset, and every call timed once."""

    def once(call: Callable[[], Any], device: torch.device, least: float = 0, rounds: int = 1) -> float:
        return timing.timed(call, 1, device)

    monkeypatch.setitem(timing.PRESETS, "tiny", TINY)
    for name in ("attention", "train", "evaluate", "generate", "families"):
        monkeypatch.setattr(f"longspan.experiments.bench.{name}.seconds", once)


@pytest.mark.parametrize(
    ("verb", "lines"),
    [
        ("attention", 2),
        ("train", 1),
        ("eval", 1),
        ("generate", 2),
        ("train --memories 4,8,16", 3),
        ("train --segments 4,8", 2),
    ],
)
def test_lines(cli: Cli, verb: str, lines: int) -> None:
    result = cli("bench", *verb.split(), "--preset", "tiny", "--json", "--device", "cpu")
    assert (result.code, result.err) == (0, "")
    facts = result.json
    assert set(facts) == {"bench", "preset", "device", "torch", "dtype", "lines"}
    assert (facts["preset"], facts["dtype"], len(facts["lines"])) == ("tiny", "torch.float32", lines)
    for line in facts["lines"]:
        assert set(line) == LINE
        assert line["ours"] > 0
        assert line["theirs"] > 0
        assert line["ratio"] == pytest.approx(line["ours"] / line["theirs"])
        assert line["share"] == pytest.approx(line["ratio"] / line["by_count"])
        assert line["memory_ratio"] is None  # measured on CUDA only


def test_the_default_output_is_a_table(cli: Cli) -> None:
    result = cli("bench", "attention", "--preset", "tiny", "--device", "cpu")
    assert result.code == 0
    assert [line.split()[-1] for line in result.out.splitlines()[2:]] == ["term", "term"]
    assert "by count" in result.out


def test_attention_by_count(cli: Cli) -> None:
    """Three products forward against two, eleven with the backward pass against seven. A product is D multiplications
    and additions per visible pair."""
    forward, both = cli("bench", "attention", "--preset", "tiny", "--json", "--device", "cpu").json["lines"]
    assert forward["by_count"] == pytest.approx(2 / 3)
    assert both["by_count"] == pytest.approx(7 / 11)
    pairs = sum(5 + i + 1 for i in range(8))  # segment 8, memory 5
    product = 2 * 8 * pairs * 2 * 2 / 1e12  # width of a head, heads, batch
    for line, ours, theirs in ((forward, 3, 2), (both, 11, 7)):
        assert line["tflops"] / line["ours"] == pytest.approx(ours * product)
        assert line["their_tflops"] / line["theirs"] == pytest.approx(theirs * product)


def test_evaluation_by_count(cli: Cli) -> None:
    """A window of 6 per token has 1 + 2 + ... + 6 pairs; ours has 6 pairs per token."""
    (line,) = cli("bench", "eval", "--preset", "tiny", "--json", "--device", "cpu").json["lines"]
    ours = build("transformer-xl", {**SHAPE, "memory": 6}).parameter_count
    theirs = build("vanilla", {**SHAPE, "segment": 6}).parameter_count
    pair = 2 * 16 * 3  # multiply and add, width of all heads, layers
    expected = (6 * 2 * theirs + 2 * 21 * pair) / (2 * ours + 3 * 6 * pair)
    assert line["by_count"] == pytest.approx(expected)


def test_generation_by_count(cli: Cli) -> None:
    """The baseline projects keys and values of the complete memory: 2 products of width x width per position."""
    line = cli("bench", "generate", "--preset", "tiny", "--json", "--device", "cpu").json["lines"][0]
    size = build("transformer-xl", {**SHAPE, "memory": 6}).parameter_count
    ours = 2 * size + 3 * 2 * 7 * 16 * 3
    assert line["by_count"] == pytest.approx((ours + 6 * 2 * (2 * 16 * 16) * 3) / ours)


def test_wrong_use_is_one_sentence(cli: Cli) -> None:
    for verb in ("attention", "train", "eval", "generate", "families"):
        cli("bench", verb, "--preset", "enwik").refused("did you mean 'enwik8'?")
    cli("bench", "train", "--memories", "5,x").refused("--memories 5,x")
    cli("bench", "train", "--segments", "0,8").refused("--segments 0,8")
    cli("bench", "train", "--segments", "4", "--memories", "5").refused("--memories 5", "--segments 4")
    cli("bench", "families", "--lengths", "a").refused("--lengths a")
    cli("bench", "families", "--lengths", "0,8").refused("--lengths 0,8")
    wrong = cli("bench", "families", "lstm", "reformed")
    wrong.refused("did you mean 'reformer'?")
    assert wrong.out == ""


def test_every_family_is_measured(cli: Cli) -> None:
    result = cli("bench", "families", "--preset", "tiny", "--json", "--device", "cpu")
    assert (result.code, result.err) == (0, "")
    facts = result.json
    assert (facts["bench"], facts["lengths"]) == ("families", [8, 16, 32])
    assert "tensors saved for the backward pass" in facts["bytes"]
    found = facts["families"]
    assert {growth["family"] for growth in found} == set(known_families())
    for growth in found:
        assert growth["failed"] == {}, growth
        assert growth["claim"] in (1, 1.5, 2)
        assert len(growth["seconds"]) == len(growth["bytes"]) == 3
        assert min(growth["seconds"]) > 0
        assert min(growth["bytes"]) > 0
        assert growth["slope"] == pytest.approx(slope([8, 16, 32], growth["seconds"]))
        assert 0.99 < growth["by_count"] <= growth["claim"] + 0.3
    # A text read in segments needs the memory of one segment; read at once, that of the complete text. Of ELMo, the
    # characters of the vocabulary need most of it at these lengths.
    for growth in found:
        if growth["family"] == "elmo":
            continue
        longest = growth["bytes"][-1] / growth["bytes"][-2]
        assert (longest < 1.4) if growth["read"] == "segments of 8" else (longest > 1.4), growth


def test_results_before_an_interrupt_are_printed(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    cost = families._cost

    def interrupted(case: Case, *rest: Any) -> Any:
        if case.family == "lstm":
            raise KeyboardInterrupt
        return cost(case, *rest)

    monkeypatch.setattr(families, "_cost", interrupted)
    result = cli(
        "bench", "families", "vanilla", "lstm", "--preset", "tiny", "--lengths", "8", "--json", "--device", "cpu"
    )
    assert result.code == 130
    assert [growth["family"] for growth in result.json["families"]] == ["vanilla"]


def test_operation_counts() -> None:
    """12 layers of width 512, inner 2048: full attention dominates from 8k tokens on, a window of 512 never does."""
    preset, lengths = timing.PRESETS["enwik8"], (4096, 8192)
    for case in families.CASES:
        with torch.device("meta"):
            models = [case.build(preset, length) for length in lengths]
        counts = [case.operations(model, length) for model, length in zip(models, lengths, strict=True)]
        low, high = {2: (1.4, 1.9), 1.5: (1.005, 1.5), 1: (0.999, 1.001)}[case.claim]
        assert low < slope(lengths, counts) < high, case.family
        if case.family == "vanilla":
            matrices = 12 * (4 * 512 * 512 + 2 * 512 * 2048) + 205 * 512
            pairs = sum(range(1, 8193))
            # A matrix is used once forward and twice backward; attention is two products forward and five backward.
            expected = 3 * 2 * matrices * 8192 + 7 * 2 * 512 * 12 * pairs
            assert counts[1] == pytest.approx(expected, rel=0.002)  # biases and norms


def test_the_slope_is_of_the_busy_time_if_known() -> None:
    """A device that is busy for n^2 and waits a constant time for the host."""
    lengths = (8, 16, 32, 64)
    busy = [1e-3 * n**2 for n in lengths]
    growth = families.Growth("", "", "", 2, lengths, [time + 10 for time in busy], [None, *busy[1:]])
    assert growth.slope == pytest.approx(2)
    growth.busy[-1] = None
    assert growth.slope == pytest.approx(slope(lengths, growth.seconds))
    assert growth.slope < 1


def test_named_families_in_a_table(cli: Cli) -> None:
    result = cli(
        "bench", "families", "lstm", "transformer-xl", "--preset", "tiny", "--lengths", "16,8", "--device", "cpu"
    )
    assert result.code == 0
    rows = [line for line in result.out.splitlines() if " ms " in line]
    assert [row.split(",")[0] for row in rows] == ["transformer-xl", "transformer-xl", "lstm"]
    assert "8        16" in result.out
    assert rows[0].endswith("L^2 without memory")


class WithMemory(TransformerXL):
    """A registered family that the benchmark does not know."""


class WithoutMemory(Vanilla):
    """The same without memory."""


@pytest.mark.parametrize(("cls", "read"), [(WithMemory, "segments of 8"), (WithoutMemory, "at once")])
def test_a_family_without_a_case(cli: Cli, monkeypatch: pytest.MonkeyPatch, cls: type, read: str) -> None:
    """A registered family needs no entry in CASES: it is measured with the preset's shape."""
    monkeypatch.setitem(known_families(), "newcomer", f"{cls.__module__}:{cls.__name__}")
    line = ("bench", "families", "newcomer", "--preset", "tiny", "--lengths", "8,16", "--device", "cpu")
    (growth,) = cli(*line, "--json").json["families"]
    assert (growth["family"], growth["read"], growth["failed"]) == ("newcomer", read, {})
    assert (growth["claim"], growth["by_count"]) == (None, None)
    assert min(growth["seconds"]) > 0
    assert f"newcomer, {read}" in cli(*line).out
    assert [case.family for case in families.cases_of(())].count("newcomer") == 1


def test_a_failure_is_shown_and_the_others_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(_: timing.Preset, length: int) -> dict[str, Any]:
        if length > 8:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 EiB")
        return {}

    refused = Case("vanilla", "", 2, values=lambda *_: {"width": 17})
    broken = Case("lstm", "", 1, values=lambda *_: {"layers": 1}, keys=lambda *_: 1 / 0)
    monkeypatch.setattr(
        families, "CASES", (refused, Case("rotary", "", 2, values=too_large), broken, families.CASES[0])
    )
    no, some, none, all_ = families.measure(TINY, CPU, torch.float32, names=("vanilla", "rotary", "lstm"))
    assert no.seconds == [None] * 3
    assert all("width=17" in reason for reason in no.failed.values())
    assert (no.slope, no.by_count) == (None, None)
    assert some.seconds[0] is not None
    assert some.failed == {16: "out of memory", 32: "out of memory"}
    assert none.failed[8] == "ZeroDivisionError: division by zero"
    assert all_.failed == {}


def test_learned_positions_cover_the_text() -> None:
    """A family with learned positions refuses longer texts; the benchmark builds a model per length."""
    for values, length in (({"max_distance": 7}, 9), ({}, 129)):
        tokens = torch.zeros(1, length, dtype=torch.int64)
        with pytest.raises(ConfigError, match=str(length)):
            build("sparse", SHAPE | values | {"segment": length}).losses(tokens, tokens)
    (growth,) = families.measure(TINY, CPU, torch.float32, (24, 129), ("sparse",))
    assert growth.failed == {}


def test_slope() -> None:
    assert slope([1, 2, 4, 8], [7 * n**1.5 for n in (1, 2, 4, 8)]) == pytest.approx(1.5)
    assert slope([1, 2, 4, 8], [9.0, 4.0, 8.0, 16.0]) == pytest.approx(1.0)  # only the longest three
    assert slope([1, 2, 4, 8], [2.0, 8.0, None, None]) == pytest.approx(2.0)
    assert slope([2, 4, 8], [1.0, 4.0, 4.0]) == pytest.approx(1.0)  # least squares: between 2 and 0
    assert slope([1, 2], [None, 3.0]) is None


def test_saved_tensors() -> None:
    """exp saves its result and sin its argument, which are the same; the product saves the sine. Weights do not."""
    x, weight = torch.randn(1000, requires_grad=True), torch.randn(1000, requires_grad=True)

    def once() -> None:
        sine = x.exp().sin()
        (sine * sine).sum().backward()

    assert peak_bytes(once, CPU, []) == 8000
    assert peak_bytes(lambda: (once(), once()), CPU, []) == 8000  # released before the second pass
    assert peak_bytes(lambda: (x * weight).sum().backward(), CPU, [weight]) == 4000
    saved = SavedTensors()
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack):
        kept = x.exp()
        assert saved.now == 4000
        del kept
    assert saved.now == 0
