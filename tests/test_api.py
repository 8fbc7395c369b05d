"""The public API: everything that `import longspan` promises."""

import dataclasses
import importlib.resources
import inspect
import re
import signal
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import longspan
from longspan import api, errors
from longspan.checkpoints.model_folder import save_model
from longspan.decoding.sampling import Sampling
from longspan.device import find_device
from longspan.errors import ConfigError, DeviceError, UnknownNameError
from longspan.reading import ContextSettings, ReadingSettings
from longspan.text_model import GenerationOptions, TextModel
from longspan.tokenizers import ByteTokenizer
from longspan.training.loop import Trainer
from tests.programs import PYTHON

FUNCTIONS = ["build", "generate", "import_model", "init", "load", "open_decoder", "score", "train"]
SMALL: dict[str, Any] = {"layers": 1, "width": 16, "heads": 2}
TEXTS = ["the first text", "a second one"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = longspan.build("transformer-xl", **SMALL, reading={"segment": 8, "memory": 16})
    save_model(tmp_path / "m", model, ByteTokenizer())
    return tmp_path / "m"


def test_every_public_name_can_be_imported() -> None:
    assert sorted(longspan.__all__) == dir(longspan)
    for name in longspan.__all__:
        assert getattr(longspan, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = longspan.no_such_name


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_public_function_is_typed_and_documented(name: str) -> None:
    function = inspect.unwrap(getattr(longspan, name))
    annotations = typing.get_type_hints(function)
    assert set(inspect.signature(function).parameters) | {"return"} == set(annotations)
    assert function.__doc__


def test_the_type_marker_is_shipped() -> None:
    assert (importlib.resources.files("longspan") / "py.typed").is_file()


CALLS = """
import longspan
import torch
from typing import assert_type

tokens = torch.zeros(1, 2, dtype=torch.int64)
model = longspan.load("runs/tiny", memory=3, same_length=True)
assert_type(model.score("a", temperature=1.1), longspan.Score)
assert_type(model.score(["a", b"b"]), list[longspan.Score])
assert_type(model.generate("a", 3, top_k=2, memory=4), str)
assert_type(longspan.generate(["a"], 3, model, seed=1), list[str])
assert_type(longspan.score("a", model, memory=4), longspan.Score)
assert_type(model.reading, longspan.Reading)
assert_type(model.reach(), int)
assert_type(longspan.build("vanilla").reach(), int)
assert_type(longspan.build("vanilla")(tokens, None)[1], longspan.State)
model.scoer("a")  # wrong
model.score("a", memroy=3)  # wrong
model.score("a", memory="3")  # wrong
model.generate("a", tempreature=0.5)  # wrong
longspan.load("runs/tiny", memroy=3)  # wrong
longspan.score("a", model, method="steam")  # wrong
longspan.generate("a", 3, model, topk=2)  # wrong
longspan.build("transformer-xl", reading={"memroy": 3})  # wrong
"""


def test_a_type_checker_finds_misspelled_names(tmp_path: Path) -> None:
    """mypy follows only the modules with the public signatures, which takes seconds instead of half a minute."""
    pytest.importorskip("mypy")
    calls, package = tmp_path / "calls.py", Path(longspan.__file__).parent
    calls.write_text(CALLS, encoding="utf-8")
    names = ["__init__", "api", "errors", "reading", "text_model", "scoring/score", "contract"]
    options = ["--follow-imports=skip", "--ignore-missing-imports", "--config-file=", f"--cache-dir={tmp_path}"]
    command = [sys.executable, "-m", "mypy", *options, calls, *(package / f"{name}.py" for name in names)]
    output = subprocess.run(command, check=False, capture_output=True, text=True, cwd=tmp_path).stdout
    found = {int(line) for line in re.findall(r"^calls\.py:(\d+): error", output, re.MULTILINE)}
    wrong = {number for number, line in enumerate(CALLS.splitlines(), start=1) if line.endswith("# wrong")}
    assert found == wrong, output


def test_the_typed_settings_are_those_of_a_reading() -> None:
    assert typing.get_type_hints(ReadingSettings) == typing.get_type_hints(longspan.Reading)
    assert set(typing.get_type_hints(ContextSettings)) == set(typing.get_type_hints(ReadingSettings)) - {"temperature"}
    sampling = {field.name for field in dataclasses.fields(Sampling)}
    options = {*typing.get_type_hints(ContextSettings), *sampling, "seed", "stop"}
    assert set(typing.get_type_hints(GenerationOptions)) == options


@pytest.mark.parametrize("name", ["initial_state", "losses", "reach", "has_memory"])
def test_a_text_model_has_the_signatures_of_its_model(name: str) -> None:
    expected, found = (inspect.signature(getattr(cls, name)) for cls in (longspan.LanguageModel, TextModel))
    assert str(found) == str(expected)  # as text, because two equal shape annotations are not the same object


def test_importing_longspan_does_not_import_torch() -> None:
    """It takes seconds, which `longspan --help` would pay for."""
    code = "import sys, longspan; dir(longspan); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_build_takes_a_reading_as_a_mapping_or_an_object() -> None:
    default = longspan.build("transformer-xl", **SMALL)
    mapped = longspan.build("transformer-xl", **SMALL, reading={"memory": 7})
    assert isinstance(default, longspan.LanguageModel)
    assert (default.config.layers, default.reading) == (1, longspan.Reading())
    assert mapped.reading == longspan.Reading(memory=7)
    assert longspan.build("transformer-xl", **SMALL, reading=mapped.reading).reading == mapped.reading
    with pytest.raises(ConfigError, match=r"vanilla.*'memory'"):
        longspan.build("vanilla", **SMALL, reading={"memory": 7})
    with pytest.raises(UnknownNameError, match="transformer-x1"):
        longspan.build("transformer-x1")
    with pytest.raises(UnknownNameError, match="layer"):
        longspan.build("transformer-xl", layer=2)


def test_build_names_the_argument_of_a_reading_setting() -> None:
    with pytest.raises(ConfigError, match=r"model\.memory=3.*transformer-xl.*reading=\{'memory': 3\}"):
        longspan.build("transformer-xl", **SMALL, memory=3)
    with pytest.raises(UnknownNameError, match=r"'model\.memory'"):
        longspan.build("vanilla", **SMALL, memory=3)


@pytest.mark.parametrize(
    ("name", "known", "suggested"),
    [
        ("training.bach", ["training.batch", "training.clip"], "training.batch"),
        ("training.foo", ["training.batch", "training.lr_floor"], None),
        ("model.memory", ["model.norm", "model.layers"], None),
        ("tinny", ["tiny", "ptb"], "tiny"),
        ("a.b", [], None),
    ],
)
def test_only_a_similar_name_is_suggested(name: str, known: list[str], suggested: str | None) -> None:
    message = str(UnknownNameError("key", name, known))
    assert repr(name) in message
    if suggested:
        assert message.endswith(f"{suggested!r}?")
    else:
        assert message.endswith(", ".join(sorted(known)) or "none")


def test_a_name_can_have_another_fix() -> None:
    with pytest.raises(UnknownNameError, match=r"'glr'.*transformer-xl.*install the package"):
        longspan.build("glr")
    with pytest.raises(UnknownNameError, match=r"'gpu'.*'cuda'"):
        longspan.load(device="gpu")


def test_load_takes_settings_of_the_reading(folder: Path) -> None:
    model = longspan.load(folder, memory=40, same_length=True)
    assert isinstance(model, TextModel)
    assert (model.reading.memory, model.reading.same_length, model.reading.segment) == (40, True, 8)
    assert longspan.load(str(folder)).reading.memory == 16
    with pytest.raises(ConfigError, match="memory=-3"):
        longspan.load(folder, memory=-3)


@pytest.mark.parametrize("by", ["model", "path", "string"])
def test_score_takes_a_string_bytes_or_a_list(folder: Path, by: str) -> None:
    model: Any = {"model": longspan.load(folder), "path": folder, "string": str(folder)}[by]
    each = [longspan.score(text, model) for text in TEXTS]
    together = longspan.score(TEXTS, model)
    assert isinstance(each[0], longspan.Score)
    assert isinstance(together, list)
    for one, other, text in zip(each, together, TEXTS, strict=True):
        assert one.scored == len(text) - 1
        assert one.losses is not None
        assert other.losses is not None
        np.testing.assert_array_equal(one.losses, other.losses)
        assert longspan.score(text.encode(), model).nats == one.nats
    assert longspan.score([], model) == []
    changed = longspan.score(TEXTS[0], model, memory=0)
    assert (changed.method, changed.reading.memory) == ("sliding", 0)
    assert longspan.score(TEXTS[0], model, method="dynamic").method == "dynamic"


@pytest.mark.parametrize("by", ["model", "path", "string"])
def test_generate_takes_a_string_bytes_or_a_list(folder: Path, by: str) -> None:
    model: Any = {"model": longspan.load(folder), "path": folder, "string": str(folder)}[by]
    options: dict[str, Any] = {"temperature": 0.8, "top_k": 5, "seed": 3}
    each = [longspan.generate(text, 12, model, **options) for text in TEXTS]
    assert isinstance(each[0], str)
    assert longspan.generate(TEXTS, 12, model, **options) == each
    assert longspan.generate(TEXTS[0].encode(), 12, model, **options) == each[0]
    assert longspan.generate([], 12, model) == []
    assert isinstance(longspan.generate(max_new_tokens=3, model=model), str)
    with pytest.raises(ConfigError, match="top_k=-1"):
        longspan.generate("a", 3, model, top_k=-1)


def test_the_bundled_model_is_the_default() -> None:
    model = longspan.load()
    assert longspan.score(TEXTS[0]).nats == pytest.approx(model.score(TEXTS[0]).nats)
    assert longspan.generate("It was", 5, temperature=0) == model.generate("It was", 5, temperature=0)


def test_train_returns_the_trained_model(tmp_path: Path) -> None:
    data = tmp_path / "text.txt"
    data.write_text("It was late, and the lamp was out. " * 200, encoding="utf-8")
    settings = ["training.steps=3", "training.batch=2", "training.segment=16", "training.memory=16"]
    settings += ["model.layers=1", "model.width=16", "model.heads=2", "training.warmup=0"]
    model = longspan.train("tiny", tmp_path / "run", data=data, overrides=settings, seed=1, device="cpu")
    assert isinstance(model, TextModel)
    assert model.config.layers == 1
    again = longspan.load(tmp_path / "run", device="cpu")
    assert again.score("It was late").nats == model.score("It was late").nats


def test_train_takes_overrides_as_a_mapping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, Any] = {}

    def stop(recipe: Any, *args: Any, **options: Any) -> None:
        found["recipe"] = recipe
        raise KeyboardInterrupt

    monkeypatch.setattr(api.run, "train", stop)
    changes = {"training.steps": 3, "training.lr": 1e-5, "model.norm": "pre", "training.same_length": True}
    with pytest.raises(KeyboardInterrupt):
        longspan.train(
            "tiny", tmp_path / "run", overrides={**changes, "data.valid": tmp_path, "training.betas": (0, 0.9)}
        )
    recipe = found["recipe"]
    assert (recipe.training.steps, recipe.training.lr, recipe.training.same_length) == (3, 1e-5, True)
    assert (recipe.model.norm, recipe.data.valid, tuple(recipe.training.betas)) == ("pre", str(tmp_path), (0, 0.9))
    with pytest.raises(ConfigError, match=r"training\.clip.*None"):
        longspan.train("tiny", tmp_path / "run", overrides={"training.clip": None})


def test_an_interrupted_train_raises_and_can_be_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / "text.txt"
    data.write_text("It was late, and the lamp was out. " * 200, encoding="utf-8")
    small = {"training.batch": 2, "training.segment": 16, "training.memory": 16, "training.warmup": 0}
    small |= {"training.steps": 4, "model.layers": 1, "model.width": 16, "model.heads": 2}
    take_step, taken = Trainer.take_step, []

    def interrupt_the_second(trainer: Trainer) -> None:
        take_step(trainer)
        taken.append(trainer.step)
        if trainer.step == 2:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Trainer, "take_step", interrupt_the_second)
    options: dict[str, Any] = {"data": data, "overrides": small, "device": "cpu"}
    with pytest.raises(KeyboardInterrupt, match=r"SIGINT.*step 2.*--resume auto"):
        longspan.train("tiny", tmp_path / "run", **options)
    assert isinstance(longspan.train("tiny", tmp_path / "run", **options, resume="auto"), TextModel)
    assert taken[-1] == 4


def test_a_built_model_can_be_used_on_text() -> None:
    model = longspan.build("transformer-xl", **SMALL)
    with_tokenizer = longspan.TextModel(model, longspan.ByteTokenizer())
    assert longspan.score(TEXTS[0], model).nats == with_tokenizer.score(TEXTS[0]).nats
    assert longspan.generate(TEXTS, 5, model, seed=2) == with_tokenizer.generate(TEXTS, 5, seed=2)
    words = longspan.build("transformer-xl", **SMALL, vocabulary=1000)
    with pytest.raises(ConfigError, match=r"256.*1000.*TextModel"):
        longspan.score(TEXTS[0], words)


def test_a_built_model_keeps_its_mode() -> None:
    model = longspan.build("transformer-xl", **SMALL, dropout=0.5)
    for training in (True, False):
        model.train(training)
        assert longspan.score(TEXTS[0], model).nats == longspan.score(TEXTS[0], model).nats
        longspan.generate("a", 2, model)
        with pytest.raises(ConfigError, match="top_k=-1"):
            longspan.generate("a", 2, model, top_k=-1)
        assert {module.training for module in model.modules()} == {training}


def test_init_draws_the_weights_of_its_seed_and_save_writes_them(tmp_path: Path) -> None:
    state = torch.get_rng_state()
    one, same, other = (longspan.init("transformer-xl", **SMALL, seed=seed, device="cpu") for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert one.score(TEXTS[0]).nats == same.score(TEXTS[0]).nats != other.score(TEXTS[0]).nats
    one.save(tmp_path / "m", notes=["Untrained."])
    loaded = longspan.load(tmp_path / "m", device="cpu")
    assert (loaded.hash, loaded.score(TEXTS[0]).nats) == (one.hash, one.score(TEXTS[0]).nats)
    assert "- Untrained." in (tmp_path / "m" / "README.md").read_text(encoding="utf-8")
    words = tmp_path / "words.txt"
    words.write_text("<unk>\nthe\nlamp\n", encoding="utf-8")
    model = longspan.init("lstm", words, layers=1, width=8, reading={"segment": 9})
    assert (model.config.vocabulary, model.tokenizer.kind, model.reading.segment) == (3, "words", 9)


WRONG = """
import longspan, numpy, torch
model = longspan.init("transformer-xl", layers=1, width=16, heads=2)
calls = {
    "score(5)": lambda: model.score(5),
    "score(None)": lambda: model.score(None),
    "score(['ab', 3])": lambda: model.score(["ab", 3]),
    "score({'a': 1})": lambda: model.score({"a": 1}),
    "streams": lambda: model.score("ab", streams=1.5),
    "method": lambda: model.score("ab", method=3),
    "generate(5)": lambda: model.generate(5),
    "max_new_tokens": lambda: model.generate("a", 2.5),
    "seed": lambda: model.generate("a", 2, seed="x"),
    "temperature": lambda: model.generate("a", 2, temperature="x"),
    "build(5)": lambda: longspan.build(5),
    "reading": lambda: longspan.build("transformer-xl", reading=3),
    "load(5)": lambda: longspan.load(5),
    "batch": lambda: model.initial_state(-1),
    "memory=1.5": lambda: longspan.Reading(memory=1.5),
    "memory='x'": lambda: longspan.Reading(memory="x"),
    "same_length": lambda: longspan.Reading(same_length=3),
    "rate": lambda: longspan.Dynamics(rate="x"),
    "device": lambda: longspan.build("transformer-xl", device=3),
}
for name, call in calls.items():
    try:
        call()
    except longspan.LongspanError:
        continue
    except Exception as error:
        print(name, repr(error))
    else:
        print(name, "is accepted")
reading = longspan.Reading(memory=numpy.int64(3), temperature=numpy.float32(2))
print(*(type(value).__name__ for value in (reading.memory, reading.temperature)))
print(len(model.generate("a", numpy.int64(2), seed=numpy.int64(3), temperature=0)))
"""


def test_arguments_of_the_wrong_type_are_our_errors() -> None:
    """In a process of its own: here the type checker of the tests would refuse them first."""
    found = subprocess.run([PYTHON, "-c", WRONG], check=True, capture_output=True, text=True)
    assert found.stdout.splitlines() == ["int float", "2"]


def test_build_takes_a_device() -> None:
    assert next(longspan.build("transformer-xl", **SMALL, device="auto").parameters()).device == find_device("auto")
    assert next(longspan.build("transformer-xl", **SMALL, device="cpu").parameters()).device.type == "cpu"
    with pytest.raises(UnknownNameError, match="gpu"):
        longspan.build("transformer-xl", **SMALL, device="gpu")


@pytest.mark.parametrize("name", ["build", "import_model", "init", "load", "score", "generate", "train"])
def test_the_device_is_chosen_as_on_the_command_line(name: str) -> None:
    assert inspect.signature(getattr(longspan, name)).parameters["device"].default == "auto"


def test_a_model_is_loaded_on_the_device_of_the_command_line(folder: Path) -> None:
    device = find_device("auto")
    assert next(longspan.load(folder).parameters()).device.type == device.type
    assert next(longspan.load(folder, device=torch.device("cpu")).parameters()).device.type == "cpu"
    for call in (
        lambda d: longspan.score("text", folder, device=d),
        lambda d: longspan.generate("a", 1, folder, device=d),
    ):
        with pytest.raises(UnknownNameError, match="gpu"):
            call("gpu")
    if not torch.cuda.is_available():
        with pytest.raises(DeviceError, match="cuda"):
            longspan.score("text", folder, device="cuda")


def test_open_decoder_steps_a_loaded_model(folder: Path) -> None:
    model = longspan.load(folder, device="cpu")
    decoder = longspan.open_decoder(model.model, batch=2, reading=longspan.Reading(memory=4))
    assert isinstance(decoder, longspan.Decoder)
    logits = decoder.step(torch.tensor([1, 2]))
    assert logits.shape == (2, 256)
    assert isinstance(decoder.state(), longspan.State)
    assert decoder.state().reading.memory == 4


def test_every_error_is_public_and_has_one_base_class() -> None:
    classes = {name: item for name, item in vars(errors).items() if name.endswith("Error")}
    assert set(classes) <= set(longspan.__all__)
    assert all(issubclass(item, longspan.LongspanError) for item in classes.values())
    assert set(api.__all__) <= set(longspan.__all__)
