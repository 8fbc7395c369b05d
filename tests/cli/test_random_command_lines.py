"""Random command lines exit with 0, or with 2 and one line of error; never with a traceback."""

import io
import os
import random
import shutil
import typing
from pathlib import Path

import pytest

from longspan.config import keys
from longspan.models.families import BUILT_IN, family
from longspan.training.recipe import SECTIONS

from .conftest import Cli

VERBS = [
    "init",
    "info",
    "families",
    "import",
    "export",
    "eval",
    "generate",
    "data",
    "recipes",
    "train",
    "recl",
    "figures",
    "report",
    "",
    "evla",
    "--help",
]
WORDS = ["m", "v", "text.txt", "empty.txt", "folder", "broken", "nowhere", "-", "", "..", "/", "\x01", "ünï", "x" * 300]
WORDS += ["stdlib", "enwik8", "list", "get", "--", "a\nb", "tiny", "/dev/null", "m/config.json", "saved.state"]
NUMBERS = ["0", "1", "7", "-1", "3.5", "1e3", "nan", "inf", "", "999", "-0", "0x10", "true", "１", str(2**70)]
KEYS = ["layers", "width", "heads", "memory", "clamp", "same_length", "norm", "cutoffs", "div_val", "dropout", "widht"]
VALUES = [
    "1",
    "8",
    "0",
    "-3",
    "true",
    "pre",
    "[3,5]",
    "[",
    "",
    "0.5",
    "nan",
    '"x"',
    "{a=1}",
    "1979-05-27",
    "shaw",
    "=",
    "." * 9,
]
FLAGS = {
    verb: flags.split()
    for verb, flags in {
        "eval": "--data --split --segment --memory --clamp --same-length --no-same-length --sliding --no-sliding"
        " --streams --losses",
        "generate": "-p --prompt-file -n --temp --top-k --top-p --min-p --seed --save-state --load-state",
        "init": "--family --set --tokenizer --seed",
        "import": "--tokenizer --config",
        "export": "--dtype --notes --set",
        "info": "--json",
        "families": "--json",
        "data": "--from --json",
        "recl": "--data --contexts --r --targets --threshold --losses --json",
        "figures": "--data --out --split --memory --tokens",
        "report": "--out",
        "train": "--recipe --data --set --print-config --seed --resume",
    }.items()
}
COMMON = ["--device", "--dtype", "--threads", "--help", "--version", "--nonsense"]
SWITCHES = {
    "--json",
    "--sliding",
    "--no-sliding",
    "--same-length",
    "--no-same-length",
    "--help",
    "--version",
    "--print-config",
}


def value(flag: str, draw: random.Random) -> str:
    if flag == "--set":
        prefix = draw.choice(["model.", "model.", "reading.", "", "training.", ".", "model.model."])
        return f"{prefix}{draw.choice(KEYS)}{draw.choice(['=', '=', '=', ''])}{draw.choice(VALUES)}"
    if flag == "--data":
        return draw.choice(["text.txt", "text.txt", *WORDS]).replace("stdlib", "text.txt")
    if flag == "--contexts":
        return draw.choice(["5:20:5", "10:5:1", "0:3:1", "1:2", "a:b:c", "5", ""])
    if flag in ("--losses", "--save-state", "--out"):
        return draw.choice(["out.bin", "no/where.npy", "folder", ""])
    if flag == "-n":
        return draw.choice(["0", "1", "7", "-1", "x"])
    if flag == "--threads":
        return draw.choice(["0", "1", "-1", "x"])
    return draw.choice(
        draw.choice([WORDS, NUMBERS, ["cpu", "cuda", "auto", "bytes", "float32", "vanilla", "transformer-xl"]])
    )


def command_line(draw: random.Random) -> list[str]:
    verb = draw.choice(VERBS)
    line = [verb] if verb else []
    line += [draw.choice(["m", "m", *WORDS]) for _ in range(draw.choice([0, 1, 1, 1, 2, 3]))]
    flags = FLAGS.get(verb, []) + COMMON
    if verb == "eval" and draw.random() < 0.8:
        line += ["--data", "text.txt"]
    if verb == "generate":
        line += ["-n", "3"]
    for flag in draw.choices(flags, k=draw.choice([0, 1, 1, 2, 3, 5])):
        line += [flag] if flag in SWITCHES else [flag, value(flag, draw)]
    if verb == "train":
        line += ["--print-config"]
    if draw.random() < 0.1:
        draw.shuffle(line)
    return line


@pytest.fixture
def place(cli: Cli, model: Path, text: Path, tmp_path: Path) -> Path:
    """A folder with valid and broken files. The text is short, so that valid command lines are fast."""
    text.write_bytes(text.read_bytes()[:90])
    Path("empty.txt").write_bytes(b"")
    Path("folder").mkdir()
    shutil.copytree("m", "broken")
    Path("broken/model.safetensors").write_bytes(b"not weights")
    cli("init", "--family", "vanilla", "--set", "model.layers=1", "--set", "model.width=8", "v")
    cli("generate", "m", "-n", 2, "--save-state", "saved.state")
    return tmp_path


def first_seeds(count: int) -> list[int]:
    return list(range(0, count, 250))


@pytest.mark.parametrize("first", [0, *(pytest.param(n, marks=pytest.mark.torture) for n in first_seeds(2000)[1:])])
def test_no_command_line_ends_in_a_traceback(
    cli: Cli, place: Path, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"")))
    kept = {p.name for p in place.iterdir()}
    for seed in range(first, first + 250):
        line = command_line(random.Random(seed))
        result = cli(*line)
        assert result.code in (0, 2), (line, result)
        assert "Traceback" not in result.out + result.err, line
        if result.code == 2:
            assert result.err.startswith("longspan: "), (line, result.err)
            assert result.err.count("\n") == 1, (line, result.err)
            made = {p.name for p in place.iterdir()} - kept
            half = {name for name in made if name.startswith(".")}
            assert not half, (line, half)
        for path in place.iterdir():
            if path.name not in kept:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def key_types() -> dict[str, str]:
    """Every key of a recipe with its type."""
    tables = [(name, cls) for name, cls in SECTIONS.items() if name != "expected"]
    tables += [("model", family(name).Config) for name in BUILT_IN]
    return {f"{name}.{key}": str(typing.get_type_hints(cls)[key]) for name, cls in tables for key in keys(cls)}


def setting(key: str, hint: str, draw: random.Random) -> str:
    """A value that is often valid: of the type of the key, small, and for schedules one that changes."""
    if draw.random() < 0.07:
        return f"{key}={draw.choice(VALUES)}"
    if "Literal" in hint:
        return f"{key}={draw.choice(hint.partition('Literal[')[2].partition(']')[0].split(', '))}"
    if "tuple[tuple" in hint and draw.random() < 0.6:
        return f"{key}={draw.choice(['[[0,2],[1,4]]', '[[0,8],[1,3]]', '[[0,16],[2,8]]', '[[0,1],[1,0]]'])}"
    kinds = {"bool": ["true", "false"], "tuple[float": ["[0.9,0.5]", "[0,0]"], "int": ["0", "1", "2", "4", "16", "-1"]}
    kinds |= {"float": ["0", "0.1", "0.99", "1e-4", "2"], "": ["bytes", "words", "characters", "x"]}
    if key in ("data.valid", "data.test"):
        return f"{key}={draw.choice(['held.txt', 'held.txt', 'text.txt', 'x'])}"
    return f"{key}={draw.choice(next(values for kind, values in kinds.items() if kind in hint))}"


def test_no_training_run_ends_in_a_traceback(cli: Cli, tmp_path: Path) -> None:
    """Runs of three steps with random settings are refused before anything is written, or finish and can be resumed."""
    Path("text.txt").write_bytes(b"It was a dark and stormy night; the rain fell.\n" * 30)
    Path("held.txt").write_bytes(b"It was a bright and quiet day; the sun shone.\n" * 5)
    known = key_types()
    del known["training.compile"]  # torch.compile cannot trace the shape checks of these tests
    small = ["model.layers=1", "model.width=16", "model.heads=2", "model.inner=16"]
    small += [
        "training.segment=8",
        "training.batch=2",
        "training.steps=3",
        "training.save_every=2",
        "training.validate_every=2",
    ]
    finished = 0
    for seed in range(300 if os.environ.get("LONGSPAN_TORTURE") else 28):
        draw = random.Random(seed)
        chosen = [setting(key, known[key], draw) for key in draw.choices(sorted(known), k=draw.choice([1, 1, 2, 3]))]
        flags = [part for pair in (*small, *chosen) for part in ("--set", pair)]
        recipe = draw.choice(["tiny", "tiny", "demo-vanilla"])
        result = cli("train", "--recipe", recipe, "--data", "text.txt", "--out", "run", *flags)
        if result.code == 2:
            result.refused()
            assert not Path("run").exists(), (chosen, result.err)
        else:
            assert result.code == 0, (chosen, result)
            again = cli("train", "--out", "run", "--resume", "auto", "--set", "training.steps=5")
            assert again.code == 0, (chosen, again)
            finished += 1
            shutil.rmtree("run")
    assert finished >= 5
