"""Throughput and latency of the server's engine against the bare decoder.

    python benchmarks/serving.py --out benchmarks/results/DATE-cpu-serving.json
    python benchmarks/serving.py --device cuda --no-http   # a GPU, without the packages of the server

The bare decoder generates with 32 rows that all start and end together, and samples as `generate` does. The engine has
32 streams of the same lengths. Both have a full memory, and their rounds alternate, so that a busy machine slows both.
"""

import argparse
import asyncio
import json
import platform
import statistics
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from cards import usage_errors

import longspan
from longspan.decoding.open import open_decoder
from longspan.decoding.samplers import sampler
from longspan.decoding.sampling import Sampling
from longspan.serving.engine import Engine
from longspan.serving.work import Event, Piece, Work, choice
from longspan.text_model import TextModel

PROMPT = b"It was late, and the lamp had gone out. "


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default=None, help="default: the bundled model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--width", type=int, default=None, help="rows per batch; default: that of the server")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument(
        "--steps", type=int, default=None, help="tokens per stream and round; default: 12, on a GPU 300"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sessions", default="1,8,32,64")
    parser.add_argument("--tokens", type=int, default=24, help="tokens per session for latencies")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--no-http", action="store_true")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with usage_errors(parser):
        text = longspan.load(args.model, device=args.device, dtype=args.dtype)
    args.steps = args.steps or (300 if text.device.type == "cuda" else 12)
    found: dict[str, Any] = {
        "machine": machine(text),
        "model": args.model or "bundled",
        "throughput": throughput(text, args),
        "latency_engine": [latency(text, int(n), args) for n in args.sessions.split(",")],
    }
    if not args.no_http:
        found["latency_http"] = [asyncio.run(latency_http(text, int(n), args)) for n in args.sessions.split(",")]
    show(found)
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def show(found: dict[str, Any]) -> None:
    print(found["machine"])
    print(found["throughput"])
    for name in ("latency_engine", "latency_http"):
        print(f"{name.replace('_', ' ')}, ms: sessions, first token (median, max), per token (median, max), tokens/s")
        for row in found.get(name, []):
            first, each = row["first_token_ms"], row["per_token_ms"]
            cells = (first["median"], first["max"], each["median"], each["max"], row["tokens_per_second"])
            print(f"{row['sessions']:4d}" + "".join(f"{cell:11.2f}" for cell in cells))


def machine(text: TextModel) -> dict[str, Any]:
    where = text.device
    name = torch.cuda.get_device_name(where) if where.type == "cuda" else platform.machine()
    dtype = str(next(text.parameters()).dtype).removeprefix("torch.")
    return {"device": name, "dtype": dtype, "torch": torch.__version__, "threads": torch.get_num_threads()}


def full_prompt(text: TextModel) -> list[int]:
    """Enough tokens to fill the memory."""
    ids: list[int] = text.tokenizer.encode_prompt(PROMPT).tolist()
    return (ids * (text.reading.memory // len(ids) + 2))[: text.reading.memory + 1]


def throughput(text: TextModel, args: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second of both, in rounds that alternate."""
    bare, engine = Bare(text, args.streams), Loaded(text, args)
    rounds = [
        (bare.round(args.steps), engine.round(args.steps), bare.round(args.steps, read=False))
        for _ in range(args.rounds + 1)
    ][1:]
    ratios = [own / plain for plain, own, _ in rounds]
    plain, own, unread = (round(statistics.median(speeds), 1) for speeds in zip(*rounds, strict=True))
    return {
        "streams": args.streams,
        "width": engine.engine.width,
        "ahead": engine.engine.ahead,
        "bare_tokens_per_second": plain,
        "bare_without_reading_tokens": unread,
        "engine_tokens_per_second": own,
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
    }


class Bare:
    """The fastest decoder of the model, with sampling."""

    def __init__(self, text: TextModel, streams: int) -> None:
        ids = torch.tensor([full_prompt(text)], device=text.device)
        first = open_decoder(text.model)
        first.prefill(ids[:, :-1])
        self.decoder = open_decoder(text.model, first.state().rows([0] * streams))
        self.tokens = ids[:, -1].repeat(streams)
        generator = torch.Generator(text.device).manual_seed(0)
        self.sample = sampler(self.decoder, Sampling(0.8), generator, text.tokenizer.size)

    def round(self, steps: int, *, read: bool = True) -> float:
        """Tokens per second. With `read`, the host waits for the tokens of every step, as `generate` does; without it
        for those of the last one, which is the limit of the device."""
        began = time.perf_counter()
        for step in range(steps):
            self.tokens = self.sample(self.tokens)
            if read or step == steps - 1:
                self.tokens.tolist()
        return len(self.tokens) * steps / (time.perf_counter() - began)


class Loaded:
    """An engine whose rows are all taken by endless streams."""

    def __init__(self, text: TextModel, args: argparse.Namespace) -> None:
        self.engine = Engine(text, width=args.width, rows=args.streams, queue=args.streams)
        self.text: list[str] = []
        prompt = full_prompt(text)
        choices = [choice(self.emit, seed=n, max_tokens=10**9) for n in range(args.streams)]
        self.engine.submit(Work(prompt, choices))
        while len(self.engine.running) < args.streams:
            self.engine.step()

    def emit(self, event: Event) -> None:
        if isinstance(event, Piece):
            self.text.append(event.text)

    def round(self, steps: int) -> float:
        """Tokens per second."""
        began, before = time.perf_counter(), self.engine.statistics.generated_tokens
        for _ in range(steps):
            self.engine.step()
        return (self.engine.statistics.generated_tokens - before) / (time.perf_counter() - began)


def latency(text: TextModel, sessions: int, args: argparse.Namespace) -> dict[str, Any]:
    """All sessions arrive at once, with a prompt of 40 bytes each."""
    engine = Engine(text, width=args.width, rows=sessions, queue=sessions)
    times: list[list[float]] = [[] for _ in range(sessions)]
    prompt = text.tokenizer.encode_prompt(PROMPT).tolist()
    for n in range(sessions):
        emit = lambda event, own=times[n]: own.append(time.perf_counter()) if isinstance(event, Piece) else None  # noqa: E731
        engine.submit(Work(prompt, [choice(emit, seed=n, max_tokens=args.tokens)]))
    began = time.perf_counter()
    while engine.step():
        pass
    return summary(sessions, began, times)


def summary(sessions: int, began: float, times: list[list[float]]) -> dict[str, Any]:
    first = [own[0] - began for own in times]
    each = [later - earlier for own in times for earlier, later in pairwise(own)]
    total = sum(len(own) for own in times)
    return {
        "sessions": sessions,
        "first_token_ms": {"median": ms(statistics.median(first)), "max": ms(max(first))},
        "per_token_ms": {"median": ms(statistics.median(each)), "max": ms(max(each))},
        "tokens_per_second": round(total / (max(own[-1] for own in times) - began), 1),
    }


def ms(seconds: float) -> float:
    return round(1000 * seconds, 2)


async def latency_http(text: TextModel, sessions: int, args: argparse.Namespace) -> dict[str, Any]:
    """The same through uvicorn, with streamed completions of one client per session."""
    import httpx
    import uvicorn

    from longspan.serving.app import create_app
    from longspan.serving.settings import Settings

    app = create_app({"model": text}, Settings(width=args.width, rows=sessions, queue=sessions))
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", loop="asyncio"))
    running = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    times: list[list[float]] = [[] for _ in range(sessions)]

    async def one(client: httpx.AsyncClient, n: int) -> None:
        body = {"prompt": PROMPT.decode(), "max_tokens": args.tokens, "stream": True, "seed": n, "logprobs": 0}
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {") and '"tokens":["' in line:
                    times[n].append(time.perf_counter())

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=600, limits=limits) as client:
        began = time.perf_counter()
        await asyncio.gather(*(one(client, n) for n in range(sessions)))
    server.should_exit = True
    await running
    return summary(sessions, began, times)


if __name__ == "__main__":
    main()
