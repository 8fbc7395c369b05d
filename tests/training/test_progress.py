"""What a run says while it prepares and trains, and the time it says is left, by a clock that tests set."""

import re
from pathlib import Path
from typing import Any

import pytest

from longspan.training import run
from longspan.training.observers.progress import Progress
from tests.training.conftest import make_recipe, make_text, train
from tests.training.test_speed import CPU, Clock, Pauses, take
from tests.training.test_speed import clock as clock  # a fixture


def estimates(told: str) -> dict[int, float | None]:
    """The seconds left that each line about a step tells, if any."""
    found = {}
    for line in told.splitlines():
        if step := re.match(r"step (\d+)  [\d.]+ bits", line):
            left = re.search(r"(\d+):(\d\d) left", line)
            found[int(step[1])] = None if left is None else 60.0 * int(left[1]) + int(left[2])
    return found


@pytest.mark.parametrize("limit", [{"training_steps": 20}, {"training_steps": None, "training_tokens": 20 * 32}])
def test_the_time_left_counts_steps_after_the_first(
    limit: dict[str, Any], clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, trainer = run.make_trainer(make_recipe(**limit), make_text(), CPU, [Progress(clock=clock)])
    take(trainer, clock, monkeypatch, lambda step: 600.0 if step == 1 else 8.0)
    told = estimates(capsys.readouterr().err)
    assert told[1] is None
    assert len(told) > 5
    for step, left in told.items():
        assert step == 1 or left == pytest.approx(8.0 * (20 - step), abs=1)


def test_the_time_left_takes_in_the_validations_that_are_to_come(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    watching = [Progress(clock=clock), Pauses(clock, 5, 15.0)]
    recipe = make_recipe(training_steps=20, training_validate_every=5)
    _, trainer = run.make_trainer(recipe, make_text(), CPU, watching)
    take(trainer, clock, monkeypatch, lambda step: 4.0)
    for step, left in estimates(capsys.readouterr().err).items():
        if step > 5:
            assert left == pytest.approx((4.0 + 3.0) * (20 - step), abs=1)


def test_no_time_left_is_told_before_it_means_something(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, trainer = run.make_trainer(make_recipe(training_steps=12), make_text(), CPU, [Progress(clock=clock)])
    monkeypatch.setattr("longspan.training.observers.progress.PLAIN_SECONDS", 0.0)
    take(trainer, clock, monkeypatch, lambda step: 1.0)
    told = estimates(capsys.readouterr().err)
    assert [step for step, left in told.items() if left is None] == [1, 2, 3, 4, 5]
    assert set(told) == set(range(1, 13))


def test_a_run_says_what_it_does_before_its_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []

    def open_text(*_: Any) -> Any:
        said.append(capsys.readouterr().err)
        return make_text(300)

    monkeypatch.setattr(run, "open_text", open_text)
    run.train(make_recipe(training_steps=1, data_corpus="a small text"), tmp_path / "run")
    assert "a small text" in said[0]
    assert "transformer-xl" in capsys.readouterr().err
    train(make_recipe(training_steps=1), tmp_path / "quiet", make_text(300), monkeypatch)
    assert capsys.readouterr().err == ""


def test_no_time_left_is_told_from_a_step_that_was_compiled(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = make_recipe(training_steps=20, training_record=True, data_documents=False)
    _, trainer = run.make_trainer(recipe, make_text(), CPU, [Progress(clock=clock)])
    take(trainer, clock, monkeypatch, lambda step: 300.0 if step in (3, 4) else 8.0)
    told = capsys.readouterr().err
    # The memory of 12 tokens is full after two steps of 8: from then on steps are recorded.
    assert [line.split()[0] for line in told.splitlines()].count("recording") == 2
    for step, left in estimates(told).items():
        assert left == (None if step <= 4 else pytest.approx(8.0 * (20 - step), abs=1))
