"""`init`, `info`, `families`, `import`, help; and the list of keys, frozen."""

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
from longspan.cli.keys import MODEL_KEYS
from longspan.config import keys
from longspan.models.families import FAMILIES

from .conftest import Cli

FIXTURES = Path(__file__).parents[1] / "parity" / "fixtures"


def test_the_keys_are_those_of_the_families_and_help_lists_them(cli: Cli) -> None:
    known = {key for family in FAMILIES.values() for key in keys(family.Config)}
    assert set(MODEL_KEYS) == known
    shown = cli("init", "--help").out
    assert all(f"model.{key}" in shown for key in known)


def test_the_list_of_keys_is_frozen() -> None:
    """A key is a promise: adding one is a decision, and this line is where it is taken."""
    promised = """
        activation ar attention_dropout biases block buckets causal chunk clamp compressed compression convolution copy
        copy_width cutoffs dilation div_val dropout embedding_dropout embedding_width factorised final_norm
        global_blocks global_tokens head_width heads hidden_dropout inner input_dropout layer_losses layers max_distance
        memory norm norm_type output_dropout pattern pieces ponder position projection_dropout qk_norm ramp
        random_blocks rate rounds same_length segment shared_biases span span_penalty steps stride summary tar targets
        threshold tie_embedding tie_projections vocabulary weight_dropout width window window_blocks zoneout
    """
    assert sorted(MODEL_KEYS) == promised.split()


def test_info_counts(cli: Cli, model: Path) -> None:
    facts = cli("info", model, "--json").json
    assert facts["parameters"] == sum(facts["parts"].values())
    assert facts["state_bytes_per_row"] == 2 * 2 * 40 * 32 * 4
    assert facts["reach"] == 2 * 40 + 15 + 8  # hops end at positions 24 and 8 of their segments: 55 + 48
    assert facts["config"]["memory"] == 40
    assert facts["has_memory"] is True
    assert cli("info", model).code == 0


def test_info_of_a_reach_without_bound(cli: Cli) -> None:
    """Not the largest number of this machine: null, and in words."""
    assert cli("init", "--family", "lstm", "--set", "model.width=16", "m").code == 0
    assert cli("info", "m", "--json").json["reach"] is None
    assert "reach                no bound\n" in cli("info", "m").out


def test_families_lists_them(cli: Cli) -> None:
    assert set(cli("families", "--json").json["families"]) == set(FAMILIES)
    assert "transformer-xl" in cli("families").out


@pytest.mark.parametrize("verb", ["families", "data list", "data get stdlib"])
@pytest.mark.parametrize("flag", ["--device", "--dtype", "--threads"])
def test_verbs_that_compute_nothing_take_no_device(cli: Cli, verb: str, flag: str) -> None:
    cli(*verb.split(), flag, "1").refused(flag)


def test_families_and_info_say_who_has_a_memory(cli: Cli) -> None:
    said = cli("families", "--json").json["memory"]
    assert set(said) == set(FAMILIES)
    assert (said["vanilla"], said["lstm"]) == ("no memory", "memory")
    assert (said["transformer-xl"], said["rotary"]) == ("model.memory, 128 unless set", "model.memory, 0 unless set")
    assert "no memory " in next(line for line in cli("families").out.splitlines() if line.startswith("vanilla"))
    for name, word in said.items():
        if word.endswith("memory"):
            assert cli("init", "--family", name, "--set", "model.layers=1", "--set", "model.width=32", name).code == 0
            assert cli("info", name, "--json").json["has_memory"] is (word == "memory")
    assert cli("init", "--set", "model.memory=0", "--set", "model.layers=1", "none").code == 0
    assert cli("info", "none", "--json").json["has_memory"] is False


def test_a_model_folder_and_its_card(cli: Cli, model: Path) -> None:
    assert {p.name for p in model.iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json", "README.md"}
    assert json.loads((model / "config.json").read_text())["format"] == 1
    cli("init", "m").refused("m")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--family", "transformerxl", "x"], ["did you mean 'transformer-xl'"]),
        (["--set", "model.memroy=3", "x"], ["did you mean 'model.memory'"]),
        (["--set", "memory=3", "x"], ["model.memory"]),
        (["--set", "model.memory", "x"], ["key=value"]),
        (["--set", "model.layers=two", "x"], ["model.layers", "whole number"]),
        (["--set", "model.width=17", "--set", "model.heads=2", "x"], ["17", "16 or 18"]),
        (["--set", "model.norm=middle", "x"], ["model.norm"]),
        (["--family", "vanilla", "--set", "model.memory=3", "x"], ["model.memory"]),
        (["--tokens", "none.txt", "x"], ["none.txt"]),
        (["--set", "model=3", "x"], ["--set model.memory=640"]),
        (["--set", "model.width=1000000", "x"], ["make it smaller"]),
        (["--set", "model.width=99999999999999999999", "x"], ["model.width"]),
        (["--set", "model.layers=2147483648", "x"], ["model.layers"]),
        (["--set", "model.vocabulary=2147483648", "x"], ["model.vocabulary"]),
        (["--threads", "-1", "x"], ["--threads"]),
        (["--device", "cuda:7", "x"], ["cuda:7"]),
        (["--dtype", "float8", "x"], ["float8"]),
        ([], ["OUT"]),
    ],
)
def test_wrong_use_is_one_sentence_and_leaves_nothing(cli: Cli, args: list[str], words: list[str]) -> None:
    cli("init", *args).refused(*words)
    assert not Path("x").exists()


@pytest.mark.parametrize("name", ["plain", "same_length", "adaptive_div4", "pickled", "pickled_legacy"])
def test_import_and_score_as_the_package_does(cli: Cli, name: str) -> None:
    """Through the command line: a text of the fixture's tokens, in the segments it was made with."""
    same_as = {"pickled": "adaptive_div4", "pickled_legacy": "tied"}.get(name, name)
    expected = load_file(FIXTURES / same_as / "expected.safetensors")
    count = json.loads((FIXTURES / name / "config.json").read_text())["vocab_size"]
    Path("vocab.txt").write_text("".join(f"word{i}\n" for i in range(count)))
    assert cli("import", FIXTURES / name, "i", "--tokens", "vocab.txt").code == 0
    Path("t.txt").write_text(" ".join(f"word{i}" for i in expected["tokens"][0].tolist()))
    result = cli("eval", "i", "--data", "t.txt", "--segment", int(expected["segment"]), "--losses", "l.npy")
    assert result.code == 0, result.err
    np.testing.assert_allclose(np.load("l.npy"), expected["losses"][0].numpy(), atol=1e-5)


@pytest.mark.parametrize("tokens", ["bytes", FIXTURES / "vocabulary" / "cased-vocab.pkl"])
def test_import_refuses_a_vocabulary_of_another_size(cli: Cli, tokens: str | Path) -> None:
    """The fixture has 23 tokens, bytes 256 and the vocabulary 16."""
    cli("import", FIXTURES / "plain", "i", "--tokens", tokens).refused("23", "256" if tokens == "bytes" else "16")
    assert not Path("i").exists()


def test_import_with_the_vocabulary_of_transformers(cli: Cli) -> None:
    folder = Path("small")
    settings = json.loads((FIXTURES / "plain" / "config.json").read_text())
    weights = load_file(FIXTURES / "plain" / "model.safetensors")
    small = {name: tensor[:16].clone() if tensor.shape[:1] == (23,) else tensor for name, tensor in weights.items()}
    folder.mkdir()
    save_file(small, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(settings | {"vocab_size": 16}))
    result = cli("import", folder, "i", "--tokens", FIXTURES / "vocabulary" / "cased-vocab.pkl")
    assert result.code == 0, result.err
    assert longspan.load("i").tokenizer.encode("The cat").tolist() == [5, 6, 0]


def test_import_of_the_authors_state_dict_and_a_vocabulary(cli: Cli) -> None:
    folder = FIXTURES / "authors"
    expected = load_file(FIXTURES / "adaptive_div4" / "expected.safetensors")
    count = json.loads((folder / "config.json").read_text())["vocab_size"]
    Path("vocab.txt").write_text("".join(f"word{i}\n" for i in range(count)))
    result = cli("import", folder / "model.pt", "a", "--tokens", "vocab.txt", "--config", folder / "config.json")
    assert result.code == 0, result.err
    model = longspan.load("a")
    score = model.model.losses(expected["tokens"][:, :8], expected["tokens"][:, 1:9])[0]
    np.testing.assert_allclose(score.detach().numpy(), expected["losses"][:, :8].numpy(), atol=1e-5)
    Path("short.txt").write_text("a\nb\n")
    cli("import", folder / "model.pt", "b", "--tokens", "short.txt", "--config", folder / "config.json").refused(
        "short.txt"
    )
    cli("import", folder / "model.pt", "b", "--tokens", "vocab.txt").refused("--config")
    cli("import", "nowhere", "b", "--tokens", "bytes").refused("nowhere")
    assert not Path("b").exists()


def test_only_a_reader_that_left_is_nothing_to_speak_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """A helper process that is gone breaks a pipe as `| head` does, and must not end a run in silence."""

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


def test_help_answers_within_a_second() -> None:
    """In seconds of processor time, best of three: the machine may be busy, the imports may not."""
    seconds = []
    for _ in range(3):
        began = spent_by_children()
        done = subprocess.run([sys.executable, "-m", "longspan.cli.main", "--help"], capture_output=True, check=True)
        seconds.append(spent_by_children() - began)
        assert done.returncode == 0
    assert min(seconds) < 1
    program = "import longspan.cli.main, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("line", ["info", "recipes", "generate -p a -n 3"])
def test_a_question_does_not_wait_for_a_compiler(line: str) -> None:
    """torch's takes as long to load as torch itself, and nothing is compiled here."""
    program = f"import sys\nfrom longspan.cli.main import run\nassert run({line.split()}) == 0\n"
    program += "assert 'torch' in sys.modules and 'torch._dynamo' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)


def spent_by_children() -> float:
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime
