import io
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import longspan
from longspan.checkpoints.model_folder import load_model, save_model

from .conftest import Cli


def test_same_seed_same_text(cli: Cli, model: Path) -> None:
    a, b = (cli("generate", model, "-p", "It was", "-n", 30, "--seed", 3) for _ in range(2))
    c = cli("generate", model, "-p", "It was", "-n", 30, "--seed", 4)
    assert a.code == 0
    assert a.out.startswith("It was")
    assert a.out == b.out != c.out
    assert longspan.load(model).generate("It was", 30, seed=3) == a.out.removeprefix("It was").removesuffix("\n")


def test_prompts_from_anywhere(cli: Cli, model: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than the memory; from a file, from standard input, from the command line."""
    from_file = cli("generate", model, "--prompt-file", text, "-n", 20, "--temp", 0)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.read_bytes())))
    from_stdin = cli("generate", model, "-", "-n", 20, "--temp", 0)
    assert from_file.code == 0
    assert from_file.out == from_stdin.out == cli("generate", model, "-p", text.read_text(), "-n", 20, "--temp", 0).out
    assert cli("generate", model, "-n", 5).code == 0


def test_a_prompt_that_never_ends_is_refused(cli: Cli, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same limit for a device, a file and standard input; a pipe that ends is read."""
    limit = resource.getrlimit(resource.RLIMIT_AS)
    monkeypatch.setattr("longspan.cli.generate.PROMPT_BYTES", 100)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (_address_space() + (1 << 30), limit[1]))
        cli("generate", model, "--prompt-file", "/dev/zero", "-n", 1).refused("/dev/zero", "100")
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limit)
    Path("long").write_bytes(b"a" * 101)
    cli("generate", model, "--prompt-file", "long", "-n", 1).refused("long", "100 ")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a" * 101)))
    cli("generate", model, "-", "-n", 1).refused("100 ")
    Path("long").write_bytes(b"a" * 100)
    assert cli("generate", model, "--prompt-file", "long", "-n", 1).code == 0
    read, write = os.pipe()
    os.write(write, b"abc")
    os.close(write)
    assert cli("generate", model, "--prompt-file", f"/dev/fd/{read}", "-n", 1).out.startswith("abc")
    os.close(read)


def _address_space() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    return pages * resource.getpagesize()


@pytest.mark.parametrize("family", ["transformer-xl", "vanilla"])
def test_a_saved_state_goes_on(cli: Cli, family: str) -> None:
    cli(
        "init",
        "--family",
        family,
        "--set",
        "model.layers=1",
        "--set",
        "model.width=32",
        "--set",
        "model.segment=8",
        "g",
    )
    whole = cli("generate", "g", "-p", "abc", "-n", 40, "--temp", 0).out
    first = cli("generate", "g", "-p", "abc", "-n", 25, "--temp", 0, "--save-state", "s.state").out
    second = cli("generate", "g", "-n", 15, "--temp", 0, "--load-state", "s.state").out
    model = longspan.load("g")
    assert model.generate("abc", 40, temperature=0.0) == whole.removeprefix("abc").removesuffix("\n")
    assert len(first) >= 28
    # Bytes that make no UTF-8 are shown as replacement characters, so the pieces are compared by their length.
    assert len(whole) >= len(second)


def test_a_state_is_refused_by_another_model(cli: Cli, model: Path) -> None:
    cli("generate", model, "-p", "abc", "-n", 5, "--save-state", "s.state")
    cli("init", "--set", "model.layers=1", "--seed", 9, "other")
    cli("generate", "other", "-n", 5, "--load-state", "s.state").refused("s.state")
    Path("broken.state").write_bytes(Path("s.state").read_bytes()[:-7])
    cli("generate", model, "-n", 5, "--load-state", "broken.state").refused("broken.state")
    cli("generate", model, "-n", 5, "--load-state", "none.state").refused("none.state")


def test_wrong_use_is_one_sentence(cli: Cli, model: Path, text: Path) -> None:
    cli("generate", model, "--temp", -1).refused("--temp")
    cli("generate", model, "--temp", "hot").refused("--temp")
    cli("generate", model, "--top-p", 0).refused("--top-p")
    cli("generate", model, "--min-p", 2).refused("--min-p")
    cli("generate", model, "--top-k", -1).refused("--top-k")
    cli("generate", model, "-n", -1).refused("-n")
    cli("generate", model, "-p", "a", "--prompt-file", text).refused("twice")
    cli("generate", model, "--prompt-file", "none.txt").refused("none.txt")
    cli("generate", model, "words").refused("words")
    cli("generate", "nowhere", "-p", "a").refused("nowhere")


def test_characters_a_model_does_not_know(cli: Cli) -> None:
    cli("init", "--tokens", "characters", "--set", "model.vocabulary=128", "--set", "model.layers=1", "ascii")
    assert cli("generate", "ascii", "-p", "plain", "-n", 5).code == 0
    cli("generate", "ascii", "-p", "naïve", "-n", 5).refused("ï")
    Path("latin.txt").write_bytes("naïve".encode("latin-1"))
    cli("eval", "ascii", "--data", "latin.txt").refused("UTF-8")


@pytest.mark.slow
def test_streams_that_are_closed_or_narrow(model: Path) -> None:
    """As a shell would: standard output closed, standard input closed, a terminal of ASCII, a reader that leaves."""
    program = f"{sys.executable} -m longspan.cli.main"
    for line, code in [
        (f"{program} info {model} >&-", 0),
        (f"{program} generate {model} -p a -n 3 >&-", 0),
        (f"{program} generate {model} - -n 3 <&-", 2),
        (f"PYTHONIOENCODING=ascii {program} generate {model} -p é -n 5", 0),
        (f"{program} generate {model} -p abc -n 400 --save-state piped.state | head -c 4; exit ${{PIPESTATUS[0]}}", 0),
    ]:
        done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, errors="replace", check=False)
        assert done.returncode == code, (line, done.stderr)
        assert "Traceback" not in done.stderr, (line, done.stderr)
    assert Path("piped.state").is_file()


def test_a_state_keeps_the_draws_and_the_bytes_held_back(cli: Cli, model: Path) -> None:
    """In two pieces what is written in one: same draws, and a character cut in half is not lost."""
    whole = cli("generate", model, "-p", "é", "-n", 60, "--seed", 5).out
    first = cli("generate", model, "-p", "é", "-n", 23, "--seed", 5, "--save-state", "s.state").out
    second = cli("generate", model, "-n", 37, "--load-state", "s.state").out
    assert first.removesuffix("\n") + second == whole
    anew = cli("generate", model, "-n", 37, "--load-state", "s.state", "--seed", 6).out
    assert anew != second


def test_a_prompt_that_ends_in_half_a_character(cli: Cli, model: Path) -> None:
    Path("half.txt").write_bytes(b"x\xc3")
    out = cli("generate", model, "--prompt-file", "half.txt", "-n", 0).out
    assert out in ("x\n", "x\ufffd\n")


def test_words_are_kept_apart(cli: Cli) -> None:
    Path("vocab.txt").write_text("<eos>\nthe\na\ncat\n<unk>\n")
    small = ["--set", "model.vocabulary=5", "--set", "model.layers=1", "--set", "model.width=16"]
    assert cli("init", "--tokens", "vocab.txt", *small, "w").code == 0
    assert cli("generate", "w", "-p", "the cat", "-n", 4).out.startswith("the cat ")


@pytest.mark.parametrize("temperature", ["1e-46", "1e-300", "5e-324"])
def test_the_smallest_temperatures(cli: Cli, model: Path, temperature: str) -> None:
    greedy = cli("generate", model, "-p", "a", "-n", 5, "--temp", 0)
    assert cli("generate", model, "-p", "a", "-n", 5, "--temp", temperature).out == greedy.out


def test_an_empty_window_can_be_saved(cli: Cli) -> None:
    cli("init", "--family", "vanilla", "--set", "model.layers=1", "--set", "model.width=16", "v")
    assert cli("generate", "v", "-p", "a", "-n", 0, "--save-state", "v.state").code == 0
    assert cli("generate", "v", "-n", 2, "--load-state", "v.state").code == 0


@pytest.mark.parametrize("temperature", [0, 1])
def test_weights_that_are_not_finite(cli: Cli, model: Path, temperature: float) -> None:
    """One sentence, and a state that was saved before is not replaced by one that is damaged."""
    cli("generate", model, "-p", "a", "-n", 3, "--save-state", "s.state")
    before = Path("s.state").read_bytes()
    loaded = load_model(model)
    with torch.no_grad():
        for weight in loaded.model.parameters():
            weight.fill_(float("nan"))
    save_model(Path("nan"), loaded.model, loaded.tokenizer)
    done = cli("generate", "nan", "-p", "a", "-n", 3, "--temp", temperature, "--save-state", "s.state")
    done.refused("token 1", "float32")
    assert Path("s.state").read_bytes() == before
