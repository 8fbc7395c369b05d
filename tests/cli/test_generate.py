"""`longspan generate`: prompts, seeds, saved states, and what it refuses."""

import io
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import longspan
from longspan.checkpoints.model_folder import load_model, save_model

from .conftest import Cli


def test_the_seed_determines_the_text(cli: Cli, model: Path) -> None:
    a, b = (cli("generate", model, "-p", "It was", "-n", 30, "--seed", 3) for _ in range(2))
    c = cli("generate", model, "-p", "It was", "-n", 30, "--seed", 4)
    assert a.code == 0
    assert a.out.startswith("It was")
    assert a.out == b.out != c.out
    assert longspan.load(model).generate("It was", 30, seed=3) == a.out.removeprefix("It was").removesuffix("\n")


def test_a_prompt_from_a_file_standard_input_or_an_option(
    cli: Cli, model: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt is longer than the memory."""
    from_file = cli("generate", model, "--prompt-file", text, "-n", 20, "--temp", 0)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.read_bytes())))
    from_stdin = cli("generate", model, "-", "-n", 20, "--temp", 0)
    assert from_file.code == 0
    assert from_file.out == from_stdin.out == cli("generate", model, "-p", text.read_text(), "-n", 20, "--temp", 0).out
    assert cli("generate", model, "-n", 5).code == 0


def test_a_prompt_beyond_the_limit_is_refused(cli: Cli, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same limit for an endless device, a file and standard input; a pipe that ends is read."""
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
def test_a_saved_state_continues(cli: Cli, family: str) -> None:
    sets = ["--set", "model.layers=1", "--set", "model.width=32", "--set", "reading.segment=8"]
    assert cli("init", "--family", family, *sets, "g").code == 0
    uncut = cli("generate", "g", "-p", "abc", "-n", 40, "--temp", 0).out
    first = cli("generate", "g", "-p", "abc", "-n", 25, "--temp", 0, "--save-state", "s.state").out
    second = cli("generate", "g", "-n", 15, "--temp", 0, "--load-state", "s.state").out
    model = longspan.load("g")
    assert model.generate("abc", 40, temperature=0.0) == uncut.removeprefix("abc").removesuffix("\n")
    assert len(first) >= 28
    # Invalid UTF-8 is shown as replacement characters, so the parts are compared by their length.
    assert len(uncut) >= len(second)


def test_a_state_is_refused_by_another_model(cli: Cli, model: Path) -> None:
    cli("generate", model, "-p", "abc", "-n", 5, "--save-state", "s.state")
    cli("init", "--set", "model.layers=1", "--seed", 9, "other")
    cli("generate", "other", "-n", 5, "--load-state", "s.state").refused("s.state")
    Path("broken.state").write_bytes(Path("s.state").read_bytes()[:-7])
    cli("generate", model, "-n", 5, "--load-state", "broken.state").refused("broken.state")
    cli("generate", model, "-n", 5, "--load-state", "none.state").refused("none.state")


def test_options_change_the_reading(cli: Cli, model: Path) -> None:
    line = ["generate", model, "-p", "It was late. " * 9, "-n", 5]
    flags = ["--memory", 5, "--segment", 3, "--clamp", 2, "--same-length"]
    assert cli(*line, *flags, "--save-state", "s.state").code == 0
    loaded = longspan.load(model)
    expected = loaded.reading_with(memory=5, segment=3, clamp=2, same_length=True)
    assert loaded.session(state="s.state").decoder.state().reading == expected != loaded.reading
    cli(*line, "--pointer", 7).refused("pointer")
    cli(*line, "--load-state", "s.state", "--memory", 9).refused("memory", "s.state")
    assert cli("generate", model, "-n", 3, "--load-state", "s.state").code == 0


def test_an_error_after_some_text_starts_a_line(cli: Cli, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> Iterator[str]:
        yield " and"
        raise KeyboardInterrupt

    monkeypatch.setattr(longspan.TextModel, "stream", interrupted)
    result = cli("generate", model, "-p", "It was", "--save-state", "s.state")
    assert (result.code, result.out, result.err) == (130, "It was and\n", "longspan: interrupted\n")
    assert Path("s.state").is_file()


def test_errors_are_one_line_and_name_the_value(cli: Cli, model: Path, text: Path) -> None:
    cli("generate", model, "--temp", -1).refused("temperature=-1")
    cli("generate", model, "--temp", "hot").refused("--temp hot")
    cli("generate", model, "--top-k=many").refused("--top-k=many")
    cli("generate", model, "--top-p", 0).refused("top_p=0")
    cli("generate", model, "--min-p", 2).refused("min_p=2")
    cli("generate", model, "--top-k", -1).refused("top_k=-1")
    cli("generate", model, "-n", -1).refused("-n -1")
    cli("generate", model, "-p", "a", "--prompt-file", text).refused("-p", "--prompt-file")
    cli("generate", model, "--prompt-file", "none.txt").refused("none.txt")
    cli("generate", model, "words").refused("words")
    cli("generate", "nowhere", "-p", "a").refused("nowhere")


def test_characters_outside_the_vocabulary_are_refused(cli: Cli) -> None:
    cli("init", "--tokenizer", "characters", "--set", "model.vocabulary=128", "--set", "model.layers=1", "ascii")
    assert cli("generate", "ascii", "-p", "plain", "-n", 5).code == 0
    cli("generate", "ascii", "-p", "naïve", "-n", 5).refused("ï")
    Path("latin.txt").write_bytes("naïve".encode("latin-1"))
    cli("eval", "ascii", "--data", "latin.txt").refused("UTF-8")


@pytest.mark.slow
def test_closed_and_ascii_standard_streams(model: Path) -> None:
    """In a shell: standard output closed, standard input closed, ASCII output, a reader that exits early."""
    program = f"{sys.executable} -m longspan.cli.main"
    for line, code in [
        (f"{program} generate {model} -p a -n 3 >&-", 0),
        (f"{program} generate {model} - -n 3 <&-", 2),
        (
            f"PYTHONIOENCODING=ascii {program} generate {model} -p é -n 400 --save-state piped.state"
            " | head -c 4; exit ${PIPESTATUS[0]}",
            0,
        ),
    ]:
        done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, errors="replace", check=False)
        assert done.returncode == code, (line, done.stderr)
        assert "Traceback" not in done.stderr, (line, done.stderr)
    assert Path("piped.state").is_file()


def test_a_state_keeps_the_generator_and_incomplete_characters(cli: Cli, model: Path) -> None:
    """Two calls give the text of one: same random numbers, and a character cut in half is not lost."""
    uncut = cli("generate", model, "-p", "é", "-n", 60, "--seed", 5).out
    first = cli("generate", model, "-p", "é", "-n", 23, "--seed", 5, "--save-state", "s.state").out
    second = cli("generate", model, "-n", 37, "--load-state", "s.state").out
    assert first.removesuffix("\n") + second == uncut
    reseeded = cli("generate", model, "-n", 37, "--load-state", "s.state", "--seed", 6).out
    assert reseeded != second


def test_a_prompt_that_ends_in_half_a_character(cli: Cli, model: Path) -> None:
    Path("half.txt").write_bytes(b"x\xc3")
    out = cli("generate", model, "--prompt-file", "half.txt", "-n", 0).out
    assert out in ("x\n", "x\ufffd\n")


def test_words_are_separated(cli: Cli) -> None:
    Path("vocab.txt").write_text("<eos>\nthe\na\ncat\n<unk>\n")
    small = ["--set", "model.vocabulary=5", "--set", "model.layers=1", "--set", "model.width=16"]
    assert cli("init", "--tokenizer", "vocab.txt", *small, "w").code == 0
    assert cli("generate", "w", "-p", "the cat", "-n", 4).out.startswith("the cat ")


@pytest.mark.parametrize("temperature", ["1e-46", "1e-300", "5e-324"])
def test_the_smallest_temperatures(cli: Cli, model: Path, temperature: str) -> None:
    greedy = cli("generate", model, "-p", "a", "-n", 5, "--temp", 0)
    assert cli("generate", model, "-p", "a", "-n", 5, "--temp", temperature).out == greedy.out


def test_a_window_of_no_tokens_can_be_saved(cli: Cli) -> None:
    cli("init", "--family", "vanilla", "--set", "model.layers=1", "--set", "model.width=16", "v")
    assert cli("generate", "v", "-p", "a", "-n", 0, "--save-state", "v.state").code == 0
    assert cli("generate", "v", "-n", 2, "--load-state", "v.state").code == 0


@pytest.mark.parametrize("temperature", [0, 1])
def test_non_finite_weights_are_refused(cli: Cli, model: Path, temperature: float) -> None:
    """A state that was saved before is not replaced by a damaged one."""
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
