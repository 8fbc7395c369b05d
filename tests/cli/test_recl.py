"""`longspan recl`: from models, from tables, and what it refuses."""

from pathlib import Path

import numpy as np
import pytest

from .conftest import Cli

FAST = ["--contexts", "10:40:10", "--targets", 20]


@pytest.fixture
def vanilla(cli: Cli) -> Path:
    sets = ["--set", "model.layers=1", "--set", "model.width=32", "--set", "model.segment=48"]
    assert cli("init", "--family", "vanilla", *sets, "v").code == 0
    return Path("v")


def test_a_group(cli: Cli, model: Path, vanilla: Path, text: Path) -> None:
    result = cli("recl", model, vanilla, "--data", text, "--r", "0.1,1.0", "--json", *FAST)
    assert (result.code, result.err) == (0, "")
    found = result.json
    assert set(found) == {"recl", "ecl", "bounded", "intervals"}
    assert set(found["recl"]) == set(found["bounded"]) == {"0.1", "1.0"}
    for lengths in [*found["recl"].values(), found["ecl"]]:
        assert set(lengths) == {"m", "v"}
        assert set(lengths.values()) <= {10, 20, 30, 40}
    for r, names in found["bounded"].items():
        assert all(found["recl"][r][name] == 40 for name in names)
        low, high = found["intervals"]["recl"][r]["m"]
        assert low <= found["recl"][r]["m"] <= high
    assert found == cli("recl", vanilla, model, "--data", text, "--r", "0.1,1.0", "--json", *FAST).json


def test_people_get_a_table_and_pictures(cli: Cli, model: Path, text: Path) -> None:
    result = cli("recl", model, "--data", text, "--out", "pictures", *FAST)
    assert result.code == 0
    assert "RECL r=0.1" in result.out
    names = {path.name for path in Path("pictures").iterdir()}
    assert names == {"figure3.png", "figure3.svg", "figure4.png", "figure4.svg", "losses.npz"}
    again = cli("recl", "--losses", "pictures/losses.npz")
    assert again.out == result.out


def save(path: str, losses: np.ndarray, contexts: tuple[int, ...] = (100, 200, 300)) -> None:
    np.savez(path, names=[f"model {i}" for i in range(len(losses))], contexts=contexts, losses=losses)


def test_tables_made_elsewhere(cli: Cli) -> None:
    losses = np.repeat(np.array([[[3.0], [2.0], [1.0]], [[3.0], [2.0], [2.0]], [[3.0], [3.0], [3.0]]]), 8, axis=2)
    save("t.npz", losses)
    found = cli("recl", "--losses", "t.npz", "--json").json
    expected = {"model 0": 300, "model 1": 200, "model 2": 100}
    assert found["recl"] == dict.fromkeys(("0.1", "0.5", "1.0"), expected)
    assert found["ecl"] == expected
    assert found["bounded"] == {r: ["model 0"] for r in ("0.1", "0.5", "1.0")}
    assert found["intervals"]["recl"]["0.5"]["model 1"] == [200, 200]
    some = cli("recl", "--losses", "t.npz", "--contexts", "100:200:100", "--r", "1", "--json").json
    assert some["recl"] == {"1": {"model 0": 200, "model 1": 200, "model 2": 100}}


def test_what_other_libraries_write(cli: Cli) -> None:
    losses = np.array([[[3.0], [2.0], [1.0]]], np.float32)
    np.savez("t.npz", names=np.array([b"caf\xc3\xa9"]), contexts=np.array([100.0, 200.0, 300.0]), losses=losses)
    assert cli("recl", "--losses", "t.npz", "--json").json["ecl"] == {"café": 300}
    np.savez("t.npz", names=np.array([7]), contexts=[100, 200, 300], losses=losses)
    cli("recl", "--losses", "t.npz").refused("names", "dtype=str")
    save("t.npz", -losses)
    result = cli("recl", "--losses", "t.npz", "--json")
    assert (result.code, set(result.json["ecl"])) == (0, {"model 0"})
    assert result.err == "longspan: 3 of the 3 losses are below zero; a loss is -log P, not log P\n"


def test_models_of_the_same_name_keep_their_paths(cli: Cli, model: Path, text: Path) -> None:
    Path("a").mkdir()
    assert cli("init", "--set", "model.width=32", "--set", "model.layers=1", "a/m").code == 0
    found = cli("recl", model, "a/m", "--data", text, "--json", *FAST).json
    assert set(found["ecl"]) == {"m", "a/m"}


def test_wrong_use_is_one_sentence(cli: Cli, model: Path, vanilla: Path, text: Path) -> None:
    cli("recl", model, vanilla, "--data", text, "--contexts", "10:50:10").refused("v has", "window of 48", "50")
    cli("recl", model, "--data", text, "--contexts", "100:1000:100").refused("1000", "tokens")
    cli("recl", model, "--data", text, "--targets", 10**6, "--contexts", "10:40:10").refused("targets")
    for r in ("0", "1.5", "-0.5", "nan", "x", "0.1,,"):
        cli("recl", model, "--data", text, "--r", r, *FAST).refused("r")
    for contexts in ("", "100", "100:50:10", "10:40", "0:40:10", "40,10", "a:b:c", "10:20:0", "1:1000000000:1"):
        cli("recl", model, "--data", text, "--contexts", contexts).refused("contexts")
    cli("recl", model, "--data", text, "--threshold", "0", *FAST).refused("threshold")
    cli("recl", model, *FAST).refused("--data")
    cli("recl").refused("--data")
    cli("recl", model, model, "--data", text, *FAST).refused("twice")
    cli("recl", "nowhere", "--data", text, *FAST).refused("nowhere")
    Path("file").write_bytes(b"")
    cli("recl", model, "--data", text, "--out", "file", *FAST).refused("file")


def test_models_that_read_different_tokens_are_no_group(cli: Cli, model: Path, text: Path) -> None:
    sets = ["--set", "model.layers=1", "--set", "model.width=32", "--set", "model.vocabulary=128"]
    assert cli("init", "--tokens", "characters", *sets, "c").code == 0
    cli("recl", model, "c", "--data", text, *FAST).refused("m and c read different tokens", "bytes", "characters")


def test_tables_that_are_not_whole_are_refused(cli: Cli, model: Path, text: Path) -> None:
    losses = np.ones((2, 3, 4))
    losses[1, 2, 3] = np.nan
    save("t.npz", losses)
    cli("recl", "--losses", "t.npz").refused("'model 1' at context 300, target 3")
    save("t.npz", np.ones((2, 2, 4)))
    cli("recl", "--losses", "t.npz").refused("shape")
    cli("recl", "--losses", "nowhere.npz").refused("nowhere.npz")
    cli("recl", "--losses", "t.npz", model).refused("--losses")
    cli("recl", "--losses", "t.npz", "--data", text).refused("--losses")
    save("t.npz", np.ones((2, 3, 4)))
    cli("recl", "--losses", "t.npz", "--contexts", "100,150").refused("150")
