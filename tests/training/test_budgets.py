"""Several budgets from one trunk: each ends as a branch that was trained in a process of its own."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from longspan.checkpoints import store
from longspan.errors import ConfigError, LongspanError
from longspan.training import budgets, run
from longspan.training.budgets import branch_recipe, dry_run_budgets, train_budgets, trunk_recipe
from longspan.training.loop import Trainer
from longspan.training.observer import Observer

from .conftest import content, make_recipe, make_text


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small text, and no observers that only print or draw."""
    monkeypatch.setattr(run, "open_text", lambda *_: make_text(900))
    for name in ("TensorBoard", "Progress"):
        monkeypatch.setattr(run, name, lambda *_: Observer())


def rates(folder: Path) -> dict[int, float]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return {row["step"]: row["lr"] for row in map(json.loads, lines)}


@pytest.mark.usefixtures("opened")
def test_each_budget_equals_a_branch_of_its_own(tmp_path: Path) -> None:
    recipe = make_recipe(training_optimizer="muon", training_accumulate=2)
    outcomes = train_budgets(recipe, tmp_path / "all", [20, 8], 0.25)
    assert [(outcome.out.name, outcome.step) for outcome in outcomes] == [("steps-8", 8), ("steps-20", 20)]
    for steps, start in ((8, 6), (20, 15)):
        run.train(trunk_recipe(recipe, start), tmp_path / f"trunk-{start}")
        branch = tmp_path / f"branch-{steps}"
        origin = str(tmp_path / f"trunk-{start}" / f"checkpoint-{start}")
        run.train(branch_recipe(recipe, steps, 0.25), branch, resume=origin)
        checkpoint = f"checkpoint-{steps}"
        assert content(tmp_path / "all" / f"steps-{steps}" / checkpoint) == content(branch / checkpoint)
        scores = [folder / "validation.jsonl" for folder in (branch, tmp_path / "all" / f"steps-{steps}")]
        assert scores[0].read_text() == scores[1].read_text() != ""
    # Warm-up, constant, and then linear to 0: the rate of a step is that of the fraction done before it.
    assert rates(tmp_path / "all" / "trunk")[2] == pytest.approx(0.01 * 2 / 3)
    assert {rates(tmp_path / "all" / "trunk")[step] for step in range(3, 16)} == {0.01}
    found = rates(tmp_path / "all" / "steps-20")
    assert found == pytest.approx({16: 0.01, 17: 0.008, 18: 0.006, 19: 0.004, 20: 0.002})


@pytest.mark.gpu
@pytest.mark.usefixtures("opened")
@pytest.mark.parametrize("captured", [False, True])
def test_on_cuda_the_trainer_is_used_again(tmp_path: Path, captured: bool) -> None:
    """After a branch the trunk continues with the weights it had, also if steps are captured as CUDA graphs."""
    recipe = make_recipe(training_cuda_graph=captured, training_compile=False, training_precision="float32")
    train_budgets(recipe, tmp_path / "all", [8, 20], 0.25, device="cuda")
    run.train(trunk_recipe(recipe, 15), tmp_path / "trunk", device="cuda")
    origin = str(tmp_path / "trunk" / "checkpoint-15")
    run.train(branch_recipe(recipe, 20, 0.25), tmp_path / "branch", resume=origin, device="cuda")
    for own, other in (("trunk", "trunk"), ("steps-20", "branch")):
        rows = [[json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
                for folder in (tmp_path / "all" / own, tmp_path / other)]  # fmt: skip
        assert rows[0] == pytest.approx(rows[1], rel=1e-3)


def test_a_dry_run_counts_the_trunk_and_all_decays() -> None:
    cost = dry_run_budgets(
        make_recipe(training_batch=[[0, 4], [10, 2]]), make_text(900), [20, 8], 0.25, torch.device("cpu")
    )
    trunk, decays = 10 * 32 + 5 * 16, 2 * 32 + 5 * 16  # tokens
    assert cost.seconds == pytest.approx((trunk + decays) / cost.tokens_per_second)


@pytest.mark.usefixtures("opened")
def test_a_second_call_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = make_recipe()
    train_budgets(recipe, tmp_path / "whole", [8, 20], 0.25)
    taken = run.run_in_folder

    def stopped(made: Any, out: Path, *args: Any, **more: Any) -> Any:
        if out.name == "steps-20":
            raise KeyboardInterrupt
        return taken(made, out, *args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(run, "run_in_folder", stopped)
        with pytest.raises(KeyboardInterrupt):
            train_budgets(recipe, tmp_path / "parts", [8, 20], 0.25)
    again = train_budgets(recipe, tmp_path / "parts", [8, 20], 0.25)
    assert [outcome.took_steps for outcome in again] == [0, 5]
    ends = [tmp_path / name / "steps-20" / "checkpoint-20" for name in ("whole", "parts")]
    assert content(ends[0]) == content(ends[1])
    with pytest.raises(ConfigError, match="trunk"):
        train_budgets(recipe, tmp_path / "parts", [12], 0.25)  # its decay would start before the end of the trunk
    for made, decay, key in (
        (recipe, 0.5, "cooldown"),
        (make_recipe(model_width=8), 0.25, "width"),
        (make_recipe(training_seed=5), 0.25, "seed"),
    ):
        with pytest.raises(ConfigError, match=rf"steps-8 has \w+\.{key}"):
            train_budgets(made, tmp_path / "parts", [8, 20], decay)
    monkeypatch.setattr(run, "open_text", lambda *_: make_text(800))
    with pytest.raises(LongspanError, match="fingerprint"):
        train_budgets(recipe, tmp_path / "parts", [8, 20], 0.25)


@pytest.mark.usefixtures("opened")
def test_a_trunk_that_was_deleted_starts_with_new_weights(tmp_path: Path) -> None:
    recipe = make_recipe()
    train_budgets(recipe, tmp_path / "whole", [8, 20], 0.25)
    train_budgets(recipe, tmp_path / "parts", [8], 0.25)
    shutil.rmtree(tmp_path / "parts" / "trunk")
    train_budgets(recipe, tmp_path / "parts", [8, 20], 0.25)
    ends = [tmp_path / name / "steps-20" / "checkpoint-20" for name in ("whole", "parts")]
    assert content(ends[0]) == content(ends[1])


@pytest.mark.usefixtures("opened")
def test_a_trunk_that_is_killed_continues_at_its_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recipe's `save_every` holds in the trunk too: nothing is saved by a process that is killed."""
    recipe = make_recipe(training_save_every=4)
    train_budgets(recipe, tmp_path / "whole", [20], 0.25)
    taken = Trainer.take_step

    def killed(trainer: Trainer) -> None:
        if trainer.step == 10:
            raise MemoryError
        taken(trainer)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "take_step", killed)
        with pytest.raises(MemoryError):
            train_budgets(recipe, tmp_path / "parts", [20], 0.25)
    assert [path.name for path in store.numbered(tmp_path / "parts" / "trunk")] == ["checkpoint-8"]
    train_budgets(recipe, tmp_path / "parts", [20], 0.25)
    ends = [tmp_path / name / "steps-20" / "checkpoint-20" for name in ("whole", "parts")]
    assert content(ends[0]) == content(ends[1])


@pytest.mark.parametrize(
    ("steps", "decay", "changes"),
    [
        ([], 0.2, {}),
        ([1], 0.2, {}),
        ([20], 1.5, {}),
        ([20], 0.2, {"training_averaging": "ema"}),
        ([20], 0.2, {"training_warmup": 18}),
    ],
)
def test_impossible_budgets_are_an_error(steps: list[int], decay: float, changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        budgets.check_budgets(make_recipe(**changes), steps, decay)
