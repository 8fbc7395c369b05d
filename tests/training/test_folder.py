"""The folder of a run: one process at a time, and a killed start does not prevent the next one."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from longspan.data import Encoded
from longspan.errors import ConfigError
from longspan.training import run
from longspan.training.folder import check_folder, read_run_info
from tests.training.conftest import losses, make_recipe, make_text, run_in_process, train

TORTURE = bool(os.environ.get("LONGSPAN_TORTURE"))


@pytest.mark.parametrize("resume", [None, "auto"])
@pytest.mark.parametrize("exists", [False, True])
def test_a_second_process_is_refused_while_the_first_starts(
    exists: bool, resume: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, out = make_recipe(training_steps=2), tmp_path / "new" / "run"
    if exists:
        out.mkdir(parents=True)
    refused = []

    def prepare(*_: Any) -> Encoded:
        monkeypatch.setattr(run, "open_text", lambda *_: pytest.fail("the second process was not refused"))
        with pytest.raises(ConfigError, match=str(out)):
            run.train(recipe, out, resume=resume, observers=[])
        refused.append(list(out.iterdir()))
        return make_text(300)

    monkeypatch.setattr(run, "open_text", prepare)
    assert run.train(recipe, out, resume=resume, observers=[]).finished
    assert refused == [[]]


def test_of_two_simultaneous_processes_one_trains(tmp_path: Path) -> None:
    assert run_in_process(start_pairs, str(tmp_path), timeout=None if TORTURE else 300) == 0


def start_pairs(folder: str) -> None:
    for k in range(100 if TORTURE else 2):
        out = Path(folder) / f"run-{k}"
        reading, writing = os.pipe()
        children = [fork(out, reading, writing) for _ in range(2)]
        os.close(reading)
        os.close(writing)
        codes = sorted(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)
        assert codes == [0, 3]
        assert len(losses(out)) == 3
        assert len((out / "metrics.jsonl").read_text().splitlines()) == 3


def fork(out: Path, reading: int, writing: int) -> int:
    """A child that trains once its parent closes the pipe. It exits with 3 if it is refused."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(writing)
            os.read(reading, 1)
            train(make_recipe(training_steps=3), out, make_text(300), pytest.MonkeyPatch())
            code = 0
        except ConfigError as error:
            code = 3 if str(out) in str(error) else 1
        finally:
            os._exit(code)
    return child


def test_a_created_folder_is_removed_if_it_stays_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Encoded:
        raise ConfigError("no such text")

    monkeypatch.setattr(run, "open_text", fail)
    (tmp_path / "mine").mkdir()
    for name in ("a/b/c", "mine/run", "mine"):
        with pytest.raises(ConfigError, match="no such text"):
            run.train(make_recipe(), tmp_path / name)
    assert list(tmp_path.rglob("*")) == [tmp_path / "mine"]


def test_a_path_that_cannot_be_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for name in ("file", "file/run"):
        with pytest.raises(ConfigError, match=str(tmp_path / name)):
            run.train(make_recipe(), tmp_path / name)
    assert (tmp_path / "file").read_text() == "mine"


OURS = json.dumps({"data": {}, "processes": [{"command": ["longspan"]}]})


@pytest.mark.parametrize(
    "left",
    [
        {".recipe.toml.new-0123abcd.longspan": "name = "},
        {".run.json.new-0123abcd.longspan": "{"},
        {"run.json": OURS},
        {"run.json": OURS, ".recipe.toml.new-0123abcd.longspan": "", ".recipe.toml.new-89abcdef.longspan": ""},
    ],
)
def test_leftovers_of_a_killed_start_do_not_prevent_a_start(
    left: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, content in left.items():
        (tmp_path / name).write_text(content)
    check_folder(tmp_path, None)
    recipe = make_recipe(training_steps=1)
    assert train(recipe, tmp_path, make_text(300), monkeypatch, resume="auto").took_steps == 1
    assert not list(tmp_path.glob(".*"))
    assert read_run_info(tmp_path)["processes"][-1]["torch"]


@pytest.mark.parametrize("name", ["run.json", ".recipe.toml", ".letter.txt.new-0123abcd.longspan"])
def test_other_files_are_not_touched(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / name).write_text('{"mine": 1}')
    for resume in (None, "auto"):
        with pytest.raises(ConfigError, match=str(tmp_path)):
            train(make_recipe(), tmp_path, make_text(300), monkeypatch, resume=resume)
    assert [path.read_text() for path in tmp_path.iterdir()] == ['{"mine": 1}']
