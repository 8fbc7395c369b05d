"""The card of the model in the box against its files, and its figures computed anew."""

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

import longspan
from longspan.box import FOLDER, is_filled
from longspan.data import get, open_corpus
from longspan.data.cache import cache_folder
from longspan.training.recipe import load_recipe

from .card import is_known, number, of, rows, steps_and_tokens, tokens_read, value

pytestmark = pytest.mark.skipif(not is_filled(), reason="the box is empty; make box RUN=... fills it")
PASSAGE = Path(__file__).with_name("passage.txt")
ARCHIVE = Path(__file__).resolve().parents[3] / "shared" / "data" / "english_novels.tar.xz"
HELD_OUT = 1.55
SLICE = "test, first 20000"
FINGERPRINT = r"\| training text \| fingerprint ([0-9a-f]{64}) \|"
TRAINED_ON = r"Text: the train split of english-novels, ([\d,]+) tokens,"
GROWTH = """
import longspan, torch
from longspan.generation.sampling import Sampling

torch.set_num_threads(1)

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

model = longspan.load()
session = model.session("It was " * (model.config.memory // 7 + 1))
written = sum(1 for _ in session.write(100, Sampling()))
before = resident()
written += sum(1 for _ in session.write(300, Sampling()))
print(written, resident() - before)
"""


@pytest.fixture(scope="module")
def card() -> str:
    return (FOLDER / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def novels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache that has the novels, where they are at hand."""
    cache = cache_folder()
    if not (cache / "corpora" / "english-novels").is_dir():
        if not ARCHIVE.is_file():
            pytest.skip("the novels are not here; longspan data get english-novels --from FILE")
        cache = tmp_path_factory.mktemp("cache")
        get("english-novels", ARCHIVE, cache)
    return cache


@pytest.fixture(scope="module")
def test_book(novels: Path) -> bytes:
    """The first bytes of the test split."""
    return open_corpus("english-novels", "test", cache=novels).ids[:20_000].tobytes()


def test_the_card_tells_of_these_files(card: str) -> None:
    weights = (FOLDER / "model.safetensors").read_bytes()
    assert len(weights) <= 12_000_000
    assert hashlib.sha256(weights).hexdigest() == value(card, r"SHA-256 ([0-9a-f]{64})")
    model = longspan.load()
    count = sum(parameter.numel() for parameter in model.model.parameters())
    assert f"{count:,}" == value(card, r"parameters: ([\d,]+) ") == value(card, r"of ([\d,]+) parameters that")
    assert f"a memory of {model.config.memory:,} bytes and a clamp of {model.config.clamp}," in card
    assert model.config.same_length


def test_the_card_says_the_same_twice(card: str) -> None:
    """The code and the text, at the top and where the exported folder tells of its origin."""
    commit = value(card, r"\| code \| commit ([0-9a-f]{40}) \|")
    assert commit == value(card, r"Trained by longspan [^\n]*, commit ([0-9a-f]{40}),")
    assert is_known(commit)
    fingerprint = value(card, FINGERPRINT)
    assert fingerprint == value(card, r"Text: the train split [^\n]*, fingerprint ([0-9a-f]{64})\.")
    assert fingerprint[:16] == value(card, r"of english-novels \(fingerprint ([0-9a-f]{16})\)")


def test_the_card_tells_of_its_recipe(card: str) -> None:
    recipe, config = load_recipe("novels-box"), longspan.load().config
    steps, tokens = steps_and_tokens(card)
    assert tokens == tokens_read(steps, number(card, TRAINED_ON), recipe.training.batch, recipe.model.segment)
    assert recipe.reached.score == round(of(card, "test", config.clamp)[config.memory], 3)
    assert (recipe.evaluation.memory, recipe.evaluation.clamp) == (config.memory, config.clamp)


def test_the_fingerprint_is_that_of_the_novels(card: str, novels: Path) -> None:
    text = open_corpus("english-novels", "train", cache=novels)
    assert value(card, FINGERPRINT) == text.fingerprint
    assert number(card, TRAINED_ON) == len(text)


def test_the_card_s_figures_are_what_was_asked_for(card: str) -> None:
    """Held-out bits, a gain by memory, and a memory that the validation books chose."""
    model = longspan.load()
    test, valid = (of(card, split, model.config.clamp) for split in ("test", "valid"))
    assert list(test) == list(valid) == [256, 512, 1024, 2048, 4096]
    assert test[model.config.memory] <= HELD_OUT
    assert test[model.config.memory] < test[256]
    most = int(value(card, r"of the best up to ([\d,]+),").replace(",", ""))
    allowed = {memory: bits for memory, bits in valid.items() if memory <= most}
    enough = min(allowed.values()) + float(value(card, r"memory within ([\d.]+) bits"))
    assert model.config.memory == min(memory for memory, bits in allowed.items() if bits <= enough)
    for row in rows(card):
        assert row.command.startswith(("longspan eval --data", "python -c"))


def test_bits_of_a_passage(card: str) -> None:
    model = longspan.load()
    (figure,) = of(card, "passage", model.config.clamp).items()
    assert figure == (model.config.memory, pytest.approx(model.score(PASSAGE.read_bytes()).bits, abs=0.002))


@pytest.mark.slow
def test_bits_of_a_test_book(card: str, test_book: bytes) -> None:
    """With the memory it has, with 256 bytes, and the gain between them."""
    figures = of(card, SLICE, longspan.load().config.clamp)
    assert 256 in figures
    found = {memory: longspan.load(memory=memory).score(test_book).bits for memory in figures}
    assert found == pytest.approx(figures, abs=0.002)
    assert found[longspan.load().config.memory] < found[256]


def test_writing_takes_no_more_memory_as_it_goes_on() -> None:
    done = subprocess.run([sys.executable, "-c", GROWTH], capture_output=True, text=True, check=True)
    written, grown = map(int, done.stdout.split())
    assert written == 400
    assert grown < 2 << 20
