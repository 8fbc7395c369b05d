"""`longspan bench`: speed as a ratio to a baseline measured in the same run. docs/speed.md"""

from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any

import typer

from longspan.cli.options import DeviceName, DtypeName, Json, Machine, Threads, machine, print_json
from longspan.cli.parsing import parse_numbers
from longspan.errors import ConfigError

if TYPE_CHECKING:
    from longspan.experiments.bench.families import Growth
    from longspan.experiments.bench.timing import Preset

app = typer.Typer(
    help="Measure speed against a baseline in the same run, and at several text lengths.", no_args_is_help=True
)
PresetName = Annotated[
    str | None, typer.Option("--preset", help="enwik8 (12 layers, 41M) or small. Default: enwik8 on CUDA, else small.")
]


@app.command("attention")
def attention(
    preset: PresetName = None,
    json: Json = False,
    device: DeviceName = "auto",
    dtype: DtypeName = "auto",
    threads: Threads = 0,
) -> None:
    """Measure the four-term attention against attention without the position term."""
    _bench("attention", preset, json, machine(device, dtype, threads))


@app.command("train")
def train(
    preset: PresetName = None,
    memories: Annotated[
        str,
        typer.Option(
            "--memories", help="Instead, measure the step time at these memory lengths, for example 512,2048,8192."
        ),
    ] = "",
    segments: Annotated[
        str,
        typer.Option(
            "--segments",
            help="Instead, measure the step time at these segment lengths, with the same number of tokens per step.",
        ),
    ] = "",
    json: Json = False,
    device: DeviceName = "auto",
    dtype: DtypeName = "auto",
    threads: Threads = 0,
) -> None:
    """Measure a training step against the same model with rotary positions."""
    lengths = {
        "memories": parse_numbers("--memories", memories),
        "segments": parse_numbers("--segments", segments, positive=True),
    }
    if all(lengths.values()):
        raise ConfigError(
            f"--memories {memories} and --segments {segments} are measured separately; use only one of them"
        )
    _bench("train", preset, json, machine(device, dtype, threads), **lengths)


@app.command("eval")
def evaluate(
    preset: PresetName = None,
    json: Json = False,
    device: DeviceName = "auto",
    dtype: DtypeName = "auto",
    threads: Threads = 0,
) -> None:
    """Measure scoring with a memory against a sliding window."""
    _bench("evaluate", preset, json, machine(device, dtype, threads))


@app.command("generate")
def generate(
    preset: PresetName = None,
    json: Json = False,
    device: DeviceName = "auto",
    dtype: DtypeName = "auto",
    threads: Threads = 0,
) -> None:
    """Measure generation with a KV cache against memory stored as hidden states."""
    _bench("generate", preset, json, machine(device, dtype, threads))


@app.command("families")
def families(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="FAMILY", help="Families to measure. Default: all.")
    ] = None,
    preset: PresetName = None,
    lengths: Annotated[
        str,
        typer.Option(
            "--lengths", help="Text lengths in tokens, for example 1024,2048. Default: the lengths of the preset."
        ),
    ] = "",
    json: Json = False,
    device: DeviceName = "auto",
    dtype: DtypeName = "auto",
    threads: Threads = 0,
) -> None:
    """Measure time and memory of every family at several text lengths, next to the complexity its paper claims."""
    from longspan.experiments.bench import families as bench
    from longspan.experiments.bench.peak import MEANING

    where, numbers = machine(device, dtype, threads), parse_numbers("--lengths", lengths, positive=True)
    about, chosen = _about("families", preset, where)
    found = bench.measure(chosen, where.device, where.dtype, numbers, tuple(names or ()))
    meaning = MEANING[where.device.type]
    if json:
        facts = {"dtype": str(where.dtype), "lengths": sorted(set(numbers or chosen.texts)), "bytes": meaning}
        measured: list[dict[str, Any]] = []
        try:
            for growth in found:
                measured.append(growth.facts())
        finally:  # an interrupt keeps the results so far
            print_json({**about, **facts, "families": measured})
        return
    print(", ".join(about.values()))
    print(f"MiB: {meaning}; by count: the slope of the operation counts\n")
    for n, growth in enumerate(found):
        _print_growth(growth, heading=n == 0)


def _print_growth(growth: "Growth", heading: bool) -> None:
    if heading:
        columns = "".join(f"{length:>10,}" for length in growth.lengths)
        print(f"{'tokens':34}{columns} {'slope':>7} {'by count':>8}  paper")
    times, busy = ([None if v is None else 1e3 * v for v in values] for values in (growth.seconds, growth.busy))
    sizes = [None if value is None else value / 2**20 for value in growth.bytes]
    name = f"{growth.family}, {growth.read}"
    print(f"{name:30} ms {_cells(times)} {_cell(growth.slope, 7)} {_cell(growth.by_count, 8)}  {growth.paper}")
    if any(value is not None for value in busy):
        print(f"{'of these the device was busy':30} ms {_cells(busy, '')}")
    print(f"{'':29} MiB {_cells(sizes)} {_cell(growth.memory_slope, 7)}", flush=True)
    for length, reason in growth.failed.items():
        print(f"{'':33} {length:,} tokens failed: {reason}", flush=True)


def _cells(values: "list[float | None]", missing: str = "failed") -> str:
    return "".join(f"{missing:>10}" if value is None else f"{value:10,.1f}" for value in values)


def _cell(value: float | None, width: int) -> str:
    return f"{'':{width}}" if value is None else f"{value:{width}.2f}"


def _about(what: str, preset: str | None, where: Machine) -> "tuple[dict[str, str], Preset]":
    """What every result names, and the preset."""
    import torch

    from longspan.experiments.bench import timing
    from longspan.training.environment import hardware

    name, chosen = timing.preset(preset, where.device)
    return {"bench": what, "preset": name, "device": hardware(where.device), "torch": torch.__version__}, chosen


def _bench(what: str, preset: str | None, json: bool, where: Machine, **options: Any) -> None:
    about, chosen = _about(what, preset, where)
    lines = import_module(f"longspan.experiments.bench.{what}").measure(chosen, where.device, where.dtype, **options)
    if json:
        print_json({**about, "dtype": str(where.dtype), "lines": [line.facts() for line in lines]})
        return
    print(", ".join(about.values()))
    print(
        f"{'':34} {'ours':>11} {'baseline':>11} {'ratio':>8} {'by count':>8} "
        f"{'TFLOP/s':>8} {'baseline':>8} {'memory':>7}"
    )
    for line in lines:
        memory = "" if line.memory_ratio is None else f"{line.memory_ratio:7.3f}"
        print(
            f"{line.what:34} {line.ours:11,.1f} {line.theirs:11,.1f} {line.ratio:8.3f} {line.by_count:8.3f} "
            f"{line.tflops:8.3g} {line.their_tflops:8.3g} {memory:>7}  {line.unit}; baseline: {line.rival}",
            flush=True,
        )
