"""What changes over a run: the learning rate, and whatever else a recipe gives as [step, value] pairs."""

import math

import numpy as np

from longspan.training.recipe import Steps, TrainingConfig, as_steps


def value_at(schedule: int | Steps, step: int) -> int:
    """The value in force at `step` (counted from 0)."""
    return next(value for begin, value in reversed(as_steps(schedule)) if begin <= step)


def segment_at(config: TrainingConfig, whole: int, step: int) -> int:
    """The length of the segment at `step`, `whole` being that of the recipe: Merity et al. 2017, section 4.1.

    With jitter s it is drawn from N(whole, s) nineteen times in twenty, else from N(whole / 2, s), so that segments
    end elsewhere in every pass. The draw follows from the seed and the step alone: a resume draws it again.
    """
    if not config.segment_jitter:
        return whole
    chance = np.random.default_rng([config.seed, step])
    mean = whole if chance.random() < 0.95 else whole / 2
    return max(min(5, whole), int(chance.normal(mean, config.segment_jitter)))


def progress(config: TrainingConfig, step: int, tokens: int, seconds: float) -> float:
    """How much of the run is done, 0 to 1, by the limit that is nearest."""
    shares = [
        done / limit
        for done, limit in ((step, config.steps), (tokens, config.tokens), (seconds, config.seconds))
        if limit is not None
    ]
    return min(1.0, max(shares))


def lr_factor(config: TrainingConfig, step: int, done: float) -> float:
    """What the learning rate is multiplied with at `step` (counted from 0), `done` of the run being over.

    Warm-up is linear and takes the place of the schedule while it lasts, as in the authors' code: their cosine counts
    from step 0, not from the end of the warm-up.
    """
    if step < config.warmup:
        return (step + 1) / config.warmup
    shapes = {
        "constant": 1.0,
        "cosine": 0.5 * (1 + math.cos(math.pi * done)),
        "linear": 1.0 - done,
        "inverse-sqrt": math.sqrt(max(config.warmup, 1) / (step + 1)),
    }
    factor = shapes[config.schedule]
    if config.cooldown:
        factor *= min(1.0, (1.0 - done) / config.cooldown)
    return config.lr_floor + (1.0 - config.lr_floor) * factor
