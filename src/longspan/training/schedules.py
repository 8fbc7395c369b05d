"""What changes during a run: the learning rate and, with jitter, the length of segments."""

import math

import numpy as np

from longspan.training.recipe import TrainingConfig

CUT, RATIO = 0.1, 32.0
"""Howard & Ruder 2018, section 3.2: the fraction of the run in which the rate rises, and how much smaller the lowest
rate is than the highest."""


def segment_at(config: TrainingConfig, segment: int, step: int) -> int:
    """The length of the segment at `step`, where `segment` is that of the recipe (Merity et al. 2017, section 4.1).

    With jitter s it is drawn from N(segment, s) with probability 0.95, else from N(segment / 2, s), so that segments
    end at other positions in every pass. The draw depends only on the seed and the step, so a resume repeats it.
    """
    if not config.segment_jitter:
        return segment
    rng = np.random.default_rng([config.seed, step])
    mean = segment if rng.random() < 0.95 else segment / 2
    return max(min(5, segment), int(rng.normal(mean, config.segment_jitter)))


def progress(config: TrainingConfig, step: int, tokens: int, seconds: float) -> float:
    """The completed fraction of the run, 0 to 1, by the limit that is nearest."""
    shares = [
        done / limit
        for done, limit in ((step, config.steps), (tokens, config.tokens), (seconds, config.seconds))
        if limit is not None
    ]
    return min(1.0, max(shares))


def lr_factor(config: TrainingConfig, step: int, done: float) -> float:
    """The factor of the learning rate at `step` (counted from 0) when the fraction `done` of the run is completed.

    Warm-up is linear and replaces the schedule, as in the authors' code: their cosine starts at step 0, not at the
    end of the warm-up.
    """
    if step < config.warmup:
        return (step + 1) / config.warmup
    slanted = done / CUT if done < CUT else (1.0 - done) / (1.0 - CUT)
    shapes = {
        "constant": 1.0,
        "cosine": 0.5 * (1 + math.cos(math.pi * done)),
        "linear": 1.0 - done,
        "inverse-sqrt": math.sqrt(max(config.warmup, 1) / (step + 1)),
        "slanted-triangular": (1.0 + slanted * (RATIO - 1.0)) / RATIO,
    }
    factor = shapes[config.schedule]
    if config.cooldown:
        factor *= min(1.0, (1.0 - done) / config.cooldown)
    return config.lr_floor + (1.0 - config.lr_floor) * factor
