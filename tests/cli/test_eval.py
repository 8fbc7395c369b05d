"""`longspan eval`, against losses computed by hand from the model it evaluates."""

import errno
import math
import os
import secrets
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import longspan
from longspan.evaluation import likelihood
from longspan.models.transformer_xl import TransformerXL
from longspan.text_model import TextModel

from .conftest import Cli

FACTS = ["tokens", "nats", "bits_per_byte", "perplexity", "tokens_per_second", "seconds", "segment", "memory", "clamp"]
FACTS += ["same_length", "lanes"]


def expected(data: bytes, segment: int, **settings) -> np.ndarray:
    model = longspan.load("m", **settings)
    ids = torch.tensor(list(data))[None]
    state, pieces = model.initial_state(1), []
    with torch.no_grad():
        for a in range(0, ids.shape[1] - 1, segment):
            losses, state = model.losses(ids[:, a:-1][:, :segment], ids[:, a + 1 :][:, :segment], state)
            pieces.append(losses[0])
    return torch.cat(pieces).numpy()


@pytest.mark.parametrize(
    ("flags", "segment", "settings"),
    [
        ([], 16, {}),
        (["--segment", 7], 7, {}),
        (["--memory", 5, "--clamp", 3], 16, {"memory": 5, "clamp": 3}),
        (["--same-length"], 16, {"same_length": True}),
        (["--same-length", "--memory", 9, "--segment", 50], 50, {"same_length": True, "memory": 9}),
        (["--memory", 0, "--no-sliding"], 16, {"memory": 0}),
    ],
)
def test_losses_and_facts(cli: Cli, model: Path, text: Path, flags, segment, settings) -> None:
    result = cli("eval", model, "--data", text, "--json", "--losses", "l.npy", *flags)
    assert (result.code, result.err) == (0, "")
    wanted, found, facts = expected(text.read_bytes(), segment, **settings), np.load("l.npy"), result.json
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    assert set(FACTS) <= set(facts)
    assert facts["tokens"] == len(text.read_bytes()) == len(found) + 1
    assert math.isclose(facts["nats"], wanted.mean(dtype=np.float64), rel_tol=1e-5)
    assert math.isclose(facts["bits_per_byte"], facts["nats"] / math.log(2), rel_tol=1e-9)
    assert math.isclose(facts["perplexity"], math.exp(facts["nats"]), rel_tol=1e-9)
    assert facts["segment"] == segment
    for name, value in settings.items():
        assert facts[name] == value


def test_copying_further_less_far_and_not_at_all(cli: Cli, text: Path) -> None:
    shape = {"width": 16, "segment": 16, "memory": 16, "copy": 20, "copy_width": 4}
    sets = [word for key, value in shape.items() for word in ("--set", f"model.{key}={value}")]
    assert cli("init", "m", *sets).code == 0
    found = {}
    for copy in (0, 5, 20, 300):
        result = cli("eval", "m", "--data", text, "--copy", copy, "--json", "--losses", "l.npy")
        assert (result.code, result.json["copy"]) == (0, copy)
        found[copy] = np.load("l.npy")
        np.testing.assert_allclose(found[copy], expected(text.read_bytes(), 16, copy=copy), atol=1e-5)
    assert cli("eval", "m", "--data", text, "--json").json["nats"] == pytest.approx(found[20].mean(dtype=np.float64))
    assert len({losses.tobytes() for losses in found.values()}) == 4


def test_a_model_that_cannot_copy_says_so(cli: Cli, model: Path, text: Path) -> None:
    result = cli("eval", model, "--data", text, "--copy", 5)
    assert result.code == 2
    assert "model.copy=5 needs the weights that model.copy_width=0 leaves out" in result.err


def test_sliding_and_lanes(cli: Cli, model: Path, text: Path) -> None:
    sliding = cli("eval", model, "--data", text, "--sliding", "--segment", 9, "--json", "--losses", "s.npy").json
    assert sliding["segment"] == 9
    data, net = text.read_bytes(), longspan.load("m")
    with torch.no_grad():
        logits, _ = net(torch.tensor(list(data[91:100]))[None])
    assert math.isclose(np.load("s.npy")[99], float(-logits[0, -1].log_softmax(-1)[data[100]]), abs_tol=1e-5)
    lanes = cli("eval", model, "--data", text, "--lanes", 4, "--json").json
    assert (lanes["lanes"], lanes["tokens"]) == (4, len(data))


def test_a_split_of_a_file(cli: Cli, model: Path, text: Path) -> None:
    whole = cli("eval", model, "--data", text, "--json").json["tokens"]
    parts = [
        cli("eval", model, "--data", text, "--split", name, "--json").json["tokens"]
        for name in ("train", "valid", "test")
    ]
    assert sum(parts) == whole > parts[0] > parts[1] > 0


def test_a_corpus_read_whole_is_told(cli: Cli, model: Path, text: Path, tmp_path: Path) -> None:
    novels = tmp_path / "cache" / "corpora" / "english-novels"
    novels.mkdir(parents=True)
    for name in "abcdefghi":
        (novels / f"{name}.txt").write_bytes(b"It was a dark night. ")
    told = cli("eval", model, "--data", "english-novels", "--json")
    assert told.json["tokens"] == 9 * 21
    assert told.err == (
        "longspan: english-novels is read whole, its training text too; --split test reads what no recipe trains on\n"
    )
    for data in (["english-novels", "--split", "test"], ["english-novels", "--split", "train"], [text], [novels]):
        assert cli("eval", model, "--data", *data, "--json").err == ""


def test_people_get_a_table(cli: Cli, model: Path, text: Path) -> None:
    result = cli("eval", model, "--data", text)
    assert result.code == 0
    assert "bits_per_byte" in result.out


def test_wrong_use_is_one_sentence(cli: Cli, model: Path, text: Path) -> None:
    Path("empty.txt").write_bytes(b"")
    Path("one.txt").write_bytes(b"a")
    cli("eval", model, "--data", "nowhere.txt").refused("nowhere.txt")
    cli("eval", model, "--data", "empty.txt").refused("empty.txt is empty")
    cli("eval", model, "--data", "one.txt").refused("at least 2")
    cli("eval", "nowhere", "--data", text).refused("nowhere")
    cli("eval", text, "--data", text).refused("text.txt")
    cli("eval", model, "--data", text, "--same-length", "--memory", 0).refused("memory=0")
    cli("eval", model, "--data", text, "--memory", -1).refused("memory=-1")
    cli("eval", model, "--data", text, "--segment", 0).refused("--segment 0")
    cli("eval", model, "--data", text, "--memory", 2**63).refused("model.memory")
    cli("eval", model, "--data", text, "--memory", 10**20).refused("model.memory")
    cli("eval", model, "--data", text, "--lanes", 0).refused("lanes")
    cli("eval", model, "--data", text, "--lanes", 3, "--sliding").refused("lanes")
    cli("eval", model, "--data", text, "--losses", "no/such/l.npy").refused("no/such")
    cli("eval", model, "--data", text, "--device", "cuda").refused("cuda")
    cli("eval", model, "--data", text, "--device", "gpu").refused("device", "gpu")
    cli("eval", model, "--data", text, "--dtype", "bfloat16").refused("bfloat16")
    cli("eval", model, "--data", text, "--split", "tset").refused("test")
    cli("eval", model).refused("--data")
    assert not list(Path().glob("*.npy"))


def test_a_family_without_memory_says_so(cli: Cli, text: Path) -> None:
    assert cli("init", "--family", "vanilla", "--set", "model.layers=1", "--set", "model.width=32", "v").code == 0
    assert cli("eval", "v", "--data", text, "--no-sliding", "--json").json["memory"] == 0
    told = cli("eval", "v", "--data", text, "--dynamic", "--segment", 8)
    assert "this vanilla has no memory, so --dynamic reads segments of 8 tokens" in told.err
    # An LSTM carries a state that no number of positions describes.
    assert cli("init", "--family", "lstm", "--set", "model.layers=1", "--set", "model.width=32", "l").code == 0
    assert "memory" not in cli("eval", "l", "--data", text, "--json").json
    cli("eval", "v", "--data", text, "--memory", 10).refused("--memory is not for a vanilla")
    cli("eval", "v", "--data", text, "--same-length").refused("--same-length is not for a vanilla")


def test_a_family_whose_memory_has_no_length_says_so(cli: Cli, text: Path) -> None:
    assert cli("init", "--family", "lstm", "--set", "model.layers=1", "--set", "model.width=32", "r").code == 0
    whole = cli("eval", "r", "--data", text, "--json").json["nats"]
    cut = cli("eval", "r", "--data", text, "--segment", 7, "--json").json["nats"]
    assert math.isclose(whole, cut, rel_tol=1e-6)
    cli("eval", "r", "--data", text, "--memory", 10).refused("--memory is not for a lstm, which has no model.memory")


def test_sliding_stops_at_a_document_s_beginning_as_streaming_does(cli: Cli, model: Path) -> None:
    Path("two").mkdir()
    Path("two/a.txt").write_bytes(b"the first of the two texts, " * 3)
    Path("two/b.txt").write_bytes(b"and now for another, which stands alone. " * 3)
    for flags in (["--sliding", "--segment", 12], ["--segment", 12, "--memory", 0]):  # the second slides by itself
        assert cli("eval", model, "--data", "two", "--losses", "both.npy", *flags).code == 0
        assert cli("eval", model, "--data", "two/b.txt", "--losses", "b.npy", *flags).code == 0
        np.testing.assert_allclose(np.load("both.npy")[-len(np.load("b.npy")) :], np.load("b.npy"), atol=1e-5)


def one_window_per_token(net: TextModel, data: bytes, window: int) -> list[float]:
    """The loss of every target from a fresh state and at most `window` tokens before it."""
    found = []
    with torch.no_grad():
        for place in range(1, len(data)):
            logits, _ = net(torch.tensor(list(data[max(0, place - window) : place]))[None])
            found.append(float(-logits[0, -1].log_softmax(-1)[data[place]]))
    return found


@pytest.mark.parametrize(
    ("family", "flags", "window"),
    [("vanilla", [], 16), ("vanilla", ["--segment", 9], 9), ("transformer-xl", ["--memory", 0], 16)],
)
def test_without_memory_a_window_slides_by_itself(cli: Cli, text: Path, family: str, flags, window: int) -> None:
    text.write_bytes(text.read_bytes()[:120])
    sets = [part for key in ("layers=1", "width=32", "segment=16") for part in ("--set", f"model.{key}")]
    assert cli("init", "--family", family, *sets, "v").code == 0
    result = cli("eval", "v", "--data", text, "--losses", "l.npy", "--json", *flags)
    assert result.json["sliding"] is True
    assert result.json["segment"] == window
    assert (result.err.count("\n"), result.json["lanes"]) == (1, 1)
    for word in (family, "no memory", f"window of the {window} ", "one window per token", "--no-sliding"):
        assert word in result.err
    net = longspan.load("v", memory=0) if family == "transformer-xl" else longspan.load("v")
    wanted = one_window_per_token(net, text.read_bytes(), window)
    np.testing.assert_allclose(np.load("l.npy"), wanted, atol=1e-5)
    if window == 16:
        score = net.score(text.read_bytes())
        np.testing.assert_allclose(score.losses, wanted, atol=1e-5)
        assert score.sliding
    asked = cli("eval", "v", "--data", text, "--sliding", *flags)
    assert (asked.code, asked.err) == (0, "")
    assert "sliding            True" in asked.out


def test_the_cheap_way_stays(cli: Cli, model: Path, text: Path) -> None:
    sets = [part for key in ("layers=1", "width=32", "segment=16") for part in ("--set", f"model.{key}")]
    assert cli("init", "--family", "vanilla", *sets, "v").code == 0
    result = cli("eval", "v", "--data", text, "--no-sliding", "--losses", "l.npy", "--json")
    assert (result.json["sliding"], result.err) == (False, "")
    data, net = text.read_bytes(), longspan.load("v")
    found, pieces = np.load("l.npy"), [data[a : a + 17] for a in range(0, len(data) - 1, 16)]
    wanted = np.concatenate([one_window_per_token(net, piece, 16) for piece in pieces])
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    np.testing.assert_allclose(net.score(data, sliding=False).losses, wanted, atol=1e-5)
    lanes = cli("eval", "v", "--data", text, "--no-sliding", "--lanes", 3, "--json").json
    assert (lanes["lanes"], lanes["sliding"]) == (3, False)
    cli("eval", "v", "--data", text, "--lanes", 3).refused("without memory", "--no-sliding")
    cli("eval", "v", "--data", text, "--losses", "no/such/l.npy").refused("no/such")
    assert not longspan.load(model).score(data).sliding


def test_losses_replace_no_device_and_reserve_their_room(cli: Cli, model: Path, text: Path, monkeypatch) -> None:
    os.mkfifo("pipe")
    os.mkfifo("pipe.npy")
    cli("eval", model, "--data", text, "--losses", "pipe.npy").refused("--losses pipe.npy is a device or a pipe")
    cli("generate", model, "-n", 2, "--save-state", "pipe").refused("--save-state pipe is a device or a pipe")
    assert Path("pipe").is_fifo()
    told = cli("eval", model, "--data", text, "--losses", "/proc/l.npy")
    told.refused("--losses /proc/l.npy cannot be written")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    # Where room is not taken beforehand, a mapped file that meets a full disk ends the process by SIGBUS.
    monkeypatch.setattr(os, "posix_fallocate", full)
    before = set(Path().iterdir())
    cli("eval", model, "--data", text, "--losses", "l.npy").refused("--losses l.npy cannot be written: No space left")
    assert set(Path().iterdir()) == before


def test_losses_are_not_written_over_the_text_or_another_file(cli: Cli, model: Path, text: Path) -> None:
    np.save("text.npy", np.arange(9))
    Path("books/inner").mkdir(parents=True)
    np.save("books/inner/a.npy", np.arange(9))
    Path("link.npy").symlink_to("text.npy")
    for name in ("notes.npy", "notes.csv"):
        Path(name).write_bytes(b"to be kept")
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    for data, losses in [
        (text, "text.txt"),
        ("text.npy", "./books/../text.npy"),
        ("text.npy", "link.npy"),
        ("link.npy", "text.npy"),
        ("books", "books/inner/a.npy"),
    ]:
        told = cli("eval", model, "--data", data, "--losses", losses)
        told.refused(f"is part of the text that is read, {data}")
    for name in ("notes.npy", "notes.csv"):
        cli("eval", model, "--data", text, "--losses", name).refused(f"--losses {name} is a file of another kind")
    # Told before anything is read, the model too.
    cli("eval", "nowhere", "--data", text, "--losses", text).refused("is part of the text")
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize("lanes", [1, 3])
def test_the_first_segments_are_not_in_the_pace(lanes: int, cli: Cli, model: Path, text: Path, monkeypatch) -> None:
    """By a clock that goes on 100 seconds at the first segment, which compiles on a GPU, and one at every other."""
    plain, times = TransformerXL.last_losses, [0.0]

    def last_losses(self, *args):
        times.append(times[-1] + (100 if len(times) == 1 else 1))
        return plain(self, *args)

    monkeypatch.setattr(TransformerXL, "last_losses", last_losses)
    monkeypatch.setattr(likelihood, "Pace", partial(likelihood.Pace, clock=lambda: times[-1]))
    facts = cli("eval", model, "--data", text, "--memory", 8, "--segment", 8, "--lanes", lanes, "--json").json
    assert facts["tokens_per_second"] == 8 * lanes
    assert facts["seconds"] == 100 + math.ceil(facts["scored"] / lanes / 8) - 1


def test_losses_as_csv(cli: Cli, model: Path, text: Path) -> None:
    """The same numbers as in the .npy, to the last bit, and nothing left of the space that was reserved."""
    for name in ("l.npy", "l.CSV", "l.CSV"):
        assert cli("eval", model, "--data", text, "--lanes", 3, "--losses", name).code == 0
    lines = Path("l.CSV").read_text().splitlines()
    assert lines[0] == "position,nats"
    positions, losses = zip(*(line.split(",") for line in lines[1:]), strict=True)
    np.testing.assert_array_equal(np.array(losses, np.float32), np.load("l.npy"))
    assert [int(position) for position in positions] == list(range(1, len(text.read_bytes())))


@pytest.mark.parametrize("name", ["l.txt", "l", "l.npz", ".npy"])
def test_losses_of_another_suffix_are_refused(name: str, cli: Cli, text: Path) -> None:
    cli("eval", "nowhere", "--data", text, "--losses", name).refused(f"--losses {name}", ".npy", ".csv")
    assert not Path(name).exists()


def test_losses_are_not_written_through_a_planted_link(cli: Cli, model: Path, text: Path, monkeypatch) -> None:
    """Neither at a temporary name that can be guessed nor at the name that was asked for."""
    victim = Path("victim.npy")
    np.save(victim, np.arange(3))
    before = victim.read_bytes()
    monkeypatch.setattr(secrets, "token_hex", lambda _: "00000000")
    for planted in (f".l.npy.{os.getpid()}", ".l.npy.new-00000000.longspan", "l.npy"):
        Path(planted).symlink_to(victim)
    assert cli("eval", model, "--data", text, "--losses", "l.npy").code == 0
    assert victim.read_bytes() == before
    assert not Path("l.npy").is_symlink()
    assert len(np.load("l.npy")) == len(text.read_bytes()) - 1


@pytest.mark.parametrize("there", [b"", b"\x93NUMPY, cut short"])
def test_losses_take_the_place_of_losses(there: bytes, cli: Cli, model: Path, text: Path) -> None:
    Path("l.npy").write_bytes(there)
    assert cli("eval", model, "--data", text, "--losses", "l.npy").code == 0
    assert len(np.load("l.npy")) == len(text.read_bytes()) - 1


@pytest.mark.parametrize("way", [[], ["--sliding", "--segment", "8"], ["--dynamic", "--dynamic-rate", "1e-9"]])
def test_scores_over_a_temperature(way: list[str], cli: Cli, model: Path, text: Path) -> None:
    short = Path("short.txt")
    short.write_bytes(text.read_bytes()[:200])
    found = cli("eval", model, "--data", short, "--temp", 3, "--json", *way).json
    assert found["temperature"] == 3
    loaded, ids = longspan.load(model).model, torch.frombuffer(bytearray(short.read_bytes()), dtype=torch.uint8).long()
    windows = [ids[max(0, k - 8) : k] for k in range(1, len(ids))] if "--sliding" in way else [ids[:-1]]
    with torch.inference_mode():
        last = [loaded(window[None], loaded.initial_state(1))[0][0] for window in windows]
    logits = torch.stack([row[-1] for row in last]) if "--sliding" in way else last[0]
    wanted = torch.nn.functional.cross_entropy(logits / 3, ids[1:])
    assert found["nats"] == pytest.approx(float(wanted), abs=1e-4)
    for wrong in (0, -1, "nan", "inf"):
        cli("eval", model, "--data", short, "--temp", wrong).refused("--temp")


def test_dynamic_evaluation(cli: Cli, model: Path, text: Path) -> None:
    static = cli("eval", model, "--data", text, "--json").json
    moving = cli("eval", model, "--data", text, "--dynamic", "--dynamic-rate", 1e-3, "--losses", "l.npy", "--json").json
    assert moving["dynamic"] is True
    assert (moving["dynamic_rate"], moving["dynamic_decay"]) == (1e-3, 0.0)
    assert moving["scored"] == static["scored"] == len(np.load("l.npy"))
    assert moving["nats"] < static["nats"]
    assert moving["static_bits_per_byte"] == pytest.approx(static["bits_per_byte"], abs=1e-5)
    assert "dynamic" not in static
    told = cli("eval", model, "--data", text, "--dynamic").out
    assert "static_bits_per_byte" in told
    assert [line.split()[1] for line in told.splitlines() if line.startswith("dynamic_rate")] == ["5e-05"]
    again = cli("eval", model, "--data", text, "--json").json
    assert again["nats"] == static["nats"]
    cli("eval", model, "--data", text, "--dynamic", "--sliding").refused("--dynamic", "--sliding")
    cli("eval", model, "--data", text, "--dynamic", "--lanes", 2).refused("--dynamic", "--lanes 2")
    cli("eval", model, "--data", text, "--dynamic", "--dynamic-rate", 0).refused("--dynamic-rate 0")
    cli("eval", model, "--data", text, "--dynamic-rate", 1e-3).refused("--dynamic-rate", "--dynamic")
