"""A draft: continuations, undo, branches, settings, saving and loading."""

import json
from pathlib import Path

import pytest

from longspan.api import create
from longspan.decoding.sampling import Sampling
from longspan.draft import UNDO_STEPS, Draft, DraftSettings
from longspan.errors import ConfigError, DataError, UnknownNameError
from longspan.text_model import TextModel
from longspan.tokenizers import CharacterTokenizer


@pytest.fixture(scope="module")
def model() -> TextModel:
    tokenizer = CharacterTokenizer("abcdefgh \n")
    return create("transformer-xl", {"layers": 1, "width": 16, "heads": 2}, tokenizer, reading={"memory": 12}, seed=3)


SETTINGS = DraftSettings(length=9, sampling=Sampling())


def written(draft: Draft) -> str:
    return "".join(draft.write())


def test_a_continuation_is_that_of_generate(model: TextModel) -> None:
    draft = Draft(model, SETTINGS)
    draft.add("abc")
    assert written(draft) == model.generate("abc", 9, seed=0)
    assert draft.text == "abc" + model.generate("abc", 9, seed=0)


def test_text_added_later_is_read_after_the_continuation(model: TextModel) -> None:
    """Greedy, so that only the text decides: a draft in parts is the same as one that was read at once."""
    greedy = DraftSettings(length=6, sampling=Sampling(temperature=0))
    draft = Draft(model, greedy)
    draft.add("abc")
    written(draft)
    draft.add(" def")
    text = draft.text
    assert written(draft) == model.generate(text, 6, temperature=0)


def test_undo_restores_text_and_random_numbers(model: TextModel) -> None:
    draft = Draft(model, SETTINGS)
    assert not draft.undo()
    draft.add("abc")
    first = written(draft)
    second = written(draft)
    assert draft.undo()
    assert draft.text == "abc" + first
    assert written(draft) == second
    for _ in range(UNDO_STEPS + 5):
        draft.add("a")
    assert sum(draft.undo() for _ in range(UNDO_STEPS + 5)) == UNDO_STEPS


def test_branches_share_their_text_and_continue_differently(model: TextModel) -> None:
    draft = Draft(model, SETTINGS)
    draft.add("abc")
    name = draft.fork()
    other = written(draft)
    draft.switch("main")
    assert draft.text == "abc"
    assert written(draft) != other
    draft.switch(name)
    assert draft.text == "abc" + other
    with pytest.raises(UnknownNameError, match="mian"):
        draft.switch("mian")
    with pytest.raises(ConfigError, match="main"):
        draft.fork("main")


def test_settings(model: TextModel) -> None:
    draft = Draft(model, SETTINGS)
    draft.add("abcabcabcabc")
    draft.change("temperature", 0)
    draft.change("memory", 2)
    draft.change("length", 5)
    assert written(draft) == model.generate("abcabcabcabc", 5, temperature=0, memory=2)
    before = draft.settings
    for key, value in (("memory", -1), ("temperature", -1), ("length", 0), ("top_p", 3)):
        with pytest.raises(ConfigError, match=key):
            draft.change(key, value)
    with pytest.raises(UnknownNameError, match="heat"):
        draft.change("heat", 1)
    assert draft.settings == before


def test_stopping_early_keeps_what_was_generated(model: TextModel) -> None:
    draft = Draft(model, SETTINGS)
    draft.add("abc")
    pieces = draft.write()
    part = next(pieces) + next(pieces)
    pieces.close()
    assert draft.text == "abc" + part


def test_saved_drafts_are_loaded(model: TextModel, tmp_path: Path) -> None:
    draft = Draft(model, SETTINGS)
    draft.add("abc")
    draft.fork("other")
    written(draft)
    draft.change("memory", 7)
    draft.save(tmp_path / "d.json")
    draft.save(tmp_path / "d.txt")
    assert (tmp_path / "d.txt").read_text() == draft.text
    found = Draft(model)
    found.load(tmp_path / "d.json")
    assert (found.branch, found.text, found.settings) == ("other", draft.text, draft.settings)
    assert {name: steps[-1].text for name, steps in found.branches.items()} == {"main": "abc", "other": draft.text}
    found.load(tmp_path / "d.txt")
    assert found.text == draft.text
    for content in ("[]", "{}", json.dumps({"format": 2}), '{"format": 1, "branch": "x", "branches": {}}'):
        (tmp_path / "bad.json").write_text(content)
        with pytest.raises(DataError, match=r"bad\.json"):
            found.load(tmp_path / "bad.json")
    with pytest.raises(DataError, match="none"):
        found.load(tmp_path / "none")
