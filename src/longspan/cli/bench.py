"""`longspan bench`: how fast, as a ratio to a rival in the same run."""

from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any

import typer

from longspan.cli.options import DeviceName, DtypeName, Json, Machine, Threads, machine, print_json
from longspan.errors import ConfigError

if TYPE_CHECKING:
    from longspan.bench.families import Growth
    from longspan.bench.timing import Preset

app = typer.Typer(help="Measure speed: against a rival in the same run, and against length.", no_args_is_help=True)
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
    segments: Annotated[
        str, typer.Option("--segments", help="The same with the segment, as many tokens in all, e.g. 128,512,2048.")
    ] = "",
    json: Json = False,
    device: DeviceName = "auto",
    dtype: DtypeName = "auto",
    threads: Threads = 0,
) -> None:
    """A training step against the same model with rotary positions."""
    growing = {"memories": _numbers("--memories", memories), "segments": _numbers("--segments", segments, "segment")}
    if all(growing.values()):
        raise ConfigError("--memories and --segments each ask for a table of its own; give one of them")
    _bench("train", preset, json, machine(device, dtype, threads), **growing)


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


@app.command("families")
def families(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[FAMILY]...", help="Families to measure; all unless named.")
    ] = None,
    preset: PresetName = None,
    lengths: Annotated[
        str, typer.Option("--lengths", help="Tokens of the texts, e.g. 1024,2048,4096; the preset's unless given.")
    ] = "",
    json: Json = False,
    device: DeviceName = "auto",
    dtype: DtypeName = "auto",
    threads: Threads = 0,
) -> None:
    """Time and memory of every family against the length of the text, beside what its paper claims."""
    from longspan.bench import families as bench
    from longspan.bench.peak import MEANING

    where, asked = machine(device, dtype, threads), _numbers("--lengths", lengths, "text")
    about, chosen = _about("families", preset, where)
    found = bench.measure(chosen, where.device, where.dtype, asked, tuple(names or ()))
    meaning = MEANING[where.device.type]
    if json:
        facts = {"dtype": str(where.dtype), "lengths": sorted(set(asked or chosen.texts)), "bytes": meaning}
        measured: list[dict[str, Any]] = []
        try:
            for growth in found:
                measured.append(growth.facts())
        finally:  # minutes of measuring are not lost with the rest
            print_json({**about, **facts, "families": measured})
        return
    print(", ".join(about.values()))
    print(f"MiB: {meaning}; by count: the slope of the operations\n")
    for n, growth in enumerate(found):
        _print_growth(growth, heading=n == 0)


def _print_growth(growth: "Growth", heading: bool) -> None:
    if heading:
        columns = "".join(f"{length:>10,}" for length in growth.lengths)
        print(f"{'tokens':34}{columns} {'slope':>7} {'by count':>8}  paper")
    times, worked = ([None if v is None else 1e3 * v for v in values] for values in (growth.seconds, growth.busy))
    sizes = [None if value is None else value / 2**20 for value in growth.bytes]
    name = f"{growth.family}, {growth.read}"
    print(f"{name:30} ms {_cells(times)} {_cell(growth.slope, 7)} {_cell(growth.by_count, 8)}  {growth.paper}")
    if any(value is not None for value in worked):
        print(f"{'of these the device worked':30} ms {_cells(worked, '')}")
    print(f"{'':29} MiB {_cells(sizes)} {_cell(growth.memory_slope, 7)}", flush=True)
    for length, why in growth.failed.items():
        print(f"{'':33} {length:,} tokens failed: {why}", flush=True)


def _cells(values: "list[float | None]", missing: str = "failed") -> str:
    return "".join(f"{missing:>10}" if value is None else f"{value:10,.1f}" for value in values)


def _cell(value: float | None, width: int) -> str:
    return f"{'':{width}}" if value is None else f"{value:{width}.2f}"


def _numbers(flag: str, text: str, least_one: str = "") -> tuple[int, ...]:
    """Whole numbers between commas; of what `least_one` names none may be 0."""
    try:
        found = tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError:
        found = (-1,)
    if any(number < 0 for number in found):
        raise ConfigError(f"{flag} {text} must be whole numbers between commas, for example 512,2048")
    if least_one and 0 in found:
        raise ConfigError(f"{flag} {text} has a {least_one} of 0 tokens; give at least 1")
    return found


def _about(what: str, preset: str | None, where: Machine) -> "tuple[dict[str, str], Preset]":
    """What a result must name, and the preset."""
    import torch

    from longspan.bench import timing
    from longspan.training.environment import hardware

    name, chosen = timing.preset(preset, where.device)
    return {"bench": what, "preset": name, "device": hardware(where.device), "torch": torch.__version__}, chosen


def _bench(what: str, preset: str | None, json: bool, where: Machine, **options: Any) -> None:
    about, chosen = _about(what, preset, where)
    lines = import_module(f"longspan.bench.{what}").measure(chosen, where.device, where.dtype, **options)
    if json:
        print_json({**about, "dtype": str(where.dtype), "lines": [line.facts() for line in lines]})
        return
    print(", ".join(about.values()))
    print(f"{'':34} {'ours':>11} {'rival':>11} {'ratio':>8} {'by count':>8} {'TFLOP/s':>8} {'rival':>7} {'memory':>7}")
    for line in lines:
        memory = "" if line.memory_ratio is None else f"{line.memory_ratio:7.3f}"
        print(
            f"{line.what:34} {line.ours:11,.1f} {line.theirs:11,.1f} {line.ratio:8.3f} {line.by_count:8.3f} "
            f"{line.tflops:8.3g} {line.their_tflops:7.3g} {memory:>7}  {line.unit}; rival: {line.rival}",
            flush=True,
        )
