"""Progress lines of a run and the estimate of the time left, with a simulated clock."""

import re
from pathlib import Path
from typing import Any

import pytest

from longspan.training import run
from longspan.training.observers.progress import Progress
from tests.training.conftest import make_recipe, make_text, train
from tests.training.test_speed import CPU, Clock, Pauses, take
from tests.training.test_speed import clock as clock  # a fixture


def estimates(output: str) -> dict[int, float | None]:
    """The seconds left in the line of each step, or None."""
    found = {}
    for line in output.splitlines():
        if step := re.match(r"step (\d+)  [\d.]+ bits", line):
            left = re.search(r"(\d+):(\d\d) left", line)
            found[int(step[1])] = None if left is None else 60.0 * int(left[1]) + int(left[2])
    return found


@pytest.mark.parametrize("limit", [{"training_steps": 20}, {"training_steps": None, "training_tokens": 20 * 32}])
def test_the_time_left_ignores_the_first_step(
    limit: dict[str, Any], clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, trainer = run.make_trainer(make_recipe(**limit), make_text(), CPU, [Progress(clock=clock)])
    take(trainer, clock, monkeypatch, lambda step: 600.0 if step == 1 else 8.0)
    shown = estimates(capsys.readouterr().err)
    assert shown[1] is None
    assert len(shown) > 5
    for step, left in shown.items():
        assert step == 1 or left == pytest.approx(8.0 * (20 - step), abs=1)


def test_the_time_left_includes_future_validations(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    observers = [Progress(clock=clock), Pauses(clock, 5, 15.0)]
    recipe = make_recipe(training_steps=20, training_validate_every=5)
    _, trainer = run.make_trainer(recipe, make_text(), CPU, observers)
    take(trainer, clock, monkeypatch, lambda step: 4.0)
    for step, left in estimates(capsys.readouterr().err).items():
        if step > 5:
            assert left == pytest.approx((4.0 + 3.0) * (20 - step), abs=1)


def test_the_time_left_is_not_shown_too_early(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, trainer = run.make_trainer(make_recipe(training_steps=12), make_text(), CPU, [Progress(clock=clock)])
    monkeypatch.setattr("longspan.training.observers.progress.PLAIN_SECONDS", 0.0)
    take(trainer, clock, monkeypatch, lambda step: 1.0)
    shown = estimates(capsys.readouterr().err)
    assert [step for step, left in shown.items() if left is None] == [1, 2, 3, 4, 5]
    assert set(shown) == set(range(1, 13))


def test_a_run_prints_text_and_model_before_its_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    printed: list[str] = []

    def open_text(*_: Any) -> Any:
        printed.append(capsys.readouterr().err)
        return make_text(300)

    monkeypatch.setattr(run, "open_text", open_text)
    run.train(make_recipe(training_steps=1, data_corpus="a small text"), tmp_path / "run")
    assert "a small text" in printed[0]
    assert "transformer-xl" in capsys.readouterr().err
    train(make_recipe(training_steps=1), tmp_path / "quiet", make_text(300), monkeypatch)
    assert capsys.readouterr().err == ""


def test_the_time_left_ignores_steps_that_are_captured(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = make_recipe(training_steps=20, training_cuda_graph=True, data_documents=False)
    _, trainer = run.make_trainer(recipe, make_text(), CPU, [Progress(clock=clock)])
    take(trainer, clock, monkeypatch, lambda step: 300.0 if step in (3, 4) else 8.0)
    output = capsys.readouterr().err
    # The memory of 12 tokens is full after two steps of 8. From then on steps are captured.
    assert [line.split()[0] for line in output.splitlines()].count("capturing") == 2
    for step, left in estimates(output).items():
        assert left == (None if step <= 4 else pytest.approx(8.0 * (20 - step), abs=1))
