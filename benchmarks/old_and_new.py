"""Parts of training and dynamic evaluation, each against the plain code that it replaces, in one process.

    python benchmarks/old_and_new.py muon       the optimizer step of the sprint, captured in a CUDA graph
    python benchmarks/old_and_new.py sprint     the training loop of recipes/enwik8-12l-sprint.toml
    python benchmarks/old_and_new.py softmax    the adaptive softmax of recipes/wt103-large.toml, forward and backward
    python benchmarks/old_and_new.py dynamic    dynamic evaluation of its model, memory 1,024, segments of 512

Forms are measured in turn, several rounds, and the median round counts. `--json FILE` writes the same rows.
"""

import argparse
import contextlib
import functools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu import require_gpu
from torch import nn

from longspan.cuda_graphs import capture, warm_up
from longspan.data import Encoded
from longspan.kernels import muon
from longspan.kernels.relative_attention import split
from longspan.kernels.rms_update import RMSUpdate
from longspan.models.families import create
from longspan.nn.attention import HeadNorm
from longspan.nn.transformer import TransformerLayer
from longspan.reading import Reading
from longspan.scoring import dynamic
from longspan.scoring.losses import Arriving
from longspan.tokenizers import ByteTokenizer
from longspan.training import loop, run
from longspan.training.loop import Trainer
from longspan.training.optimizers import Muon
from longspan.training.recipe import load_recipe

SPRINT = Path(__file__).parents[1] / "recipes" / "enwik8-12l-sprint.toml"
SPRINT_MATRICES = [(512, 512)] * 60 + [(2048, 512), (512, 2048)] * 12
Row = dict[str, Any]


def milliseconds(call: Callable[[], Any], repeat: int) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(repeat):
        call()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - began) / repeat


def in_turn(forms: dict[str, Callable[[], Any]], repeat: int, rounds: int) -> dict[str, float]:
    """Median milliseconds per call of every form."""
    times: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(rounds):
        for name, call in forms.items():
            times[name].append(milliseconds(call, repeat))
    return {name: statistics.median(some) for name, some in times.items()}


def captured(call: Callable[[], Any]) -> Callable[[], None]:
    warm_up(call)
    torch.cuda.synchronize()
    graph = capture(call)

    def replay(_: Callable[[], Any] = call) -> None:  # a graph does not keep the tensors of its call alive
        graph.replay()

    return replay


def measure_muon(_: argparse.Namespace) -> list[Row]:
    """The optimizer step alone, and its error against float64; the kernels with several launch options."""

    def optimizer(dtype: torch.dtype, fused: bool) -> Muon:
        torch.manual_seed(0)
        matrices = [nn.Parameter(0.02 * torch.randn(shape, device="cuda").to(dtype)) for shape in SPRINT_MATRICES]
        for matrix in matrices:
            matrix.grad = torch.randn(matrix.shape, device="cuda").to(dtype)
        made = Muon(matrices, lr=0.02, weight_decay=0.03)
        made.fused = fused
        return made

    def weights(made: Muon) -> list[torch.Tensor]:
        return [p.detach() for p in made.param_groups[0]["params"]]

    exact = optimizer(torch.float64, False)
    before = [w.clone() for w in weights(exact)]
    exact.step()

    def error(made: Muon) -> float:
        rows = zip(weights(made), weights(exact), before, strict=True)
        return max(float((w.double() - e).norm() / (e - b).norm()) for w, e, b in rows)

    launches = {
        "kernels": muon.Launch(),
        "4 stages": muon.Launch(num_stages=4),
        "registers": muon.Launch(registers=None),
        "4 warps": muon.Launch(num_warps=4, registers=None),
        "inner 32": muon.Launch(inner=32, num_stages=4),
        "columns 256": muon.Launch(columns=256, registers=None),
        "T 64": muon.Launch(T=64, columns=128, num_warps=4, num_stages=4, registers=None),
    }
    forms, errors = {}, {}
    plain = optimizer(torch.float32, False)
    plain.step()
    errors["plain"] = error(plain)
    forms["plain"] = captured(plain.step)
    for name, launch in launches.items():
        muon.GPU = launch
        made = optimizer(torch.float32, True)
        try:
            made.step()
            errors[name] = error(made)
            forms[name] = captured(made.step)
        except Exception as problem:
            print(name, str(problem).splitlines()[0][:150])
    times = in_turn(forms, 20, 5)
    return [{"form": name, "ms": times[name], "error": errors[name]} for name in forms]


def sprint_trainer(plain: bool, layers: int) -> Trainer:
    """With plain Muon, torch's dropout, the norm of heads as compiled and the gradient of the memory, or without."""
    ids = np.random.default_rng(1).integers(0, 256, 8_000_000, dtype=np.uint8)
    text = Encoded("random bytes", "train", ids, np.array([0]), ByteTokenizer(), "", len(ids))
    recipe = load_recipe(SPRINT, [f"model.layers={layers}"])
    replaced = loop.hash_dropout
    if plain:
        loop.hash_dropout = lambda _: None
    trainer = run.make_trainer(recipe, text, torch.device("cuda"))[1]
    loop.hash_dropout = replaced
    optimizer: Any = trainer.optimizer.parts[0]
    optimizer.fused = not plain
    for module in trainer.model.modules():
        if isinstance(module, TransformerLayer):
            module.detached_memory = not plain
        if isinstance(module, HeadNorm):
            module.fused = not plain
    return trainer


def measure_sprint(given: argparse.Namespace) -> list[Row]:
    """Steps of the training loop with the plain forms and with the new ones, and a profile of a new step."""
    began = time.perf_counter()
    trainers = {name: sprint_trainer(name == "plain", given.layers) for name in ("plain", "new")}
    found: dict[str, list[float]] = {name: [] for name in trainers}
    for name, trainer in trainers.items():
        for _ in range(5):  # until the step is captured and replayed
            trainer.take_step()
        torch.cuda.synchronize()
        print(f"{name} is captured after {time.perf_counter() - began:.0f} s", flush=True)
    for _ in range(given.rounds):
        for name, trainer in trainers.items():
            found[name].append(milliseconds(trainer.take_step, 30))
            print(f"{name} {found[name][-1]:.2f} ms", flush=True)
    if given.profile:
        profile(trainers["new"].take_step, given.profile)
    medians = {name: statistics.median(times) for name, times in found.items()}
    tokens = trainer.config.batch * trainer.config.segment
    return [
        {"form": name, "ms": ms, "tokens/s": 1e3 * tokens / ms, "ratio": medians["plain"] / ms}
        for name, ms in medians.items()
    ]


def measure_softmax(given: argparse.Namespace) -> list[Row]:
    """Milliseconds and peak memory of the losses and their gradients, with as many rare words as WikiText-103 has."""
    config = load_recipe(SPRINT.parent / "wt103-large.toml").model
    torch.manual_seed(0)
    embedding = config.make_embedding()
    head = config.make_head(embedding)
    for parameter in {*embedding.parameters(), *head.parameters()}:
        nn.init.normal_(parameter, 0, 0.02)
    head.cuda()
    cluster = torch.multinomial(torch.tensor([0.93, 0.03, 0.035, 0.005]), 128 * 384, replacement=True)
    edges = torch.tensor(head.clusters)[cluster]
    targets = (edges[:, 0] + torch.rand(len(edges)) * (edges[:, 1] - edges[:, 0])).long().view(128, 384).cuda()
    hidden = torch.randn(128, 384, config.width, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weights = [hidden, *head.parameters()]
    found: dict[str, tuple[Any, ...]] = {}

    def losses() -> tuple[torch.Tensor, ...]:
        with torch.autocast("cuda", torch.bfloat16):
            all_losses = head.losses(hidden, targets)
        return all_losses.detach(), *torch.autograd.grad(all_losses.mean(), weights)

    def form(static: bool) -> Callable[[], None]:
        def call() -> None:
            head.static = static
            losses()

        return call

    rows: list[Row] = []
    for name, static in (("plain", False), ("kernels", True)):
        form(static)()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        head.static = static
        found[name] = losses()
        rows.append({"form": name, "GiB": (torch.cuda.max_memory_allocated() - before) / 2**30})
    forms = {"plain": form(False), "kernels": form(True), "captured": captured(form(True))}
    times = in_turn(forms, 5, given.rounds)
    for row in rows:
        row["ms"] = times[row["form"]]
    apart = [
        (a.float() - b.float()).norm() / b.float().norm() for a, b in zip(found["kernels"], found["plain"], strict=True)
    ]
    print("largest difference", float(max(apart)), "of losses", float(apart[0]))
    if given.profile:
        profile(form(True), given.profile)
    return [*rows, {"form": "captured", "ms": times["captured"]}]


class Waiting(Arriving):
    """Losses that the host waits for before it queues the next segment."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        torch.cuda.synchronize()


def measure_dynamic(given: argparse.Namespace) -> list[Row]:
    """Bytes per second once the step is captured; losses of all forms must agree."""
    reading = Reading(segment=512, memory=1024, clamp=1023)
    recipe = load_recipe(SPRINT).with_vocabulary(256)
    torch.manual_seed(0)
    model = create(recipe.family, recipe.model, reading).cuda().eval()
    ids = np.random.default_rng(1).integers(0, 64, 512 * given.segments + 1, dtype=np.uint8)
    suits = RMSUpdate.suits

    def losses(plain: bool, compiled: bool, text: Any = ids) -> tuple[float, float, float]:
        """Bytes per second, seconds before the tenth segment, and the mean loss."""
        RMSUpdate.suits = staticmethod((lambda _: False) if plain else suits)  # type: ignore[method-assign]
        dynamic.WORTH_COMPILING = 0 if compiled else 10**9
        dynamic.Arriving = Waiting if plain else Arriving  # type: ignore[misc]
        began, seen, total = time.perf_counter(), 0, 0.0
        for chunk in dynamic.dynamic_losses(model, text, reading, precision=torch.bfloat16):
            total, seen = total + float(chunk.losses.sum()), seen + 1
            if seen == 10:
                steady = time.perf_counter()
        now = time.perf_counter()
        return (len(text) - 1 - 5120) / (now - steady), steady - began, total / (len(text) - 1)

    forms: dict[str, tuple[Any, ...]] = {"plain": (True, False), "kernel": (False, False), "compiled": (False, True)}
    for name in given.without:
        forms[f"compiled, {name}"] = (False, True)
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in forms}
    for _ in range(given.rounds):
        for name, form in forms.items():
            dynamic.Learner.rounds = False if name.endswith("casts") else None
            with split.using(1) if "plain" in name or name.endswith("whole") else contextlib.nullcontext():
                found[name].append(losses(*form))
            print(name, *(f"{value:.6g}" for value in found[name][-1]), flush=True)
    dynamic.Learner.rounds = None
    medians = {name: statistics.median(rate for rate, *_ in some) for name, some in found.items()}
    if given.profile:
        profile(lambda: losses(False, True, ids[: 512 * 24 + 1]), given.profile, 1)  # 20 of 24 are replayed
    return [
        {"form": name, "bytes/s": rate, "ratio": rate / medians["plain"], "loss": found[name][0][2]}
        for name, rate in medians.items()
    ]


def profile(call: Callable[[], Any], file: Path, repeat: int = 3) -> None:
    """Milliseconds per call of every kernel, most expensive first."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as found:
        for _ in range(repeat):
            call()
        torch.cuda.synchronize()
    events = sorted(found.key_averages(), key=lambda event: -event.self_device_time_total)
    lines = [f"{e.self_device_time_total / 1e3 / repeat:8.3f} {e.count / repeat:7.1f} {e.key[:110]}" for e in events]
    total = sum(event.self_device_time_total for event in events) / 1e3 / repeat
    file.write_text("\n".join([f"{total:8.3f} ms in kernels", *lines]) + "\n")


def show(rows: list[Row]) -> None:
    for row in rows:
        print(
            "  ".join(
                f"{key} {value:.4g}" if isinstance(value, float) else f"{value:<14}" for key, value in row.items()
            )
        )


def save(file: Path | None, **results: Any) -> None:
    """Write results as JSON, with what they were measured on."""
    if file is not None:
        facts = {
            "date": time.strftime("%Y-%m-%d"),
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
        } | results
        file.write_text(json.dumps(facts, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = {"muon": measure_muon, "sprint": measure_sprint, "softmax": measure_softmax, "dynamic": measure_dynamic}
    parser.add_argument("part", choices=parts)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--segments", type=int, default=300)
    parser.add_argument("--profile", type=Path, help="write the kernels of a step to this file")
    parser.add_argument(
        "--without",
        nargs="*",
        default=[],
        choices=["whole", "casts"],
        help="dynamic: also without split blocks of queries, without rounded weights",
    )
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    require_gpu()
    measure = functools.partial(parts[given.part], given)
    rows = measure()
    show(rows)
    save(given.json, part=given.part, rows=rows)


if __name__ == "__main__":
    main()
