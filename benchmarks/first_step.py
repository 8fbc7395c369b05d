"""Seconds from the command to the first steps of a recipe, by phase, and what the compiler found in its caches.

    python benchmarks/first_step.py recipes/enwik8-12l-sprint.toml [--bytes 100000000]

Run it twice: the second run has a warm compile cache. The text is random bytes of the size of enwik8.
"""

import time

BEGAN = time.perf_counter()

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any


def mark(what: str, since: list[float] = [BEGAN]) -> None:  # noqa: B006 (keeps the time of the last call)
    now = time.perf_counter()
    print(f"{now - BEGAN:7.2f}  {now - since[0]:+7.2f}  {what}", flush=True)
    since[0] = now


def timed(module: Any, name: str) -> None:
    """Print how long a function takes whenever it is called."""
    function = getattr(module, name)

    def wrapped(*arguments: Any, **options: Any) -> Any:
        began = time.perf_counter()
        found = function(*arguments, **options)
        print(f"{'':16}  {time.perf_counter() - began:7.2f} in {name}", flush=True)
        return found

    setattr(module, name, wrapped)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--bytes", type=int, default=100_000_000)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()

    import numpy as np
    import torch

    mark("import torch")
    from longspan.device import find_device
    from longspan.errors import LongspanError
    from longspan.training import run
    from longspan.training.loop import Trainer

    mark("import longspan.training")
    try:
        torch.zeros(1, device=find_device(given.device))
    except LongspanError as error:
        parser.error(str(error))
    mark("start the device")
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text"
        text.write_bytes(np.random.default_rng(1).integers(0, 256, given.bytes, dtype=np.uint8).tobytes())
        mark("write random bytes (not part of the command)")
        for name in ("open_text", "default_observers", "make_trainer", "preflight", "write_run_info"):
            timed(run, name)
        Trainer.take_step = steps(Trainer.take_step, given.steps)  # type: ignore[method-assign]
        recipe = run.resolve(given.recipe, given.set, data=str(text))
        run.train(recipe, Path(folder) / "run", device=given.device)
    report()


def steps(take_step: Callable[..., None], count: int) -> Callable[..., None]:
    def take(trainer: Any) -> None:
        if trainer.step == 0:
            mark("until the first step")
        take_step(trainer)
        trainer.settle()
        mark(f"step {trainer.step}")
        trainer.stopped_early = trainer.step >= count

    return take


def report() -> None:
    """What the compiler spent its time on."""
    from torch._dynamo.utils import compilation_time_metrics, counters

    for name, times in sorted(compilation_time_metrics.items(), key=lambda item: -sum(item[1]))[:24]:
        print(f"{sum(times):8.2f} s {len(times):4} x {name}")
    for name in ("aot_autograd", "inductor"):
        print(name, {key: value for key, value in counters[name].items() if "cache" in key})


if __name__ == "__main__":
    main()
