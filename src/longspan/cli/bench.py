"""`longspan bench`: how fast, as a ratio to a rival in the same run."""

from importlib import import_module
from typing import Annotated, Any

import typer

from longspan.cli.options import DeviceName, DtypeName, Json, Machine, Threads, machine, print_json
from longspan.errors import ConfigError

app = typer.Typer(help="Measure speed as a ratio to a rival in the same run.", no_args_is_help=True)
PresetName = Annotated[
    str | None, typer.Option("--preset", help="enwik8 (12 layers, 41M; the default on CUDA) or small.")
]


@app.command("attention")
def attention(
    preset: PresetName = None,
    json: Json = False,
    device: DeviceName = "auto",
    dtype: DtypeName = "auto",
    threads: Threads = 0,
) -> None:
    """The four-term attention against the same without its position term."""
    _bench("attention", preset, json, machine(device, dtype, threads))


@app.command("train")
def train(
    preset: PresetName = None,
    memories: Annotated[
        str, typer.Option("--memories", help="Instead of a rival: how a step grows with memory, e.g. 512,2048,8192.")
    ] = "",
    json: Json = False,
    device: DeviceName = "auto",
    dtype: DtypeName = "auto",
    threads: Threads = 0,
) -> None:
    """A training step against the same model with rotary positions."""
    _bench("train", preset, json, machine(device, dtype, threads), memories=_numbers("--memories", memories))


@app.command("eval")
def evaluate(
    preset: PresetName = None,
    json: Json = False,
    device: DeviceName = "auto",
    dtype: DtypeName = "auto",
    threads: Threads = 0,
) -> None:
    """Scoring with a memory against a sliding window."""
    _bench("evaluate", preset, json, machine(device, dtype, threads))


@app.command("generate")
def generate(
    preset: PresetName = None,
    json: Json = False,
    device: DeviceName = "auto",
    dtype: DtypeName = "auto",
    threads: Threads = 0,
) -> None:
    """One token at a time against memory as hidden states."""
    _bench("generate", preset, json, machine(device, dtype, threads))


def _numbers(flag: str, text: str) -> tuple[int, ...]:
    try:
        found = tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError:
        found = (-1,)
    if any(number < 0 for number in found):
        raise ConfigError(f"{flag} {text} must be whole numbers between commas, for example 512,2048")
    return found


def _bench(what: str, preset: str | None, json: bool, where: Machine, **options: Any) -> None:
    import torch

    from longspan.bench import timing
    from longspan.training.environment import hardware

    name, chosen = timing.preset(preset, where.device)
    lines = import_module(f"longspan.bench.{what}").measure(chosen, where.device, where.dtype, **options)
    about = {"bench": what, "preset": name, "device": hardware(where.device), "torch": torch.__version__}
    if json:
        print_json({**about, "dtype": str(where.dtype), "lines": [line.facts() for line in lines]})
        return
    print(", ".join(about.values()))
    print(f"{'':34} {'ours':>11} {'rival':>11} {'ratio':>8} {'by count':>8} {'TFLOP/s':>8} {'rival':>7} {'memory':>7}")
    for line in lines:
        memory = "" if line.memory_ratio is None else f"{line.memory_ratio:7.3f}"
        print(
            f"{line.what:34} {line.ours:11,.1f} {line.theirs:11,.1f} {line.ratio:8.3f} {line.by_count:8.3f} "
            f"{line.tflops:8.2f} {line.their_tflops:7.2f} {memory:>7}  {line.unit}; rival: {line.rival}",
            flush=True,
        )
