"""The bundled model: its card against its files, its results scored again, and its losses bit for bit."""

import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import longspan
from longspan.bundled import FOLDER, is_installed
from longspan.checkpoints.store import write_folder
from longspan.data import get, open_corpus
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
ARCHIVE = Path(__file__).resolve().parents[3] / "shared" / "data" / "english_novels.tar.xz"
HELD_OUT = 1.55
SLICE = "test, first 20000"
FINGERPRINT = r"\| training text \| fingerprint ([0-9a-f]{64}) \|"
TRAINED_ON = r"Text: the train split of english-novels, ([\d,]+) tokens,"
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
    if not (cache / "corpora" / "english-novels").is_dir():
        if not ARCHIVE.is_file():
            pytest.skip("the novels are missing; longspan data get english-novels --from FILE")
        cache = tmp_path_factory.mktemp("cache")
        get("english-novels", ARCHIVE, cache)
    return cache


@pytest.fixture(scope="module")
def test_book(novels: Path) -> bytes:
    """The first bytes of the test split."""
    return open_corpus("english-novels", "test", cache=novels).ids[:20_000].tobytes()


def test_the_card_describes_the_files(card: str, model: longspan.TextModel) -> None:
    weights = (FOLDER / "model.safetensors").read_bytes()
    assert len(weights) <= 12_000_000
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
    assert fingerprint[:16] == value(card, r"of english-novels \(fingerprint ([0-9a-f]{16})\)")


def test_the_card_matches_the_recipe(card: str, model: longspan.TextModel) -> None:
    recipe, reading = load_recipe("novels"), model.reading
    steps, tokens = steps_and_tokens(card)
    segment = recipe.training_reading().segment
    assert isinstance(recipe.training.batch, int)
    assert tokens == tokens_read(steps, number(card, TRAINED_ON), recipe.training.batch, segment)
    assert recipe.result.score == round(bits_by_memory(card, "test", reading.clamp)[reading.memory], 3)
    assert (recipe.evaluation.memory, recipe.evaluation.clamp) == (reading.memory, reading.clamp)


def test_the_fingerprint_is_that_of_the_novels(card: str, novels: Path) -> None:
    text = open_corpus("english-novels", "train", cache=novels)
    assert value(card, FINGERPRINT) == text.fingerprint
    assert number(card, TRAINED_ON) == len(text)


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


@pytest.mark.slow
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


# Scored with the code of longspan 0.1.0 (commit 46fa5cb) on one CPU thread, where today's code gives the same bits.
# Other machines add floats in another order, hence the tolerance.
PINNED = [
    pytest.param({}, 1.2799186, [1.2624488, 0.1424722, 0.0942698, 0.0995431], id="default"),
    pytest.param({"memory": 64, "clamp": 0}, 1.3498558, [1.2624488, 0.1660292, 0.1142081, 0.0889506], id="memory-64"),
    pytest.param(
        {"memory": 256, "segment": 128}, 1.2844336, [1.2624488, 0.1424722, 0.1005035, 0.1077169], id="memory-256"
    ),
    pytest.param(
        {"memory": 512, "same_length": False, "segment": 256},
        1.2788856,
        [1.2624488, 0.1424722, 0.0942698, 0.1147143],
        id="without-same-length",
    ),
    pytest.param(
        {"memory": 2048, "clamp": 1023, "segment": 512},
        1.2581399,
        [1.2624488, 0.1424722, 0.0942698, 0.0957545],
        id="memory-2048",
    ),
    pytest.param(
        {"memory": 0, "same_length": False, "segment": 512},
        1.3475319,
        [1.2624488, 0.1424722, 0.1295041, 0.1046755],
        id="without-memory",
    ),
]
GENERATED = [
    pytest.param(0.0, " the three or four of the carriage and the carriage was already ", id="greedy"),
    pytest.param(0.8, " the farmhouse house, and was pouring out one foot at the window", id="sampled"),
]


@pytest.mark.parametrize(("settings", "bits", "losses"), PINNED)
def test_losses_of_a_passage_have_not_changed(
    settings: dict[str, int | bool], bits: float, losses: list[float], model: longspan.TextModel
) -> None:
    found = model.score(PASSAGE.read_bytes(), method="stream", **settings)
    assert found.bits == pytest.approx(bits, abs=2e-6)
    assert found.losses is not None
    assert found.losses[[0, 100, 600, 1279]].tolist() == pytest.approx(losses, abs=2e-5)


@pytest.mark.parametrize(("temperature", "text"), GENERATED)
def test_generated_text_has_not_changed(temperature: float, text: str, model: longspan.TextModel) -> None:
    prompt = "The carriage had hardly stopped before"
    assert model.generate(prompt, len(text), temperature=temperature, seed=3) == text


FORMAT_1 = {
    "vocabulary": 256,
    "layers": 7,
    "width": 256,
    "segment": 512,
    "dropout": 0.0,
    "cutoffs": [],
    "div_val": 1,
    "tie_embedding": True,
    "tie_projections": False,
    "heads": 4,
    "inner": 960,
    "norm": "pre",
    "norm_type": "layer",
    "final_norm": True,
    "activation": "squared-relu",
    "biases": True,
    "attention_dropout": 0.0,
    "memory": 1024,
    "same_length": True,
    "embedding_dropout": 0.0,
    "projection_dropout": 0.0,
    "ar": 0.0,
    "tar": 0.0,
    "clamp": 1023,
    "position": "relative",
    "shared_biases": True,
}
"""The config of these weights as longspan 0.1.0 distributed them."""


def test_the_folder_of_longspan_0_1_gives_the_same_bits(tmp_path: Path, model: longspan.TextModel) -> None:
    described = {"format": 1, "family": "transformer-xl", "dtype": "bfloat16", "tokens": "bytes", "model": FORMAT_1}
    files = {name: (FOLDER / name).read_bytes() for name in ("model.safetensors", "tokenizer.json")}
    write_folder(tmp_path / "novels", files | {"config.json": json.dumps(described).encode()})
    old = longspan.load(tmp_path / "novels", device="cpu")
    assert (old.reading, old.config) == (model.reading, model.config)
    text = PASSAGE.read_bytes()[:300]
    was, found = old.score(text).losses, model.score(text).losses
    assert was is not None
    assert found is not None
    assert was.tobytes() == found.tobytes()
