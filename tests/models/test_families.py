"""The registry of families."""

import subprocess
import sys
import types

import pytest

from longspan.errors import ConfigError
from longspan.models import families
from longspan.models.lstm import LSTM
from longspan.models.transformer_xl import TransformerXL
from longspan.reading import Reading
from tests.support import build


class Entry:
    def __init__(self, name: str, value: str) -> None:
        self.name, self.value = name, value


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> object:
    def registered(*entries: Entry) -> None:
        monkeypatch.setattr(families, "entry_points", lambda group: list(entries) if group == families.GROUP else [])
        families.known_families.cache_clear()

    yield registered
    monkeypatch.undo()
    families.known_families.cache_clear()


def test_a_class_that_its_package_reexports_has_its_registered_name(
    register: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Mine(LSTM):
        pass

    package = types.ModuleType("package_of_a_family")
    package.Mine = Mine  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, package.__name__, package)
    register(Entry("mine", f"{package.__name__}:Mine"))  # type: ignore[operator]
    assert families.name_of(families.build("mine", {"layers": 1, "width": 8})) == "mine"


def test_a_model_of_no_registered_family_is_an_error() -> None:
    class Mine(LSTM):
        pass

    with pytest.raises(ConfigError, match="Mine"):
        families.name_of(Mine(LSTM.Config(layers=1, width=8)))


def test_a_taken_name_is_ignored_with_a_warning(register: object) -> None:
    register(Entry("lstm", "elsewhere:LSTM"), Entry("mine", "a:A"), Entry("mine", "b:B"))  # type: ignore[operator]
    with pytest.warns(UserWarning, match=r"(lstm.*elsewhere)|(mine.*b:B)") as caught:
        known = families.known_families()
    assert len(caught) == 2
    assert (known["lstm"], known["mine"]) == ("longspan.models.lstm:LSTM", "a:A")


@pytest.mark.parametrize(
    ("family", "reading", "named"),
    [
        ("transformer-xl", Reading(pointer=5), r"pointer=5"),
        ("lstm", Reading(same_length=True), r"same_length=True"),
        ("rotary", Reading(clamp=9), r"clamp=9"),
        ("vanilla", Reading(clamp=9), r"clamp=9"),
    ],
)
def test_a_setting_that_a_family_does_not_use_is_an_error(family: str, reading: Reading, named: str) -> None:
    model = build(family, {"layers": 1, "width": 8})
    with pytest.raises(ConfigError, match=named):
        model.check_reading(reading)
    if isinstance(model, TransformerXL):
        with pytest.raises(ConfigError, match=named):
            model.initial_state(1, reading)


@pytest.mark.parametrize("family", ["transformer-xl", "longspan-xl", "rotary", "compressive"])
def test_a_full_size_empty_state_takes_no_memory(family: str) -> None:
    model = build(family, {"layers": 2, "width": 64, "heads": 2, "memory": 2**20})
    for trainable in (False, True):
        state = model.initial_state(1, trainable=trainable, filled=True)
        assert state.nbytes_per_row() > 2**27
        assert sum(tensor.untyped_storage().nbytes() for tensor in state.tensors().values()) < 2**14


OUTLINES = """
import sys
from longspan.models.families import family, known_families, outline
for name in known_families():
    outline(name, family(name).Config())
    assert "sympy" not in sys.modules, name
values = {"vocabulary": 1000, "cutoffs": (100,), "div_val": 2, "tie_embedding": False}
outline("transformer-xl", family("transformer-xl").Config(**values))
assert "sympy" not in sys.modules
"""


def test_an_outline_does_not_import_the_compiler_of_torch() -> None:
    done = subprocess.run([sys.executable, "-c", OUTLINES], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
