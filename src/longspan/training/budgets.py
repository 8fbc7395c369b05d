"""One run for several budgets: a trunk with a constant learning rate, and a short decay of it for each budget.

The loss after a decay is close to that of a run that was planned for that budget (Hu et al. 2024, warmup-stable-decay;
Haegele et al. 2024), so a trunk of the longest budget serves all of them. All of it happens in one process and with one
trainer: on a GPU a branch in its own process would compile its steps again.

    OUT/trunk         the run with the constant rate
    OUT/steps-N       the run of a budget of N steps: a branch of the trunk that ends with its decay
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from longspan.checkpoints import store
from longspan.checkpoints.manifest import Verified
from longspan.data import Encoded
from longspan.errors import ConfigError
from longspan.training import run
from longspan.training.dry_run import Estimate, dry_run, seconds_of
from longspan.training.loop import Trainer
from longspan.training.processes import Processes
from longspan.training.recipe import Recipe

TRUNK = "trunk"
DECAY = 0.2


def budget_folder(out: Path, steps: int) -> Path:
    return out / f"steps-{steps}"


def decay_start(steps: int, decay: float) -> int:
    """The step of the trunk at which the decay of a budget starts."""
    return max(1, steps - max(1, round(decay * steps)))


def trunk_recipe(recipe: Recipe, steps: int) -> Recipe:
    """The recipe of the trunk up to a step: a constant rate after the warm-up, without validation."""
    return _with(recipe, steps=steps, schedule="constant", cooldown=0.0, keep=1, validate_every=0, patience=0)


def branch_recipe(recipe: Recipe, steps: int, decay: float) -> Recipe:
    """The recipe of a budget: the rate falls linearly to the floor between `decay_start` and the last step."""
    cooldown = (steps - decay_start(steps, decay)) / steps
    every = {"keep": 1, "validate_every": max(1, steps), "patience": 0}
    return _with(recipe, steps=steps, schedule="constant", cooldown=cooldown, **every)


def _with(recipe: Recipe, **values: Any) -> Recipe:
    training = dataclasses.replace(recipe.training, tokens=None, seconds=None, **values)
    return dataclasses.replace(recipe, training=training)


def check_budgets(recipe: Recipe, budgets: Sequence[int], decay: float) -> list[int]:
    """The budgets in order. They must be possible with this recipe."""
    if not budgets or min(budgets) < 2:
        raise ConfigError(f"budgets {list(budgets)} must be numbers of steps, each at least 2")
    if not 0 < decay < 1:
        raise ConfigError(
            f"decay {decay} must be between 0 and 1; it is the fraction of a budget in which the learning rate "
            f"decays, for example {DECAY}"
        )
    if recipe.training.averaging != "none":
        raise ConfigError(
            f"training.averaging={recipe.training.averaging!r} and budgets both replace a learning rate decay, "
            "so they cannot be combined; set training.averaging=none"
        )
    if recipe.training.warmup > decay_start(min(budgets), decay):
        raise ConfigError(
            f"training.warmup={recipe.training.warmup} does not end before the decay of {min(budgets)} steps; "
            "lower it, or use a larger budget"
        )
    return sorted(set(budgets))


def dry_run_budgets(
    recipe: Recipe, text: Encoded, budgets: Sequence[int], decay: float, device: torch.device
) -> Estimate:
    """The cost of the trunk and all decays, estimated from a few measured steps."""
    budgets = check_budgets(recipe, budgets, decay)
    cost = dry_run(trunk_recipe(recipe, budgets[-1]), text, device)

    def until(step: int) -> float:
        return seconds_of(trunk_recipe(recipe, step), cost.tokens_per_second)

    decays = sum(until(steps) - until(decay_start(steps, decay)) for steps in budgets)
    return dataclasses.replace(cost, seconds=until(decay_start(budgets[-1], decay)) + decays)


class _OneTrainer:
    """Makes the trainer of the first run, and prepares the same one for the runs that continue a checkpoint."""

    def __init__(self) -> None:
        self.trainer: Trainer | None = None

    def prepare(self, recipe: Recipe, out: Path) -> run.Prepare:
        def prepare(start: Verified | None, place: torch.device, processes: Processes) -> run.Prepared:
            if processes.distributed:
                raise ConfigError("budgets can only be trained by a single process; start longspan without torchrun")
            text = run.open_text(recipe, "train")
            observers = run.default_observers(recipe, out, text, processes)
            if self.trainer is None or start is None:
                _, self.trainer = run.make_trainer(recipe, text, place, observers, processes, resumed=start is not None)
            else:
                self.trainer.reuse(recipe.with_vocabulary(text.tokenizer.size), observers)
            return run.Prepared(self.trainer, text)

        return prepare


def train_budgets(
    recipe: Recipe, out: Path, budgets: Sequence[int], decay: float = DECAY, *, device: torch.device | str = "cpu"
) -> list[run.Outcome]:
    """Train the run of each budget in OUT/steps-N. A second call continues where the first was stopped, with the same
    recipe, text and decay; more budgets can be added as long as their decay starts after the last one of the trunk."""
    run.check_outside_data(out, recipe.data)
    one, trunk = _OneTrainer(), out / TRUNK
    outcomes: list[run.Outcome] = []
    for steps in check_budgets(recipe, budgets, decay):
        folder, start = budget_folder(out, steps), decay_start(steps, decay)
        # A finished budget is opened too: that checks its recipe and text.
        finished = store.locate(folder / f"checkpoint-{steps}") is not None
        if not finished and not any(path.name == f"checkpoint-{start}" for path in store.numbered(trunk)[:1]):
            made = trunk_recipe(recipe, start)
            outcome = run.run_in_folder(made, trunk, one.prepare(made, trunk), resume="auto", device=device)
            if outcome.interrupted is not None:
                return [*outcomes, outcome]
            if outcome.step != start:
                raise ConfigError(
                    f"the trunk in {trunk} is already at step {outcome.step}, but the decay for {steps} steps starts "
                    f"at step {start}; use another folder for this budget"
                )
        made = branch_recipe(recipe, steps, decay)
        begin = "auto" if (folder / run.RECIPE).is_file() else str(trunk / f"checkpoint-{start}")
        outcome = run.run_in_folder(made, folder, one.prepare(made, folder), resume=begin, device=device)
        outcomes.append(outcome)
        if outcome.interrupted is not None:
            break
    return outcomes
