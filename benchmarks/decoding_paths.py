"""Generation on a GPU, path by path: one kernel per step against six per layer, and tiles for many rows.

    python benchmarks/decoding_paths.py one      batch 1, memory 1600
    python benchmarks/decoding_paths.py many     batch 64, memory 512: tiles one by one, then steps with the best
    python benchmarks/decoding_paths.py tune     the same tiles with and without dependent launch

Every part checks its results before it measures them.
"""

import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from longspan.contract import Decoder, LanguageModel
from longspan.cuda_graphs import GraphDecoder, capture, warm_up
from longspan.decoding import samplers, written_tokens
from longspan.decoding.fused import FusedDecoder
from longspan.decoding.persistent import PersistentDecoder
from longspan.decoding.samplers import sampler
from longspan.decoding.sampling import Sampling
from longspan.decoding.session import Session
from longspan.decoding.step_layers import step_layers
from longspan.experiments.bench.timing import PRESETS
from longspan.kernels import one_token
from longspan.kernels import sampling as sampling_kernel
from longspan.kernels.one_token import Norm, Tiles, Walk, persistent
from longspan.models.families import build
from longspan.reading import Reading

DEVICE = torch.device("cuda")


def make(memory: int, dtype: torch.dtype) -> LanguageModel:
    torch.manual_seed(0)
    reading = Reading(segment=128, memory=memory)
    return build("transformer-xl", PRESETS["enwik8"].model, reading).to(DEVICE, dtype).eval()


def open_as(kind: type[FusedDecoder], model: LanguageModel, batch: int, **options: Any) -> FusedDecoder:
    state = model.initial_state(batch, trainable=False)
    layers = step_layers(model, state)
    assert layers is not None
    return kind(model, state, layers, 0, **options)


@contextmanager
def replaced(**values: Any) -> Iterator[None]:
    """Other settings of the kernels for a while, by `module__name`."""
    modules = {
        "one": one_token, "step": persistent, "sample": sampling_kernel, "write": written_tokens, "draw": samplers,
    }  # fmt: skip
    places = [(modules[name.split("__")[0]], name.split("__")[1], value) for name, value in values.items()]
    before = [getattr(module, name) for module, name, _ in places]
    for module, name, value in places:
        setattr(module, name, value)
    try:
        yield
    finally:
        for (module, name, _), value in zip(places, before, strict=True):
            setattr(module, name, value)


def milliseconds(call: Callable[[], Any], least: float = 0.4, rounds: int = 5) -> float:
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    times = []
    repeat = 20
    for _ in range(rounds + 1):
        began = time.perf_counter()
        for _ in range(repeat):
            call()
        torch.cuda.synchronize()
        taken = (time.perf_counter() - began) / repeat
        times.append(taken)
        repeat = max(1, round(least / rounds / taken))
    return 1000 * statistics.median(times[1:])


def rates(decoder: Decoder, batch: int, memory: int) -> tuple[float, float]:
    """Tokens per second with a copy of every token to the host, and without."""
    next_token = sampler(GraphDecoder(decoder), Sampling(), torch.Generator(DEVICE).manual_seed(0))
    decoder.prefill(torch.randint(205, (batch, memory), device=DEVICE))
    token = torch.zeros(batch, dtype=torch.int64, device=DEVICE)

    def step() -> None:
        nonlocal token
        token = next_token(token)

    def read() -> None:
        step()
        token.tolist()

    return batch * 1000 / milliseconds(read), batch * 1000 / milliseconds(step)


def open_session(kind: type[FusedDecoder], model: LanguageModel, memory: int) -> Session:
    """A session with a full memory."""
    session = Session(model)
    session.decoder = GraphDecoder(open_as(kind, model, 1))
    torch.manual_seed(1)
    session.read(torch.randint(205, (memory + 1,)).tolist())
    return session


def delivered(kind: type[FusedDecoder], model: LanguageModel, memory: int) -> tuple[float]:
    """Tokens per second that a session delivers to its caller."""
    writing = open_session(kind, model, memory).write(sys.maxsize, Sampling())
    return (1000 / milliseconds(lambda: next(writing)),)


def report(what: str, call: Callable[[], tuple[float, ...]]) -> None:
    try:
        print(f"{what:54s}" + "".join(f" {rate:10,.0f}" for rate in call()), flush=True)
    except Exception as error:
        print(f"{what:54s} failed: {type(error).__name__} {str(error)[:300]}", flush=True)


def check_one() -> None:
    """Small and awkward shapes, and greedy text of the large one: persistent, by phases, and the fused decoder."""
    for dtype, bound in ((torch.float32, 1e-4), (torch.bfloat16, 5e-2)):
        model = make(100, dtype)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
        whole, phases = (open_as(PersistentDecoder, model, 1) for _ in range(2))
        phases.persistent = False  # type: ignore[attr-defined]
        old = open_as(FusedDecoder, model, 1)
        token, worst, equal, same = torch.zeros(1, dtype=torch.int64, device=DEVICE), 0.0, True, 0
        for _ in range(150):
            a, b, c = whole.step(token).clone(), phases.step(token).clone(), old.step(token)
            equal &= torch.equal(a, b)
            worst = max(worst, float((a - c).abs().max() / c.abs().max()))
            same += int(a.argmax() == c.argmax())
            token = c.argmax(-1)
        failed = bool(whole.work.failed)  # type: ignore[attr-defined]
        verdict = "ok" if worst < bound and equal and not failed else "WRONG"
        print(
            f"check {dtype}: difference {worst:.1e}, by phases equal {equal}, argmax {same}/150, {verdict}", flush=True
        )


def check_sessions(model: LanguageModel, memory: int) -> None:
    """Tokens with and without read-ahead and copies to the host, and with a stop and a fork on the way."""
    texts = {}
    for name, settings in {
        "plain": {"write__READ_AHEAD": False},
        "read-ahead": {},
        "copies": {"draw__ZERO_COPY": False},
    }.items():
        with replaced(**settings):
            session = open_session(PersistentDecoder, model, memory)
            text = [token for _, token in zip(range(33), session.write(100, Sampling()), strict=False)]
            text += list(session.fork().write(20, Sampling()))
            texts[name] = text + list(session.write(30, Sampling(top_p=0.9, frequency_penalty=0.1)))
    equal = {name: text == texts["plain"] for name, text in texts.items()}
    print(f"tokens equal those of a plain loop: {equal}, {'ok' if all(equal.values()) else 'WRONG'}", flush=True)


def one() -> None:
    began = time.perf_counter()
    check_one()
    model = make(1600, torch.bfloat16)
    check_sessions(model, 1600)
    print(
        f"checked in {time.perf_counter() - began:.0f} s\n{'batch 1, memory 1600':54s}   tokens/s   no read", flush=True
    )
    report("six kernels per layer", lambda: rates(open_as(FusedDecoder, model, 1), 1, 1600))
    report("one kernel per step", lambda: rates(open_as(PersistentDecoder, model, 1), 1, 1600))
    with replaced(step__WARPS=4):
        report("one kernel per step, 4 warps", lambda: rates(open_as(PersistentDecoder, model, 1), 1, 1600))
    print(f"{'delivered by Session.write':54s}   tokens/s", flush=True)
    for what, kind, settings in (
        ("six kernels per layer", FusedDecoder, {}),
        ("one kernel per step", PersistentDecoder, {}),
        ("one kernel per step, no read-ahead", PersistentDecoder, {"write__READ_AHEAD": False}),
        ("one kernel per step, copies to the host", PersistentDecoder, {"draw__ZERO_COPY": False}),
    ):
        with replaced(**settings):
            report(what, lambda kind=kind: delivered(kind, model, 1600))


CANDIDATE_TILES = {  # today's first
    (1536, 512): [Tiles(16, 32, 512, 4, 1), Tiles(16, 32, 512, 8, 1), Tiles(32, 32, 512, 8, 1)],
    (512, 512): [Tiles(16, 16, 512, 4, 1), Tiles(16, 16, 512, 8, 1)],
    (2048, 512): [Tiles(16, 32, 512, 4, 1), Tiles(16, 32, 512, 8, 1), Tiles(32, 32, 512, 8, 1)],
    (512, 2048): [
        Tiles(16, 16, 256, 4, 3),
        Tiles(16, 16, 2048, 8, 1),
        Tiles(16, 32, 2048, 8, 1),
        Tiles(32, 32, 512, 8, 1, 4),
        Tiles(16, 32, 512, 4, 1, 4),
    ],
}
CANDIDATE_WALKS = [  # today's first
    Walk(64, 1, 4, 2), Walk(32, 1, 4, 3, 2), Walk(32, 1, 8, 3, 2), Walk(64, 1, 8, 3, 2), Walk(32, 1, 8, 3, 4),
    Walk(16, 1, 8, 3, 4), Walk(16, 1, 4, 4, 4),
]  # fmt: skip


def graph_microseconds(calls: list[Callable[[], None]], loops: int = 12) -> float:
    """Time of a call within a graph of many."""

    def work() -> None:
        for _ in range(loops):
            for call in calls:
                call()

    warm_up(work)
    graph = capture(work)
    return 1000 * milliseconds(graph.replay, least=0.1, rounds=3) / loops / len(calls)


def tune(pdl: tuple[bool, ...] = (False, True)) -> tuple[dict[tuple[int, int], Tiles], Walk]:
    """The best tile of every product and of the attention."""
    norm = Norm(torch.ones(512, device=DEVICE).bfloat16(), torch.zeros(512, device=DEVICE).bfloat16(), 1e-5)
    best = {}
    for (N, K), candidates in CANDIDATE_TILES.items():
        weights = [torch.randn(N, K, device=DEVICE).bfloat16() * K**-0.5 for _ in range(12)]
        x, out = torch.randn(64, K, device=DEVICE).bfloat16(), torch.zeros(64, N, device=DEVICE).bfloat16()
        kept = torch.randn(64, N, device=DEVICE).bfloat16()
        # The two forms in a layer.
        scratch = one_token.Scratch.of(64, N, DEVICE)
        options: dict[str, Any] = (
            {"norm": norm} if N > 512 else {"residual": kept, "residual_norm": norm, "scratch": scratch}
        )
        calls = [partial(one_token.linear, x, weight, None, out, **options) for weight in weights]
        settings = [(tile, {"one__tiles": partial(_always, tile)}) for tile in candidates]
        best[N, K] = compare(f"{N}x{K}", calls, out, settings, pdl)
    return best, tune_attention(64, 8, 513, 64, pdl)


def tune_attention(B: int, H: int, S: int, D: int, pdl: tuple[bool, ...]) -> Walk:
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=DEVICE).bfloat16()

    qkv, u, w, out = random(B, 3, H, D), random(H, D), random(H, D), random(B, H, D)
    count = torch.full((), 2 * S, device=DEVICE)
    scratch = torch.empty(B * H, 32 * (D + 2), device=DEVICE)
    calls = [
        partial(
            one_token.rolling_attention,
            *(qkv, random(B, H, S, D), random(B, H, S, D), random(H, S, D), u, w, count, scratch, out),
        )
        for _ in range(4)
    ]
    settings = [(plan, {"one__walk": partial(_always, plan)}) for plan in CANDIDATE_WALKS]
    return compare("attention", calls, out, settings, pdl)


def _always(value: Any, *_: Any) -> Any:
    return value


def compare(
    what: str,
    calls: list[Callable[[], None]],
    out: torch.Tensor,
    candidates: list[tuple[Any, dict[str, Any]]],
    launches: tuple[bool, ...],
) -> Any:
    """Time and difference from the first candidate of each. Returns the fastest one that differs only by rounding."""
    want: torch.Tensor | None = None
    times: dict[Any, float] = {}
    for (name, settings), pdl in itertools.product(candidates, launches):
        try:
            with replaced(**settings, one__PDL=pdl):
                calls[-1]()
                got = out.float().clone()
                want = got if want is None else want
                error = float((got - want).norm() / want.norm())
                taken = graph_microseconds(calls, 4)
            print(f"{what} {tuple(name)!s:24s} pdl {pdl:d} {taken:7.2f} us, difference {error:.0e}", flush=True)
            if error < 1e-2:
                times[name] = min(taken, times.get(name, taken))
        except Exception as problem:
            print(f"{what} {tuple(name)} failed: {type(problem).__name__} {str(problem)[:120]}", flush=True)
    return min(times, key=times.__getitem__)


def many() -> None:
    print(f"{'batch 64, memory 512':54s}   tokens/s   no read", flush=True)
    model = make(512, torch.bfloat16)

    def run() -> tuple[float, float]:
        return rates(open_as(FusedDecoder, model, 64), 64, 512)

    report("default", run)
    best, plan = tune((False,))
    chosen: dict[str, Any] = {"one__walk": partial(_always, plan)}
    with replaced(**chosen):
        report(f"walk {tuple(plan)}", run)
    usual = one_token.tiles
    chosen["one__tiles"] = lambda N, K: best.get((N, K)) or usual(N, K)
    with replaced(**chosen):
        report("and the fastest tiles", run)
        with replaced(one__PDL=True):
            report("and dependent launch", run)
        profile(open_as(FusedDecoder, model, 64))


def profile(decoder: FusedDecoder) -> None:
    """Where the time of a step goes, with today's tiles."""
    decoder.prefill(torch.randint(205, (64, 512), device=DEVICE))
    tokens = torch.zeros(64, dtype=torch.int64, device=DEVICE)
    decoder.step(tokens)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as found:
        for _ in range(3):
            decoder.step(tokens)
        torch.cuda.synchronize()
    events = sorted(found.key_averages(), key=lambda event: -event.self_device_time_total)
    for event in events[:7]:
        print(f"  {event.key[:50]:50s} {event.count // 3:4d} x {event.self_device_time_total / event.count:6.1f} us")


if __name__ == "__main__":
    {"one": one, "many": many, "tune": tune}[sys.argv[1]]()
