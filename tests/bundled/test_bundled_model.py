"""The bundled model: its card against its files, its results scored again, and its losses bit for bit."""

import hashlib
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import longspan
from longspan.bundled import FOLDER, is_installed
from longspan.data import CORPORA, get, open_corpus
from longspan.data.cache import cache_folder
from longspan.training.recipe import load_recipe

from .cards import (
    ROOT,
    bits_by_memory,
    bundled_rows,
    is_known,
    number,
    steps_and_tokens,
    tokens_read,
    value,
)

pytestmark = pytest.mark.skipif(not is_installed(), reason="no bundled model; make bundled RUN=... makes it")
PASSAGE = Path(__file__).with_name("passage.txt")
SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
ARCHIVES = {"english-novels": "english_novels.tar.xz", "gutenberg-books": "books.tar.xz"}
PINNED = json.loads(Path(__file__).with_name("pinned.json").read_text(encoding="utf-8"))
"""Written by benchmarks/pin_bundled_model.py."""
HELD_OUT = 1.40
SLICE = "test, first 20000"
FINGERPRINT = r"\| training text \| fingerprint ([0-9a-f]{64}) \|"
CORPUS = r"Text: the train split of ([a-z-]+),"
TOKENS = r"Text: the train split of [a-z-]+, ([\d,]+) tokens,"
GROWTH = """
import longspan, torch
from longspan.decoding.sampling import Sampling

torch.set_num_threads(1)

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

model = longspan.load(device="cpu")
session = model.session("It was " * (model.reading.memory // 7 + 1))
written = sum(1 for _ in session.write(100, Sampling()))
before = resident()
written += sum(1 for _ in session.write(300, Sampling()))
print(written, resident() - before)
"""


@pytest.fixture(scope="module")
def model() -> longspan.TextModel:
    return longspan.load(device="cpu")


@pytest.fixture(scope="module")
def card() -> str:
    return (FOLDER / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def novels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with the novels, where they are available."""
    cache = cache_folder()
    return cache if is_cached("english-novels", cache) else install("english-novels", tmp_path_factory.mktemp("cache"))


def is_cached(name: str, cache: Path) -> bool:
    return CORPORA[name].folder(cache).is_dir()


def install(name: str, cache: Path) -> Path:
    if not (SHARED / ARCHIVES[name]).is_file():
        pytest.skip(f"{name} is missing; longspan data get {name} --from FILE")
    get(name, SHARED / ARCHIVES[name], cache)
    return cache


@pytest.fixture(scope="module")
def test_book(novels: Path) -> bytes:
    """The first bytes of the test split."""
    return open_corpus("english-novels", "test", cache=novels).ids[:20_000].tobytes()


def test_the_card_describes_the_files(card: str, model: longspan.TextModel) -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 12_000_000
    weights = (FOLDER / "model.safetensors").read_bytes()
    assert hashlib.sha256(weights).hexdigest() == value(card, r"SHA-256 ([0-9a-f]{64})")
    count = sum(parameter.numel() for parameter in model.model.parameters())
    assert f"{count:,}" == value(card, r"parameters: ([\d,]+) ") == value(card, r"with ([\d,]+) parameters,")
    assert f"a memory of {model.reading.memory:,} bytes and a clamp of {model.reading.clamp}," in card
    assert model.reading.same_length


def test_the_folder_has_the_current_format_and_family() -> None:
    described = json.loads((FOLDER / "config.json").read_text())
    assert (described["format"], described["family"], described["tokenizer"]) == (2, "longspan-xl", "bytes")


def test_provenance_is_consistent(card: str) -> None:
    """Commit and text are the same in the card's table and in the exported notes."""
    commit = value(card, r"\| code \| commit ([0-9a-f]{40}) \|")
    assert commit == value(card, r"Trained by longspan [^\n]*, commit ([0-9a-f]{40}),")
    assert is_known(commit)
    fingerprint = value(card, FINGERPRINT)
    assert fingerprint == value(card, r"Text: the train split [^\n]*, fingerprint ([0-9a-f]{64})\.")
    assert fingerprint[:16] == value(card, r"tokens of [a-z-]+ \(fingerprint ([0-9a-f]{16})\)")


def test_the_card_matches_the_recipe(card: str, model: longspan.TextModel) -> None:
    recipe, reading = load_recipe(value(card, r"- Recipe ([a-z-]+),")), model.reading
    assert recipe.data.corpus == value(card, CORPUS)
    steps, tokens = steps_and_tokens(card)
    segment = recipe.training_reading().segment
    assert isinstance(recipe.training.batch, int)
    assert tokens == tokens_read(steps, number(card, TOKENS), recipe.training.batch, segment)
    assert recipe.result.score == round(bits_by_memory(card, "test", reading.clamp)[reading.memory], 3)
    assert recipe.evaluation_reading() == reading


@pytest.mark.slow
def test_the_fingerprint_is_that_of_the_text(card: str, novels: Path, tmp_path: Path) -> None:
    name = value(card, CORPUS)
    parts = CORPORA[name].parts or (name,)
    cache = novels if all(is_cached(part, novels) for part in parts) else tmp_path
    for part in parts:
        if not is_cached(part, cache):
            install(part, cache)
    text = open_corpus(name, "train", cache=cache)
    assert value(card, FINGERPRINT) == text.fingerprint
    assert number(card, TOKENS) == len(text)


def test_the_validation_books_chose_the_memory(card: str, model: longspan.TextModel) -> None:
    """The results meet the bound on held-out text, improve with memory, and explain the default memory."""
    test, valid = (bits_by_memory(card, split, model.reading.clamp) for split in ("test", "valid"))
    assert list(test) == list(valid) == [256, 512, 1024, 2048, 4096]
    assert test[model.reading.memory] <= HELD_OUT
    assert test[model.reading.memory] < test[256]
    most = int(value(card, r"of the best up to ([\d,]+),").replace(",", ""))
    allowed = {memory: bits for memory, bits in valid.items() if memory <= most}
    enough = min(allowed.values()) + float(value(card, r"memory within ([\d.]+) bits"))
    assert model.reading.memory == min(memory for memory, bits in allowed.items() if bits <= enough)
    for row in bundled_rows(card):
        assert row.command.startswith(("longspan eval --data", "python -c"))


def test_every_python_command_of_the_cards_compiles(card: str) -> None:
    cards = [card, *(path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "cards").glob("*.md"))]
    programs = [program for text in cards for program in re.findall(r'`python -c "([^"`]*)"', text)]
    assert len(programs) >= 3
    for program in programs:
        compile(program, "card", "exec")


def test_bits_of_a_passage(card: str, model: longspan.TextModel) -> None:
    (result,) = bits_by_memory(card, "passage", model.reading.clamp).items()
    assert result == (model.reading.memory, pytest.approx(model.score(PASSAGE.read_bytes()).bits, abs=0.002))


@pytest.mark.torture
def test_bits_of_a_test_book(card: str, test_book: bytes, model: longspan.TextModel) -> None:
    """With the default memory, with 256 bytes, and the gain between them."""
    expected = bits_by_memory(card, SLICE, model.reading.clamp)
    found = {memory: model.score(test_book, memory=memory).bits for memory in (256, model.reading.memory)}
    assert found == pytest.approx({memory: expected[memory] for memory in found}, abs=0.002)
    assert found[model.reading.memory] < found[256]


def test_memory_use_is_constant_during_generation() -> None:
    done = subprocess.run([sys.executable, "-c", GROWTH], capture_output=True, text=True, check=True)
    written, grown = map(int, done.stdout.split())
    assert written == 400
    assert grown < 2 << 20


# Other machines add floats in another order, hence the tolerance.
@pytest.mark.parametrize("case", PINNED["losses"], ids=lambda case: str(case["settings"]))
def test_losses_of_a_passage_have_not_changed(case: dict[str, Any], model: longspan.TextModel) -> None:
    found = model.score(PASSAGE.read_bytes(), method="stream", **case["settings"])
    assert found.bits == pytest.approx(case["bits"], abs=2e-6)
    assert found.losses is not None
    assert found.losses[PINNED["places"]].tolist() == pytest.approx(case["losses"], abs=2e-5)


@pytest.mark.parametrize("case", PINNED["generated"], ids=lambda case: str(case["temperature"]))
def test_generated_text_has_not_changed(case: dict[str, Any]) -> None:
    """In float32: the text of int8 depends on the processor."""
    plain = longspan.load(device="cpu", int8=False)
    text = plain.generate(PINNED["prompt"], len(case["text"]), temperature=case["temperature"], seed=3)
    assert text == case["text"]


def test_the_samples_are_those_of_the_docs() -> None:
    """Three files of 5,000 bytes after their prompts, and the commands that wrote them."""
    page = (ROOT / "docs" / "bundled_model.md").read_text(encoding="utf-8")
    commands = re.findall(r"^    (longspan generate .*) > (docs/samples/\w+\.txt)$", page, re.MULTILINE)
    assert len(commands) == len(list((ROOT / "docs" / "samples").iterdir())) == 3
    for command, path in commands:
        words = shlex.split(command)
        prompt, text = words[words.index("-p") + 1], (ROOT / path).read_bytes()
        assert "--seed" in words
        assert text.decode("utf-8").startswith(prompt)
        assert len(text) >= len(prompt) + int(words[words.index("-n") + 1]) >= len(prompt) + 5000
