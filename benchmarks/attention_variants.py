"""Variants of relative attention, against FlexAttention without the position term, in one process.

    python benchmarks/attention_variants.py [--shapes 512,2048,8192] [--variants today,stored] [--json FILE]
    python benchmarks/attention_variants.py --training [--variants today,twice,in-turn+twice]

Every variant is first checked against the reference in float64, and its CUDA graph against kernels that compute the
scores again. Then all of them are timed in turn, forward and backward, plain and captured in a CUDA graph, and the
forward pass alone, captured; the median round counts, and the spread is that of captured rounds, (max - min) / median.
A turn has 12 calls, or as many as take `--burst` seconds: a kernel may be slower for longer at a time.
`wide`, `wide-768` and `wide-2048` have heads of 128. `eval` is the forward pass of 32,768 queries with a window of
3,800. `--variants forward` measures all variants of the forward kernel, and a plus sign joins one of them and one of
the backward pass. `today` is checked with the plans of the complete shape. Kernels are compiled and run beforehand in
parallel processes, and with `--rounds 0` nothing else is done. A variant that fails there is left out, because an
illegal access would end the measurements of all others. `--training` measures training steps of `longspan bench train`
instead, against its rival.
"""

import argparse
import contextlib
import copy
import dataclasses
import functools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gpu import require_gpu
from old_and_new import captured, milliseconds, save

from longspan.cuda_graphs import CapturedStep, capture, warm_up
from longspan.experiments.bench import timing, train
from longspan.experiments.bench.attention import _rival
from longspan.kernels.relative_attention import fused, reference, split, stored
from longspan.models.families import build
from longspan.reading import Reading

SEGMENT = 512


class Shape(NamedTuple):
    """Memory, batch, heads, head size, queries. With a window, only the forward pass is measured."""

    M: int
    B: int
    H: int
    D: int
    L: int = SEGMENT
    window: int | None = None


SHAPES = {
    "512": Shape(512, 64, 8, 64),
    "2048": Shape(2048, 64, 8, 64),
    "8192": Shape(8192, 16, 8, 64),
    "wide": Shape(512, 64, 4, 128),
    "wide-768": Shape(768, 16, 8, 128, 768),  # recipes/enwik8-large.toml on four devices
    "wide-2048": Shape(2048, 32, 4, 128),
    "eval": Shape(3800, 1, 8, 64, 32768, 3800),
}
MIB = 1 << 20
LANES = 2, 3, 4, 6
Plan = stored.Plan
VARIANTS: dict[str, Plan | None] = {  # plans of the backward pass; None computes the scores again
    "twice": None,
    "stored": Plan(),
    "by-distance": Plan(planes=3),
    "ring-104": Plan(limit=104 * MIB),
    "ring-416": Plan(limit=416 * MIB),
    "lag-32": Plan(ahead=256, limit=416 * MIB),
    "lag-64": Plan(ahead=512, limit=416 * MIB),
    "keys-512": Plan(keys=512),
    "keys-2048": Plan(keys=2048, limit=416 * MIB),
    "keys-all": Plan(keys=1 << 30, limit=1024 * MIB),
    "by-distance-416": Plan(planes=3, limit=416 * MIB),
    "by-distance-256": Plan(planes=3, ahead=256),  # two programs per multiprocessor with heads of 128
    "no-prefetch": Plan(prefetch=False),
    "two-stages": Plan(stages=2),
    "registers": Plan(registers=None),
    # A launch per role, on several streams.
    "lanes-2-2048": Plan(lanes=2, keys=2048, limit=416 * MIB),
    **{f"lanes-{n}": Plan(lanes=n, keys=4096, limit=416 * MIB) for n in LANES},
    **{f"lanes-{n}-832": Plan(lanes=n, keys=4096, limit=832 * MIB) for n in LANES},
    **{f"lanes-{n}-by-distance": Plan(lanes=n, keys=4096, limit=416 * MIB, planes=3) for n in LANES},
    **{f"lanes-{n}-no-prefetch": Plan(lanes=n, keys=4096, limit=416 * MIB, prefetch=False) for n in LANES},
    **{f"wide-{n}-no-prefetch": Plan(lanes=n, keys=4096, limit=416 * MIB, planes=3, prefetch=False) for n in LANES},
}
FORWARD = {  # launch options of the forward kernel
    "in-turn": fused.Launch(64, 4, 2, fused.HALF, 168),
    "table": fused.Launch(64, 4, 2, fused.HALF, 168, table=True),
    "ahead": fused.Launch(64, 4, 2, fused.HALF, 168, ahead=True),
    "warp-3": fused.Launch(64, 4, 3, fused.WARP),
    # For heads of 128.
    "still": fused.Launch(64, 4, 2, fused.STILL, ahead=True),  # two programs per multiprocessor, the default
    "warp-2": fused.Launch(64, 4, 2, fused.WARP),  # one program per multiprocessor
}
DEFAULT = "today,stored,by-distance,no-prefetch,ring-416,lag-32,lag-64,keys-2048,keys-all"
BOUND = 1.5e-2
LONGEST = 240.0
"""Time limit, in seconds, of a process that compiles and runs a variant."""


def draw(M: int, B: int, H: int, D: int, L: int = SEGMENT) -> list[torch.Tensor]:
    """Inputs in the memory layout of a projection."""

    def heads(length: int) -> torch.Tensor:
        return torch.randn(B, length, H, D, device="cuda", dtype=torch.bfloat16).transpose(1, 2)

    rest = [torch.randn(H, *size, D, device="cuda", dtype=torch.bfloat16) for size in ((M + L,), (), ())]
    return [heads(L), heads(M + L), heads(M + L), *rest]


def launched(forward: fused.Launch, others: Callable[..., fused.Launch], kernel: str, *some: Any, **more: Any) -> Any:
    return forward if kernel == "forward" else others(kernel, *some, **more)


@contextlib.contextmanager
def using(variant: str) -> Iterator[None]:
    """Run calls of this block as a variant; `today` is what `fused` chooses."""
    names, launch = variant.split("+"), fused.launch
    with contextlib.ExitStack() as stack:
        for name in names:
            if name in VARIANTS:
                stack.enter_context(stored.using(VARIANTS[name]))
            elif name in FORWARD:
                fused.launch = functools.partial(launched, FORWARD[name], launch)
                stack.callback(setattr, fused, "launch", launch)
                stack.enter_context(split.using(1))  # programs that share a block of queries use none of these options
            elif name != "today":
                raise SystemExit(f"unknown variant {name}: {', '.join(('today', *VARIANTS, *FORWARD))}")
        yield


def gradients(attention: Callable[..., torch.Tensor], tensors: list[torch.Tensor], grad: torch.Tensor) -> Any:
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    out = attention(*leaves)
    return out.detach(), *torch.autograd.grad(out, leaves, grad)


def plans_of(name: str, shape: str) -> list[Plan | None]:
    """Those of the backward pass of a complete batch, as it is and in a CUDA graph. `error` uses a smaller batch."""
    M, B, H, D, L, window = SHAPES[shape]
    query = torch.empty(B, H, L, D, device="cuda", dtype=torch.bfloat16)
    found = list[Plan | None]()
    with using(name):
        choose = functools.partial(stored.chosen, query, M + L, None, window or 0)
        found.append(choose())
        warm_up(lambda: found.append(choose()))
    return list(dict.fromkeys(found))


def error(name: str, plans: list[Plan | None], M: int, D: int, L: int = SEGMENT, window: int | None = None) -> float:
    """The largest relative error of the output and the gradients, against float64."""
    torch.manual_seed(1)
    tensors = draw(M, 2, 2, D, L)
    grad = torch.randn_like(tensors[0])
    exact = [tensor.double() for tensor in tensors]
    wanted = gradients(lambda *x: reference.relative_attention(*x, window=window), exact, grad.double())
    errors = []
    for plan in plans:
        with using(name), stored.using(plan):
            found = gradients(lambda *x: fused.relative_attention(*x, window=window), tensors, grad)
        errors.append(difference(found, wanted))
    return float(torch.stack(errors).max())  # NaN if one of them is


def errors(name: str, shape: str) -> dict[str, float]:
    """Of a smaller batch of this shape, and at awkward lengths."""
    M, _, _, D, L, window = SHAPES[shape]
    plans = plans_of(name, shape)
    return {
        "error": error(name, plans, M, D, L if window is None else SEGMENT, window),
        "odd": error(name, plans, 333, D, 200, 250),
    }


def difference(found: Any, wanted: Any) -> torch.Tensor:
    return torch.stack([(a.double() - b).norm() / b.norm() for a, b in zip(found, wanted, strict=True)]).max()


def graph_error(call: Callable[[], Any], plain: Callable[[], Any]) -> float:
    """The largest relative difference of a captured call from another that is not captured."""
    wanted = [tensor.double() for tensor in plain()]
    warm_up(call)
    found = list[Any]()
    graph = capture(lambda: found.extend(call()))
    for _ in range(2):
        graph.replay()
    return float(difference(found, wanted))


def measure(shape: str, variants: list[str], rounds: int, burst: float) -> list[dict[str, Any]]:
    """One row per variant: milliseconds plain and captured, ratios to FlexAttention, extra memory, error."""
    M, B, H, D, L, window = SHAPES[shape]
    torch.manual_seed(0)
    tensors = draw(M, B, H, D, L)
    grad = torch.randn_like(tensors[0])
    rival = _rival(tensors, window)

    def forward(name: str) -> Any:
        with torch.no_grad(), contextlib.nullcontext() if name == "flex" else using(name):
            return rival(*tensors[:3]) if name == "flex" else fused.relative_attention(*tensors, window=window)

    def both(name: str) -> Any:
        if window is not None:
            return forward(name)
        if name == "flex":
            return gradients(rival, tensors[:3], grad)
        with using(name):
            return gradients(fused.relative_attention, tensors, grad)

    ways: dict[str, list[Callable[[], Any]]] = {}
    rows: dict[str, dict[str, Any]] = {}
    for name in ("flex", *variants):
        call = functools.partial(both, name)
        try:
            if name != "flex":
                rows[name] = {**errors(name, shape), "MiB": extra_memory(call)}
                if window is None:
                    rows[name]["graph_error"] = graph_error(call, functools.partial(both, "twice"))
            ways[name] = [call, captured(call), captured(functools.partial(forward, name))]
        except Exception as problem:  # one variant that fails must not end the run
            print(f"{shape} {name} failed: {type(problem).__name__}: {str(problem)[:300]}", flush=True)
    times: dict[str, list[list[float]]] = {name: [[], [], []] for name in ways}
    for _ in range(rounds):
        for name, calls in ways.items():
            for some, timed in zip(calls, times[name], strict=True):
                repeat = max(12, round(1e3 * burst / timed[-1])) if timed else 12
                timed.append(milliseconds(some, repeat))
    medians = {name: [statistics.median(timed) for timed in three] for name, three in times.items()}
    labels = ("ms", "ratio"), ("graph_ms", "graph_ratio"), ("forward_ms", "forward_ratio")
    found = []
    for name, three in medians.items():
        row: dict[str, Any] = {"shape": shape, "variant": name, **rows.get(name, {})}
        for (time_label, ratio_label), ms, flex in zip(labels, three, medians["flex"], strict=True):
            row |= {time_label: ms, ratio_label: flex / ms}
        row["graph_spread"] = (max(times[name][1]) - min(times[name][1])) / row["graph_ms"]
        found.append(row)
    return found


def extra_memory(call: Callable[[], Any]) -> float:
    """Peak MiB of a call beyond what it leaves."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    torch.cuda.synchronize()
    left = torch.cuda.memory_allocated() - before
    peak = torch.cuda.max_memory_allocated() - before
    del result
    return (peak - left) / MIB


def kernels(shape: str, name: str) -> dict[str, float]:
    """Milliseconds per call of the kernels of one variant."""
    tensors = draw(*SHAPES[shape][:4])
    grad = torch.randn_like(tensors[0])
    with using(name), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        for _ in range(3):
            gradients(fused.relative_attention, tensors, grad)
        torch.cuda.synchronize()
    return {
        event.key[:28]: event.self_device_time_total / 3e3
        for event in found.key_averages()
        if event.self_device_time_total > 30.0
    }


def training(variants: list[str], rounds: int) -> list[dict[str, Any]]:
    """Training steps, plain and captured, of every variant and of the same model with rotary positions. Each model is
    compiled once: the compiler does not look into the kernels."""
    preset, device = timing.PRESETS["enwik8"], torch.device("cuda")
    batch, segment, memory = preset.train
    reading = Reading(segment=segment, memory=memory)

    def compiled(family: str, **more: Any) -> train.Step:
        torch.manual_seed(0)
        model = build(family, {**preset.model, **more}, reading).to(device).train()
        return train.Step(model, batch, device, torch.bfloat16, captured=False)

    ours, rival = compiled("transformer-xl"), compiled("rotary", **train.POST_NORM)
    steps = {"rotary": (rival, "today")} | {name: (ours, name) for name in variants}
    graphs = {name: copy.copy(step) for name, (step, _) in steps.items()}
    rates: dict[str, list[list[float]]] = {name: [[], []] for name in steps}
    for turn in range(rounds + 1):
        for name, (step, variant) in steps.items():
            if turn == 0:
                graphs[name].step = CapturedStep(step._work)
            with using(variant):
                for way, call in enumerate((step, graphs[name])):
                    seconds = timing.timed(call, 15 if turn else 4, device)  # the first turn compiles and captures
                    if turn:
                        rates[name][way].append(batch * segment / seconds)
    plain, graph = ({name: statistics.median(pair[way]) for name, pair in rates.items()} for way in (0, 1))
    return [
        {"variant": name, "tokens/s": plain[name], "ratio": plain[name] / plain["rotary"],
         "graph_tokens/s": graph[name], "graph_ratio": graph[name] / graph["rotary"]}
        for name in steps
    ]  # fmt: skip


def compile_all(shapes: list[str], variants: list[str]) -> dict[str, list[str]]:
    """Fill Triton's cache: one process per shape and kernel, on a small batch. Limits, orders and parts of the keys are
    arguments of the same kernels; 512 and 2048 together compile those with and without parts. Returns the variants of
    every shape that did not fail."""
    kinds: dict[str, Any] = {}
    first: dict[Any, str] = {}
    for name in variants:
        plan = VARIANTS.get(name)
        kinds[name] = _smallest(plan) if isinstance(plan, Plan) else name
        first.setdefault(kinds[name], name)

    def works(job: str) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):  # a kernel that never ends
            command = [sys.executable, __file__, "--compile", job]
            return not subprocess.run(command, stdout=subprocess.DEVNULL, check=False, timeout=LONGEST).returncode
        return False

    jobs = [f"{shape}:{name}" for shape in shapes for name in ("flex", *first.values())]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        working = dict(zip(jobs, pool.map(works, jobs), strict=True))
    for job in (job for job in jobs if not working[job]):
        print(f"{job} failed and is left out", flush=True)
    return {shape: [name for name in variants if working[f"{shape}:{first[kinds[name]]}"]] for shape in shapes}


def _smallest(plan: Plan) -> Plan:
    """A plan with the same kernels."""
    return dataclasses.replace(plan, limit=0, ahead=0, keys=0, lanes=min(plan.lanes, 1))


def compile_one(shape: str, name: str) -> None:
    M, B, H, D, L, window = SHAPES[shape]
    if name == "flex":
        tensors = draw(M, B, H, D, L)
        _rival(tensors, window)(*tensors[:3])
        if window is None:
            gradients(_rival(tensors), tensors[:3], torch.randn_like(tensors[0]))
        return
    errors(name, shape)


def show(rows: list[dict[str, Any]]) -> None:
    print("shape  variant            ms     ratio  graph   ratio  forward ratio  extra MiB  spread  error  odd  graph")
    for row in rows:
        right = all(row.get(key, 0.0) <= BOUND for key in ("error", "odd", "graph_error"))  # NaN is not
        print(
            f"{row['shape']:<6} {row['variant']:<18} {row['ms']:6.3f} {row['ratio']:.3f}  {row['graph_ms']:6.3f}"
            f"  {row['graph_ratio']:.3f}  {row['forward_ms']:6.3f}  {row['forward_ratio']:.3f}"
            f"  {row.get('MiB', 0):7.0f}"
            f"  {row['graph_spread']:6.1%}  {row.get('error', 0):.1e}  {row.get('odd', 0):.1e}"
            f"  {row.get('graph_error', 0):.1e}{'' if right else ' WRONG'}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="512,2048,8192,wide,eval", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--variants", default=DEFAULT)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--burst", type=float, default=0.0, metavar="SECONDS", help="at least 12 calls; default: 12")
    parser.add_argument("--training", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--compile", help=argparse.SUPPRESS)
    given = parser.parse_args()
    require_gpu()
    if given.compile:
        compile_one(*given.compile.split(":"))
        os._exit(0)  # threads of the compiler sometimes abort a normal exit
    shapes = given.shapes.split(",")
    variants = ["today", *FORWARD] if given.variants == "forward" else given.variants.split(",")
    began = time.perf_counter()
    if given.training:
        rows = training(variants, given.rounds)
        for row in rows:
            print("  ".join(f"{v:<18}" if isinstance(v, str) else f"{k} {v:,.4g}" for k, v in row.items()), flush=True)
        save(given.json, rows=rows)
        return
    working = compile_all(shapes, variants)
    print(f"compiled after {time.perf_counter() - began:.0f} s", flush=True)
    if not given.rounds:
        return
    rows, parts = [], dict[str, Any]()
    for shape in shapes:
        some = measure(shape, working[shape], given.rounds, given.burst)
        show(some)
        rows += some
        for name in {row["variant"] for row in some if shape != "eval"} & {"today", "stored", "by-distance"}:
            found = parts[f"{shape} {name}"] = kernels(shape, name)
            print(name, "kernels, ms:", "  ".join(f"{key} {value:.3f}" for key, value in found.items()), flush=True)
        save(given.json, rows=rows, kernels=parts)
    print(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
