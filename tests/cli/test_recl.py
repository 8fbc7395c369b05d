"""`longspan recl`: from models, from loss tables, and what it refuses."""

from pathlib import Path

import numpy as np
import pytest

from .conftest import Cli

FAST = ["--contexts", "10:40:10", "--targets", 20]


@pytest.fixture
def vanilla(cli: Cli) -> Path:
    sets = ["--set", "model.layers=1", "--set", "model.width=32", "--set", "reading.segment=48"]
    assert cli("init", "--family", "vanilla", *sets, "v").code == 0
    return Path("v")


def test_a_group_of_models(cli: Cli, model: Path, vanilla: Path, text: Path) -> None:
    result = cli("recl", model, vanilla, "--data", text, "--r", "0.1,1.0", "--json", *FAST)
    assert (result.code, result.err) == (0, "")
    found = result.json
    assert set(found) == {"recl", "ecl", "bounded", "intervals", "differences"}
    assert set(found["recl"]) == set(found["bounded"]) == {"0.1", "1.0"}
    for lengths in [*found["recl"].values(), found["ecl"]]:
        assert set(lengths) == {"m", "v"}
        assert set(lengths.values()) <= {10, 20, 30, 40}
    for r, names in found["bounded"].items():
        assert all(found["recl"][r][name] == 40 for name in names)
        low, high = found["intervals"]["recl"][r]["m"]
        assert low <= found["recl"][r]["m"] <= high
    assert found == cli("recl", vanilla, model, "--data", text, "--r", "0.1,1.0", "--json", *FAST).json


@pytest.mark.usefixtures("undrawn")
def test_the_default_output_is_a_table_and_figures(cli: Cli, model: Path, text: Path) -> None:
    result = cli("recl", model, "--data", text, "--out", "figures", *FAST)
    assert result.code == 0
    assert "RECL r=0.1" in result.out
    names = {path.name for path in Path("figures").iterdir()}
    drawn = {f"figure{n}.{kind}" for n in (3, 4) for kind in ("png", "svg", "pdf")}
    assert names == drawn | {"losses.npz"}
    again = cli("recl", "--losses", "figures/losses.npz")
    assert again.out == result.out


def save(path: str, losses: np.ndarray, contexts: tuple[int, ...] = (100, 200, 300)) -> None:
    np.savez(path, names=[f"model {i}" for i in range(len(losses))], contexts=contexts, losses=losses)


def test_loss_tables_from_other_programs(cli: Cli) -> None:
    losses = np.repeat(np.array([[[3.0], [2.0], [1.0]], [[3.0], [2.0], [2.0]], [[3.0], [3.0], [3.0]]]), 8, axis=2)
    save("t.npz", losses)
    found = cli("recl", "--losses", "t.npz", "--json").json
    expected = {"model 0": 300, "model 1": 200, "model 2": 100}
    assert found["recl"] == dict.fromkeys(("0.1", "0.5", "1.0"), expected)
    assert found["ecl"] == expected
    assert found["bounded"] == {r: ["model 0"] for r in ("0.1", "0.5", "1.0")}
    assert found["intervals"]["recl"]["0.5"]["model 1"] == [200, 200]
    one = {"first": "model 0", "second": "model 2", "tokens": 200, "low": 200, "high": 200, "longer": 1.0}
    assert one in found["differences"]["0.1"]
    shown = cli("recl", "--losses", "t.npz", "--pairs").out
    assert "RECL r=0.1, model 0 minus model 2: +200 [+200, +200], longer in 100% of the resamples\n" in shown
    some = cli("recl", "--losses", "t.npz", "--contexts", "100:200:100", "--r", "1", "--json").json
    assert some["recl"] == {"1": {"model 0": 200, "model 1": 200, "model 2": 100}}


def test_tables_of_models_that_were_measured_apart_are_joined(cli: Cli) -> None:
    losses = np.random.default_rng(0).random((3, 3, 8)) + np.array([3.0, 2.0, 1.0])[:, None]
    names = [f"model {i}" for i in range(3)]
    np.savez("all.npz", names=names, contexts=(100, 200, 300), losses=losses)
    np.savez("a.npz", names=names[:1], contexts=(100, 200, 300), losses=losses[:1])
    np.savez("b.npz", names=names[1:], contexts=(100, 200, 300), losses=losses[1:])
    joined = cli("recl", "--losses", "a.npz", "--losses", "b.npz", "--json").json
    assert joined == cli("recl", "--losses", "all.npz", "--json").json
    twice = cli("recl", "--losses", "a.npz", "--losses", "all.npz", "--json").json
    assert list(twice["ecl"]) == ["a/model 0", "all/model 0", "model 1", "model 2"]
    for name, passage in (("a", "one"), ("b", "two")):
        np.savez(f"{name}.npz", names=[name], contexts=(100, 200, 300), losses=losses[:1], passage=passage)
    cli("recl", "--losses", "a.npz", "--losses", "b.npz").refused("different texts")
    cli("recl", "--losses", "all.npz", "--losses", "a.npz", "--losses", "b.npz").refused("a and b", "different texts")
    cli("recl", "--losses", "a.npz", "--losses", "a.npz").refused("given twice")
    np.savez("b.npz", names=names[1:], contexts=(100, 200, 300), losses=losses[1:, :, :7])
    cli("recl", "--losses", "a.npz", "--losses", "b.npz").refused("7 targets", "8")


def test_byte_names_float_contexts_and_log_probabilities(cli: Cli) -> None:
    losses = np.array([[[3.0], [2.0], [1.0]]], np.float32)
    np.savez("t.npz", names=np.array([b"caf\xc3\xa9"]), contexts=np.array([100.0, 200.0, 300.0]), losses=losses)
    assert cli("recl", "--losses", "t.npz", "--json").json["ecl"] == {"café": 300}
    np.savez("t.npz", names=np.array([7]), contexts=[100, 200, 300], losses=losses)
    cli("recl", "--losses", "t.npz").refused("names", "dtype=str")
    save("t.npz", -losses)
    result = cli("recl", "--losses", "t.npz", "--json")
    assert (result.code, set(result.json["ecl"])) == (0, {"model 0"})
    assert result.err.startswith("longspan: 3 of the 3 losses")
    assert result.err.count("\n") == 1


def test_models_with_equal_names_are_named_by_path(cli: Cli, model: Path, text: Path) -> None:
    Path("a").mkdir()
    assert cli("init", "--set", "model.width=32", "--set", "model.layers=1", "a/m").code == 0
    found = cli("recl", model, "a/m", "--data", text, "--json", *FAST).json
    assert set(found["ecl"]) == {"m", "a/m"}


def test_errors_are_one_line_and_name_the_value(cli: Cli, model: Path, vanilla: Path, text: Path) -> None:
    cli("recl", model, vanilla, "--data", text, "--contexts", "10:50:10").refused("v ", "48 tokens", "50")
    cli("recl", model, "--data", text, "--contexts", "100:1000:100").refused("1000", "tokens")
    cli("recl", model, "--data", text, "--targets", 10**6, "--contexts", "10:40:10").refused("targets", str(10**6))
    for r in ("0", "1.5", "-0.5", "nan", "x", "0.1,,"):
        cli("recl", model, "--data", text, "--r", r, *FAST).refused("--r ", r.partition(",")[0])
    for contexts in ("", "100", "100:50:10", "10:40", "0:40:10", "40,10", "a:b:c", "10:20:0", "1:1000000000:1"):
        cli("recl", model, "--data", text, "--contexts", contexts).refused(
            "contexts", contexts.partition(",")[0].partition(":")[0]
        )
    cli("recl", model, "--data", text, "--contexts", "64:8:8").refused("'64:8:8'", "below")
    cli("recl", model, "--data", text, "--threshold", "0", *FAST).refused("threshold", "0.0")
    cli("recl", model, *FAST).refused("--data")
    cli("recl").refused("--data")
    cli("recl", model, model, "--data", text, *FAST).refused("twice", "m")
    cli("recl", "nowhere", "--data", text, *FAST).refused("nowhere")
    Path("file").write_bytes(b"")
    cli("recl", model, "--data", text, "--out", "file", *FAST).refused("file")


def test_models_with_different_tokenizers_are_refused(cli: Cli, model: Path, text: Path) -> None:
    sets = ["--set", "model.layers=1", "--set", "model.width=32", "--set", "model.vocabulary=128"]
    assert cli("init", "--tokenizer", "characters", *sets, "c").code == 0
    cli("recl", model, "c", "--data", text, *FAST).refused("m ", " c ", "bytes", "characters")


def test_incomplete_tables_are_refused(cli: Cli, model: Path, text: Path) -> None:
    losses = np.ones((2, 3, 4))
    losses[1, 2, 3] = np.nan
    save("t.npz", losses)
    cli("recl", "--losses", "t.npz").refused("'model 1'", "context 300", "target 3")
    save("t.npz", np.ones((2, 2, 4)))
    cli("recl", "--losses", "t.npz").refused("shape", "[2, 2, 4]")
    cli("recl", "--losses", "nowhere.npz").refused("nowhere.npz")
    cli("recl", "--losses", "t.npz", model).refused("--losses")
    cli("recl", "--losses", "t.npz", "--data", text).refused("--losses")
    save("t.npz", np.ones((2, 3, 4)))
    cli("recl", "--losses", "t.npz", "--contexts", "100,150").refused("150")
