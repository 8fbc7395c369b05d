"""`longspan eval`, compared with losses computed directly from the model."""

import errno
import math
import os
import re
import secrets
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import longspan
from longspan.models.transformer_xl import TransformerXL
from longspan.scoring import dynamic
from longspan.scoring import score as score_module
from longspan.text_model import TextModel

from .conftest import Cli

FACTS = ["tokens", "nats", "bits_per_byte", "perplexity", "tokens_per_second", "seconds", "segment", "memory", "clamp"]
FACTS += ["same_length", "streams"]


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
    reference, found, facts = expected(text.read_bytes(), segment, **settings), np.load("l.npy"), result.json
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, reference, atol=1e-5)
    assert set(FACTS) <= set(facts)
    assert facts["tokens"] == len(text.read_bytes()) == len(found) + 1
    assert math.isclose(facts["nats"], reference.mean(dtype=np.float64), rel_tol=1e-5)
    assert math.isclose(facts["bits_per_byte"], facts["nats"] / math.log(2), rel_tol=1e-9)
    assert math.isclose(facts["perplexity"], math.exp(facts["nats"]), rel_tol=1e-9)
    assert facts["segment"] == segment
    for name, value in settings.items():
        assert facts[name] == value


def test_the_pointer_can_be_longer_shorter_or_off(cli: Cli, text: Path) -> None:
    settings = ["model.width=16", "model.pointer_width=4", "reading.segment=16", "reading.memory=16"]
    settings += ["reading.pointer=20"]
    assert cli("init", "--family", "longspan-xl", "m", *(w for s in settings for w in ("--set", s))).code == 0
    found = {}
    for pointer in (0, 5, 20, 300):
        result = cli("eval", "m", "--data", text, "--pointer", pointer, "--json", "--losses", "l.npy")
        assert (result.code, result.json["pointer"]) == (0, pointer)
        found[pointer] = np.load("l.npy")
        np.testing.assert_allclose(found[pointer], expected(text.read_bytes(), 16, pointer=pointer), atol=1e-5)
    assert cli("eval", "m", "--data", text, "--json").json["nats"] == pytest.approx(found[20].mean(dtype=np.float64))
    assert len({losses.tobytes() for losses in found.values()}) == 4


def test_a_model_without_a_pointer_refuses_the_flag(cli: Cli, model: Path, text: Path) -> None:
    cli("eval", model, "--data", text, "--pointer", 5).refused("pointer", "transformer-xl")
    assert cli("init", "--family", "longspan-xl", "--set", "model.width=16", "p").code == 0
    cli("eval", "p", "--data", text, "--pointer", 5).refused("pointer=5", "model.pointer_width")


def test_sliding_and_streams(cli: Cli, model: Path, text: Path) -> None:
    sliding = cli("eval", model, "--data", text, "--sliding", "--segment", 9, "--json", "--losses", "s.npy").json
    assert sliding["segment"] == 9
    data, net = text.read_bytes(), longspan.load("m")
    with torch.no_grad():
        logits, _ = net(torch.tensor(list(data[91:100]))[None])
    assert math.isclose(np.load("s.npy")[99], float(-logits[0, -1].log_softmax(-1)[data[100]]), abs_tol=1e-5)
    streams = cli("eval", model, "--data", text, "--streams", 4, "--json").json
    assert (streams["streams"], streams["tokens"]) == (4, len(data))


def test_a_split_of_a_file(cli: Cli, model: Path, text: Path) -> None:
    total = cli("eval", model, "--data", text, "--json").json["tokens"]
    parts = [
        cli("eval", model, "--data", text, "--split", name, "--json").json["tokens"]
        for name in ("train", "valid", "test")
    ]
    assert sum(parts) == total > parts[0] > parts[1] > 0


def test_scoring_all_of_a_corpus_is_noted(cli: Cli, model: Path, text: Path, tmp_path: Path) -> None:
    novels = tmp_path / "cache" / "corpora" / "english-novels"
    novels.mkdir(parents=True)
    for name in "abcdefghi":
        (novels / f"{name}.txt").write_bytes(b"It was a dark night. ")
    result = cli("eval", model, "--data", "english-novels", "--json")
    assert result.json["tokens"] == 9 * 21
    assert result.err.count("\n") == 1
    for word in ("longspan: ", "english-novels", "training", "--split test"):
        assert word in result.err
    for data in (["english-novels", "--split", "test"], ["english-novels", "--split", "train"], [text], [novels]):
        assert "all of" not in cli("eval", model, "--data", *data, "--json").err


def test_the_default_output_is_a_table(cli: Cli, model: Path, text: Path) -> None:
    result = cli("eval", model, "--data", text)
    assert result.code == 0
    assert "bits_per_byte" in result.out


def test_errors_are_one_line_and_name_the_value(cli: Cli, model: Path, text: Path) -> None:
    Path("empty.txt").write_bytes(b"")
    Path("one.txt").write_bytes(b"a")
    cli("eval", model, "--data", "nowhere.txt").refused("nowhere.txt")
    cli("eval", model, "--data", "empty.txt").refused("empty.txt", "empty")
    cli("eval", model, "--data", "one.txt").refused("at least 2")
    cli("eval", "nowhere", "--data", text).refused("nowhere")
    cli("eval", text, "--data", text).refused("text.txt")
    cli("eval", model, "--data", text, "--same-length", "--memory", 0).refused("same_length", "memory")
    cli("eval", model, "--data", text, "--memory", -1).refused("memory=-1")
    cli("eval", model, "--data", text, "--segment", 0).refused("segment=0")
    cli("eval", model, "--data", text, "--memory", 2**63).refused("memory", str(2**63))
    cli("eval", model, "--data", text, "--memory", 10**20).refused("memory", str(10**20))
    cli("eval", model, "--data", text, "--streams", 0).refused("streams=0")
    cli("eval", model, "--data", text, "--streams", 3, "--sliding").refused("--streams 3", "--sliding")
    cli("eval", model, "--data", text, "--losses", "no/such/l.npy").refused("no/such")
    cli("eval", model, "--data", text, "--device", "cuda").refused("cuda")
    cli("eval", model, "--data", text, "--device", "gpu").refused("device", "gpu")
    cli("eval", model, "--data", text, "--dtype", "bfloat16").refused("bfloat16")
    cli("eval", model, "--data", text, "--split", "tset").refused("test")
    cli("eval", model).refused("--data")
    assert not list(Path().glob("*.npy"))


def test_a_family_without_memory_is_noted(cli: Cli, text: Path) -> None:
    assert cli("init", "--family", "vanilla", "--set", "model.layers=1", "--set", "model.width=32", "v").code == 0
    assert cli("eval", "v", "--data", text, "--no-sliding", "--json").json["memory"] == 0
    noted = cli("eval", "v", "--data", text, "--dynamic", "--segment", 8).err
    assert all(word in noted for word in ("vanilla", "without memory", "--dynamic", "8 tokens"))
    # An LSTM carries a state without a length in positions.
    assert cli("init", "--family", "lstm", "--set", "model.layers=1", "--set", "model.width=32", "l").code == 0
    assert "memory" not in cli("eval", "l", "--data", text, "--json").json
    cli("eval", "v", "--data", text, "--memory", 10).refused("memory", "vanilla")
    cli("eval", "v", "--data", text, "--same-length").refused("same_length", "vanilla")


def test_segments_do_not_matter_to_an_lstm_and_it_refuses_memory(cli: Cli, text: Path) -> None:
    assert cli("init", "--family", "lstm", "--set", "model.layers=1", "--set", "model.width=32", "r").code == 0
    nats = cli("eval", "r", "--data", text, "--json").json["nats"]
    cut = cli("eval", "r", "--data", text, "--segment", 7, "--json").json["nats"]
    assert math.isclose(nats, cut, rel_tol=1e-6)
    cli("eval", "r", "--data", text, "--memory", 10).refused("memory", "lstm")


def test_no_window_crosses_a_document_start(cli: Cli, model: Path) -> None:
    Path("two").mkdir()
    Path("two/a.txt").write_bytes(b"the first of the two texts, " * 3)
    Path("two/b.txt").write_bytes(b"and now for another, which stands alone. " * 3)
    for flags in (["--sliding", "--segment", 12], ["--segment", 12, "--memory", 0]):  # the second slides by default
        assert cli("eval", model, "--data", "two", "--losses", "both.npy", *flags).code == 0
        assert cli("eval", model, "--data", "two/b.txt", "--losses", "b.npy", *flags).code == 0
        np.testing.assert_allclose(np.load("both.npy")[-len(np.load("b.npy")) :], np.load("b.npy"), atol=1e-5)


WINDOWED = ["--set", "model.layers=1", "--set", "model.width=32", "--set", "reading.segment=16"]


def one_window_per_token(net: TextModel, data: bytes, window: int) -> list[float]:
    """The loss of every target from an empty state and at most `window` tokens before it."""
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
def test_without_memory_a_sliding_window_is_the_default(cli: Cli, text: Path, family: str, flags, window: int) -> None:
    text.write_bytes(text.read_bytes()[:120])
    assert cli("init", "--family", family, *WINDOWED, "v").code == 0
    result = cli("eval", "v", "--data", text, "--losses", "l.npy", "--json", *flags)
    assert result.json["sliding"] is True
    assert result.json["segment"] == window
    assert (result.err.count("\n"), result.json["streams"]) == (1, 1)
    for word in (family, "without memory", f" {window} tokens", "--no-sliding"):
        assert word in result.err
    net = longspan.load("v", memory=0) if family == "transformer-xl" else longspan.load("v")
    reference = one_window_per_token(net, text.read_bytes(), window)
    np.testing.assert_allclose(np.load("l.npy"), reference, atol=1e-5)
    if window == 16:
        score = net.score(text.read_bytes())
        np.testing.assert_allclose(score.losses, reference, atol=1e-5)
        assert score.method == "sliding"
    asked = cli("eval", "v", "--data", text, "--sliding", *flags)
    assert (asked.code, asked.err) == (0, "")
    assert re.search(r"^sliding +True$", asked.out, re.MULTILINE)


def test_no_sliding_scores_segment_by_segment(cli: Cli, model: Path, text: Path) -> None:
    assert cli("init", "--family", "vanilla", *WINDOWED, "v").code == 0
    result = cli("eval", "v", "--data", text, "--no-sliding", "--losses", "l.npy", "--json")
    assert (result.json["sliding"], result.err) == (False, "")
    data, net = text.read_bytes(), longspan.load("v")
    found, pieces = np.load("l.npy"), [data[a : a + 17] for a in range(0, len(data) - 1, 16)]
    reference = np.concatenate([one_window_per_token(net, piece, 16) for piece in pieces])
    np.testing.assert_allclose(found, reference, atol=1e-5)
    np.testing.assert_allclose(net.score(data, method="stream").losses, reference, atol=1e-5)
    streams = cli("eval", "v", "--data", text, "--no-sliding", "--streams", 3, "--json").json
    assert (streams["streams"], streams["sliding"]) == (3, False)
    cli("eval", "v", "--data", text, "--streams", 3).refused("--streams 3", "--no-sliding")
    cli("eval", "v", "--data", text, "--losses", "no/such/l.npy").refused("no/such")
    assert longspan.load(model).score(data).method == "stream"


def test_losses_replace_no_device_and_reserve_disk_space(cli: Cli, model: Path, text: Path, monkeypatch) -> None:
    os.mkfifo("pipe")
    os.mkfifo("pipe.npy")
    cli("eval", model, "--data", text, "--losses", "pipe.npy").refused("loss file pipe.npy", "pipe")
    cli("generate", model, "-n", 2, "--save-state", "pipe").refused("--save-state pipe", "file")
    assert Path("pipe").is_fifo()
    cli("eval", model, "--data", text, "--losses", "/proc/l.npy").refused("loss file /proc/l.npy")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    # Without space reserved beforehand, a mapped file on a full disk ends the process by SIGBUS.
    monkeypatch.setattr(os, "posix_fallocate", full)
    before = set(Path().iterdir())
    cli("eval", model, "--data", text, "--losses", "l.npy").refused("loss file l.npy", "No space left")
    assert set(Path().iterdir()) == before


def test_losses_do_not_overwrite_the_text_or_another_file(cli: Cli, model: Path, text: Path) -> None:
    np.save("text.npy", np.arange(9))
    Path("books/inner").mkdir(parents=True)
    np.save("books/inner/a.npy", np.arange(9))
    Path("link.npy").symlink_to("text.npy")
    for name in ("notes.npy", "notes.csv"):
        Path(name).write_bytes(b"keep this")
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    for data, losses in [
        (text, "text.txt"),
        ("text.npy", "./books/../text.npy"),
        ("text.npy", "link.npy"),
        ("link.npy", "text.npy"),
        ("books", "books/inner/a.npy"),
    ]:
        refused = cli("eval", model, "--data", data, "--losses", losses)
        refused.refused(f"loss file {Path(losses)}", "part of", str(data))
    for name in ("notes.npy", "notes.csv"):
        cli("eval", model, "--data", text, "--losses", name).refused(f"loss file {name}", "not a loss file")
    # Checked before anything is loaded, the model included.
    cli("eval", "nowhere", "--data", text, "--losses", text).refused(f"loss file {text}", "part of")
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize("streams", [1, 3])
def test_the_speed_excludes_warm_up(streams: int, cli: Cli, model: Path, text: Path, monkeypatch) -> None:
    """With a clock that advances 100 seconds at the first segment, which compiles on a GPU, and one at every other."""
    original, times = TransformerXL.losses, [0.0]

    def losses(self, *args, **keywords):
        times.append(times[-1] + (100 if len(times) == 1 else 1))
        return original(self, *args, **keywords)

    monkeypatch.setattr(TransformerXL, "losses", losses)
    monkeypatch.setattr(score_module, "Pace", partial(score_module.Pace, clock=lambda: times[-1]))
    facts = cli("eval", model, "--data", text, "--memory", 8, "--segment", 8, "--streams", streams, "--json").json
    assert facts["tokens_per_second"] == 8 * streams
    assert facts["seconds"] == 100 + math.ceil(facts["scored"] / streams / 8) - 1


def test_losses_as_csv(cli: Cli, model: Path, text: Path) -> None:
    """The same numbers as in the .npy, to the last bit, and no reserved space left over."""
    for name in ("l.npy", "l.CSV", "l.CSV"):
        assert cli("eval", model, "--data", text, "--streams", 3, "--losses", name).code == 0
    lines = Path("l.CSV").read_text().splitlines()
    assert lines[0] == "position,nats"
    positions, losses = zip(*(line.split(",") for line in lines[1:]), strict=True)
    np.testing.assert_array_equal(np.array(losses, np.float32), np.load("l.npy"))
    assert [int(position) for position in positions] == list(range(1, len(text.read_bytes())))


@pytest.mark.parametrize("name", ["l.txt", "l", "l.npz", ".npy"])
def test_losses_with_another_suffix_are_refused(name: str, cli: Cli, text: Path) -> None:
    cli("eval", "nowhere", "--data", text, "--losses", name).refused(f"loss file {name}", ".npy", ".csv")
    assert not Path(name).exists()


def test_losses_are_not_written_through_a_planted_link(cli: Cli, model: Path, text: Path, monkeypatch) -> None:
    """Neither at a temporary name that can be guessed nor at the requested name."""
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


@pytest.mark.parametrize("content", [b"", b"\x93NUMPY, cut short"])
def test_losses_replace_an_older_loss_file(content: bytes, cli: Cli, model: Path, text: Path) -> None:
    Path("l.npy").write_bytes(content)
    assert cli("eval", model, "--data", text, "--losses", "l.npy").code == 0
    assert len(np.load("l.npy")) == len(text.read_bytes()) - 1


@pytest.mark.parametrize("flags", [[], ["--sliding", "--segment", "8"], ["--dynamic", "--dynamic-rate", "1e-9"]])
def test_logits_are_divided_by_the_temperature(flags: list[str], cli: Cli, model: Path, text: Path) -> None:
    short = Path("short.txt")
    short.write_bytes(text.read_bytes()[:200])
    found = cli("eval", model, "--data", short, "--temp", 3, "--json", *flags).json
    assert found["temperature"] == 3
    loaded, ids = longspan.load(model).model, torch.frombuffer(bytearray(short.read_bytes()), dtype=torch.uint8).long()
    windows = [ids[max(0, k - 8) : k] for k in range(1, len(ids))] if "--sliding" in flags else [ids[:-1]]
    with torch.inference_mode():
        last = [loaded(window[None], loaded.initial_state(1))[0][0] for window in windows]
    logits = torch.stack([row[-1] for row in last]) if "--sliding" in flags else last[0]
    reference = torch.nn.functional.cross_entropy(logits / 3, ids[1:])
    assert found["nats"] == pytest.approx(float(reference), abs=1e-4)
    for wrong in (0, -1, "nan", "inf"):
        cli("eval", model, "--data", short, "--temp", wrong).refused("temp", str(wrong))


def test_dynamic_evaluation(cli: Cli, model: Path, text: Path) -> None:
    static = cli("eval", model, "--data", text, "--json").json
    moving = cli("eval", model, "--data", text, "--dynamic", "--dynamic-rate", 1e-3, "--losses", "l.npy", "--json").json
    assert moving["dynamic"] is True
    assert (moving["dynamic_rate"], moving["dynamic_decay"]) == (1e-3, 0.0)
    assert moving["scored"] == static["scored"] == len(np.load("l.npy"))
    assert moving["nats"] < static["nats"]
    assert moving["static_bits_per_byte"] == pytest.approx(static["bits_per_byte"], abs=1e-5)
    assert "dynamic" not in static
    table = cli("eval", model, "--data", text, "--dynamic").out
    assert "static_bits_per_byte" in table
    assert [line.split()[1] for line in table.splitlines() if line.startswith("dynamic_rate")] == ["5e-05"]
    again = cli("eval", model, "--data", text, "--json").json
    assert again["nats"] == static["nats"]
    cli("eval", model, "--data", text, "--dynamic", "--sliding").refused("--dynamic", "--sliding")
    cli("eval", model, "--data", text, "--dynamic", "--streams", 2).refused("--dynamic", "--streams 2")
    cli("eval", model, "--data", text, "--dynamic", "--dynamic-rate", 0).refused("rate=0")
    cli("eval", model, "--data", text, "--dynamic-rate", 1e-3).refused("--dynamic-rate", "--dynamic")


def test_the_static_score_has_its_own_reading(
    cli: Cli, model: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm = cli("eval", model, "--data", text, "--temp", 2, "--json").json
    monkeypatch.setattr(dynamic, "static_reading", lambda reading, _: replace(reading, temperature=2.0))
    moving = cli("eval", model, "--data", text, "--dynamic", "--dynamic-rate", 1e-9, "--json").json
    assert moving["static_bits_per_byte"] == pytest.approx(warm["bits_per_byte"], abs=1e-5)
    assert abs(moving["bits_per_byte"] - warm["bits_per_byte"]) > 1e-4


def test_a_model_that_does_not_predict_the_next_token_is_refused(cli: Cli, text: Path) -> None:
    sets = ("--set", "model.layers=1", "--set", "model.width=16", "--set", "model.heads=2")
    made = cli("init", "--family", "bert", *sets, "b")
    assert made.code == 0, made.err
    cli("eval", "b", "--data", text).refused("next token", "finetune")
    cli("score", text, "--model", "b").refused("next token", "finetune")
    cli("generate", "b", "-p", "abc", "-n", 3).refused("next token", "finetune")
    cli("recl", "b", "--data", text, "--contexts", "1,2", "--targets", 2).refused("next token", "finetune")
    assert "cost: not measured, because this model does not predict" in cli("export", "b", "small", "--int8").out
    pytest.importorskip("transformers")
    cli("export", "b", "h", "--to", "hf").refused("next token", "finetune")
    assert not Path("h").exists()
