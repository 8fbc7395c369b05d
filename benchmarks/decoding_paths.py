"""Generation on a GPU, path by path: one kernel per step against six per layer, and tiles for many rows.

    python benchmarks/decoding_paths.py one      batch 1, memory 1600
    python benchmarks/decoding_paths.py many     batch 64, memory 512: without dependent launch, and with other tiles

Every part checks its results before it measures them.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from gpu import require_gpu
from triton.errors import TritonError

from longspan.contract import Decoder, LanguageModel
from longspan.cuda_graphs import GraphDecoder
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
from longspan.kernels.one_token import Tiles, Walk, persistent
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
    """Print a row of the table. Settings that do not compile or do not fit on this GPU do not end the program."""
    try:
        print(f"{what:54s}" + "".join(f" {rate:10,.0f}" for rate in call()), flush=True)
    except (RuntimeError, TritonError) as error:
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
    print(f"{'delivered by Session.write':54s}   tokens/s", flush=True)
    for what, kind, settings in (
        ("six kernels per layer", FusedDecoder, {}),
        ("one kernel per step", PersistentDecoder, {}),
        ("one kernel per step, no read-ahead", PersistentDecoder, {"write__READ_AHEAD": False}),
        ("one kernel per step, copies to the host", PersistentDecoder, {"draw__ZERO_COPY": False}),
        ("one kernel per step, 4 warps", PersistentDecoder, {"step__WARPS": 4}),
    ):
        with replaced(**settings):
            report(what, lambda kind=kind: delivered(kind, model, 1600))


WIDE, DOWN = ((1536, 512), (2048, 512)), ((512, 2048),)
OTHER_TILES = [
    (WIDE, Tiles(32, 32, 512, 8, 1)),
    (WIDE, Tiles(16, 32, 512, 4, 1)),
    (DOWN, Tiles(16, 32, 512, 4, 1, 4)),
    (DOWN, Tiles(16, 16, 256, 4, 3)),
]
OTHER_WALKS = [Walk(32, 1, 4, 3), Walk(32, 1, 4, 4)]


def _always(value: Any, *_: Any) -> Any:
    return value


def many() -> None:
    print(f"{'batch 64, memory 512':54s}   tokens/s   no read", flush=True)
    model = make(512, torch.bfloat16)
    usual = one_token.tiles

    def run() -> tuple[float, float]:
        return rates(open_as(FusedDecoder, model, 64), 64, 512)

    check_many(model)
    report("default", run)
    with replaced(one__PDL=False):
        report("no dependent launch", run)
    for shapes, tile in OTHER_TILES:
        with replaced(one__tiles=lambda n, k, early, at=shapes, t=tile: t if (n, k) in at else usual(n, k, early)):
            report(f"{shapes} {tuple(tile)}", run)
    for plan in OTHER_WALKS:
        with replaced(one__walk=partial(_always, plan)):
            report(f"walk {tuple(plan)}", run)
    profile(open_as(FusedDecoder, model, 64))


def check_many(model: LanguageModel) -> None:
    """Logits of captured steps, twice with dependent launch and once without. Races would make the first two differ."""
    tokens = torch.randint(205, (64, 600), device=DEVICE)
    found = []
    for pdl in (True, True, False):
        with replaced(one__PDL=pdl):
            decoder = GraphDecoder(open_as(FusedDecoder, model, 64))
            decoder.prefill(tokens[:, :500])
            found.append(
                torch.stack([decoder.step(tokens[:, at].contiguous()).clone() for at in range(500, 600)]).float()
            )
    equal, worst = torch.equal(found[0], found[1]), float((found[0] - found[2]).abs().max() / found[2].abs().max())
    verdict = "ok" if equal and worst < 5e-2 else "WRONG"
    print(f"two runs equal {equal}, difference without dependent launch {worst:.1e}, {verdict}", flush=True)


def profile(decoder: FusedDecoder) -> None:
    """Where the time of a step goes. With dependent launch a kernel's time includes its wait for the one before it."""
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
    parts = {"one": one, "many": many}
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("part", choices=parts, help="batch 1 with memory 1600, or batch 64 with memory 512")
    part = parts[parser.parse_args().part]
    require_gpu()
    part()
