"""`init`, `info`, `families`, `import` and help; the frozen list of keys."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

import longspan
from longspan.cli import main
from longspan.cli.keys import MODEL_KEYS, READING_KEYS
from longspan.config import keys
from longspan.models.families import BUILT_IN, family
from longspan.reading import Reading

from .conftest import Cli

FIXTURES = Path(__file__).parents[1] / "parity" / "fixtures"


def test_the_keys_are_those_of_the_families_and_help_lists_them(cli: Cli) -> None:
    known = {key for name in BUILT_IN for key in keys(family(name).Config)}
    assert set(MODEL_KEYS) == known
    assert set(READING_KEYS) == set(keys(Reading)) == {key for name in BUILT_IN for key in family(name).settings}
    shown = cli("init", "--help").out
    assert all(f"model.{key}" in shown for key in known)
    assert all(f"reading.{key}" in shown for key in READING_KEYS)


def test_the_list_of_keys_is_frozen() -> None:
    """Files and recipes depend on the keys, so a new key must be added here too."""
    frozen = """
        activation ar attention_dropout biases block buckets causal character_width characters chunk classify compressed
        compression convolution cutoffs dilation div_val dropout embedding_dropout embedding_width factorised filters
        final_norm first_positions global_blocks global_tokens head_width heads hidden_dropout inner input_dropout
        layer_losses layers log_distances mask masked max_distance norm norm_type output_dropout pattern pieces
        pointer_width ponder position positions predict_every projection_dropout qk_norm ramp random_blocks rate rounds
        separator shared_biases span span_penalty steps stride summary tar targets threshold tie_embedding
        tie_projections vocabulary weight_dropout width window window_blocks zoneout
    """
    assert sorted(MODEL_KEYS) == frozen.split()
    assert sorted(READING_KEYS) == ["clamp", "discount", "memory", "pointer", "same_length", "segment", "temperature"]


def test_info_counts(cli: Cli, model: Path) -> None:
    facts = cli("info", model, "--json").json
    assert facts["parameters"] == sum(facts["parts"].values())
    assert facts["state_bytes_per_row"] == 2 * 2 * 40 * 32 * 4 + 8  # keys and values in two layers, and the length
    assert facts["reach"] == 2 * 40 + 15 + 8  # hops end at positions 24 and 8 of their segments: 55 + 48
    assert facts["reading"]["memory"] == 40
    assert facts["has_memory"] is True
    assert cli("info", model).code == 0
    for option in (("--device", "cpu"), ("--dtype", "float64"), ("--threads", 1)):  # they would have no effect
        cli("info", model, *option).refused(option[0])


def test_info_of_an_unbounded_reach(cli: Cli) -> None:
    """It is null in JSON, not `sys.maxsize`."""
    assert cli("init", "--family", "lstm", "--set", "model.width=16", "m").code == 0
    assert cli("info", "m", "--json").json["reach"] is None
    assert "reach                unbounded\n" in cli("info", "m").out


def test_families_are_listed(cli: Cli) -> None:
    assert set(cli("families", "--json").json["families"]) == set(BUILT_IN)
    assert "transformer-xl" in cli("families").out


@pytest.mark.parametrize("verb", ["families", "data list", "data get stdlib"])
@pytest.mark.parametrize("flag", ["--device", "--dtype", "--threads"])
def test_commands_that_compute_nothing_have_no_device_options(cli: Cli, verb: str, flag: str) -> None:
    cli(*verb.split(), flag, "1").refused(flag)


def test_families_and_info_show_which_models_have_a_memory(cli: Cli) -> None:
    shown = cli("families", "--json").json["memory"]
    assert set(shown) == set(BUILT_IN)
    assert (shown["vanilla"], shown["lstm"]) == ("no memory", "memory")
    assert (shown["transformer-xl"], shown["rotary"]) == ("memory, default 128", "memory, default 0")
    assert "no memory " in next(line for line in cli("families").out.splitlines() if line.startswith("vanilla"))
    for name, memory in shown.items():
        if memory.endswith("memory"):
            assert cli("init", "--family", name, "--set", "model.layers=1", "--set", "model.width=32", name).code == 0
            assert cli("info", name, "--json").json["has_memory"] is (memory == "memory")
    assert cli("init", "--set", "reading.memory=0", "--set", "model.layers=1", "none").code == 0
    assert cli("info", "none", "--json").json["has_memory"] is False


def test_a_model_folder_and_its_card(cli: Cli, model: Path) -> None:
    assert {p.name for p in model.iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json", "README.md"}
    assert json.loads((model / "config.json").read_text())["format"] == 2
    cli("init", "m").refused("m")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--family", "transformerxl", "x"], ["'transformerxl'", "'transformer-xl'"]),
        (["--set", "model.wdith=3", "x"], ["'model.wdith'", "'model.width'"]),
        (["--set", "reading.memroy=3", "x"], ["'memroy'", "'memory'"]),
        (["--set", "memory=3", "x"], ["'memory'", "'reading.memory'"]),
        (["--set", "model.memory=3", "x"], ["model.memory=3", "--set reading.memory=3"]),
        (["--set", "reading.memory=-3", "x"], ["memory=-3"]),
        (["--set", "reading.memory=long", "x"], ["reading.memory", "long"]),
        (["--set", "model.memory", "x"], ["'model.memory'", "key=value"]),
        (["--set", "model.layers=two", "x"], ["model.layers", "two"]),
        (["--set", "model.width=17", "--set", "model.heads=2", "x"], ["17", "16 or 18"]),
        (["--set", "model.norm=middle", "x"], ["model.norm", "'middle'"]),
        (["--family", "vanilla", "--set", "reading.memory=3", "x"], ["'memory'", "vanilla"]),
        (["--tokenizer", "none.txt", "x"], ["none.txt"]),
        (["--set", "model=3", "x"], ["model=3", "--set model.layers=6"]),
        (["--set", "reading=3", "x"], ["reading=3", "--set reading.memory=640"]),
        (["--set", "model.width=1000000", "x"], ["GiB", "model.width"]),
        (["--set", "model.width=99999999999999999999", "x"], ["model.width=99999999999999999999"]),
        (["--set", "model.layers=2147483648", "x"], ["model.layers=2147483648"]),
        (["--set", "model.vocabulary=2147483648", "x"], ["model.vocabulary=2147483648"]),
        (["--threads", "-1", "x"], ["--threads -1"]),
        (["--device", "cuda:7", "x"], ["cuda:7"]),
        (["--dtype", "float8", "x"], ["float8"]),
        ([], ["OUT"]),
    ],
)
def test_wrong_use_is_one_line_and_creates_nothing(cli: Cli, args: list[str], words: list[str]) -> None:
    cli("init", *args).refused(*words)
    assert not Path("x").exists()


@pytest.mark.parametrize("name", ["plain", "same_length", "adaptive_div4", "pickled", "pickled_legacy"])
def test_an_imported_model_has_the_losses_of_transformers(cli: Cli, name: str) -> None:
    """`eval` on a text of the fixture's tokens, with its segment."""
    same_as = {"pickled": "adaptive_div4", "pickled_legacy": "tied"}.get(name, name)
    expected = load_file(FIXTURES / same_as / "expected.safetensors")
    count = json.loads((FIXTURES / name / "config.json").read_text())["vocab_size"]
    Path("vocab.txt").write_text("".join(f"word{i}\n" for i in range(count)))
    assert cli("import", FIXTURES / name, "i", "--tokenizer", "vocab.txt").code == 0
    Path("t.txt").write_text(" ".join(f"word{i}" for i in expected["tokens"][0].tolist()))
    result = cli("eval", "i", "--data", "t.txt", "--segment", int(expected["segment"]), "--losses", "l.npy")
    assert result.code == 0, result.err
    np.testing.assert_allclose(np.load("l.npy"), expected["losses"][0].numpy(), atol=1e-5)


@pytest.mark.parametrize("tokens", ["bytes", FIXTURES / "vocabulary" / "cased-vocab.pkl"])
def test_import_refuses_a_vocabulary_of_another_size(cli: Cli, tokens: str | Path) -> None:
    """The fixture has 23 tokens, bytes 256 and the vocabulary 16."""
    cli("import", FIXTURES / "plain", "i", "--tokenizer", tokens).refused("23", "256" if tokens == "bytes" else "16")
    assert not Path("i").exists()


def test_import_with_the_vocabulary_of_transformers(cli: Cli) -> None:
    folder = Path("small")
    settings = json.loads((FIXTURES / "plain" / "config.json").read_text())
    weights = load_file(FIXTURES / "plain" / "model.safetensors")
    small = {name: tensor[:16].clone() if tensor.shape[:1] == (23,) else tensor for name, tensor in weights.items()}
    folder.mkdir()
    save_file(small, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(settings | {"vocab_size": 16}))
    result = cli("import", folder, "i", "--tokenizer", FIXTURES / "vocabulary" / "cased-vocab.pkl")
    assert result.code == 0, result.err
    assert longspan.load("i").tokenizer.encode("The cat").tolist() == [5, 6, 0]


def test_import_of_the_authors_state_dict_and_a_vocabulary(cli: Cli) -> None:
    folder = FIXTURES / "authors"
    expected = load_file(FIXTURES / "adaptive_div4" / "expected.safetensors")
    count = json.loads((folder / "config.json").read_text())["vocab_size"]
    Path("vocab.txt").write_text("".join(f"word{i}\n" for i in range(count)))
    result = cli("import", folder / "model.pt", "a", "--tokenizer", "vocab.txt", "--config", folder / "config.json")
    assert result.code == 0, result.err
    model = longspan.load("a")
    score = model.model.losses(expected["tokens"][:, :8], expected["tokens"][:, 1:9])[0]
    np.testing.assert_allclose(score.detach().numpy(), expected["losses"][:, :8].numpy(), atol=1e-5)
    Path("short.txt").write_text("a\nb\n")
    cli("import", folder / "model.pt", "b", "--tokenizer", "short.txt", "--config", folder / "config.json").refused(
        "short.txt"
    )
    cli("import", folder / "model.pt", "b", "--tokenizer", "vocab.txt").refused("model.pt", "config")
    for more in ([], ["--tokenizer", "bytes"]):
        cli("import", "nowhere", "b", *more).refused("nowhere")
        Path("empty").mkdir(exist_ok=True)
        cli("import", "empty", "b", *more).refused("empty", "save_pretrained")
        Path("other").mkdir(exist_ok=True)
        Path("other/config.json").write_text('{"model_type": "llama"}')
        cli("import", "other", "b", *more).refused("llama", "gpt2")
    assert not Path("b").exists()


def test_a_broken_pipe_is_ignored_only_if_it_is_standard_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dead helper process also breaks a pipe, which must not end a run without an error, as `| head` does."""

    def broken(_: list[str]) -> int:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(main, "_invoke", broken)
    read, write = os.pipe()
    with os.fdopen(write, "w") as out, os.fdopen(read) as reader:
        monkeypatch.setattr(sys, "stdout", out)
        with pytest.raises(BrokenPipeError):
            main.run(["recipes"])
        reader.close()
        assert main.run(["recipes"]) == 0
        print("to nobody", file=out, flush=True)


def test_help_takes_less_than_a_second() -> None:
    """Of CPU time, the best of three, because the machine may be busy."""
    seconds = []
    for _ in range(3):
        before = cpu_seconds_of_children()
        done = subprocess.run([sys.executable, "-m", "longspan.cli.main", "--help"], capture_output=True, check=True)
        seconds.append(cpu_seconds_of_children() - before)
        assert done.returncode == 0
    assert min(seconds) < 1
    program = "import longspan.cli.main, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_short_commands_do_not_import_the_compiler() -> None:
    """torch._dynamo takes as long to import as torch itself."""
    program = "import sys\nfrom longspan.cli.main import run\n"
    for line in ("info", "recipes", "generate -p a -n 3"):
        program += f"assert run({line.split()}) == 0\n"
        program += f"assert 'torch' in sys.modules and 'torch._dynamo' not in sys.modules, {line!r}\n"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def cpu_seconds_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def test_an_unknown_command_names_the_known_ones(cli: Cli) -> None:
    cli("download").refused("'download'", "generate", "train")
    cli("tarin").refused("'tarin'", "'train'")
    cli("data", "fetch").refused("'fetch'", "get", "list")


def test_the_former_name_of_the_tokenizer_option_still_works(cli: Cli) -> None:
    small = ["--set", "model.layers=1", "--set", "model.width=16", "--set", "model.vocabulary=70"]
    assert cli("init", "--tokens", "characters", *small, "a").code == 0
    assert cli("init", "--tokenizer", "characters", *small, "b").code == 0
    assert [cli("info", name, "--json").json["tokenizer"] for name in "ab"] == ["characters"] * 2
    assert "--tokens" not in cli("init", "--help").out
    cli("import", FIXTURES / "plain", "i").refused("--tokenizer")
