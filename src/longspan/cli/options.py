"""Options and output shared by several commands."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from longspan.bundled import ABOUT
from longspan.config import finite
from longspan.errors import ConfigError
from longspan.threads import set_threads

if TYPE_CHECKING:
    import torch

Model = Annotated[Path, typer.Argument(metavar="MODEL", help="A model folder, or the folder of a training run.")]
ModelOrBundled = Annotated[
    Path | None,
    typer.Argument(metavar="MODEL", help="A model folder or the folder of a training run. Default: the bundled model."),
]
Set = Annotated[
    list[str],
    typer.Option("--set", metavar="KEY=VALUE", help="Set a key, for example model.layers=6; can be repeated."),
]
SetReading = Annotated[
    list[str],
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Change a reading setting, for example reading.memory=640; can be repeated."
    ),
]
FormerTokens = Annotated[str | None, typer.Option("--tokens", hidden=True, help="The former name of --tokenizer.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output and nothing else.")]
DeviceName = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N.")]
DtypeName = Annotated[
    str, typer.Option("--dtype", help="auto (float32 on a CPU, bfloat16 on CUDA), float32, bfloat16 or float64.")
]
Threads = Annotated[
    int, typer.Option("--threads", help="Number of CPU threads. 0 uses OMP_NUM_THREADS or all free cores.")
]


@dataclass(frozen=True)
class Machine:
    device: "torch.device"
    dtype: "torch.dtype"


def machine(device: str, dtype: str, threads: int) -> Machine:
    """The device and dtype that --device and --dtype select; sets the number of threads."""
    from longspan.device import find_device, find_dtype

    if threads < 0:
        raise ConfigError(f"--threads {threads} is negative; use 0 for all free cores")
    set_threads(threads)
    where = find_device(device)
    return Machine(where, find_dtype(dtype, where))


def note(sentence: str) -> None:
    """Print a remark on standard error."""
    print(f"longspan: {sentence}", file=sys.stderr, flush=True)


def note_bundled(model: Path | None) -> None:
    """Print that the bundled model is used, if no MODEL was named. Call it after all checks: an error is one line."""
    if model is None:
        note(f"using {ABOUT}")


def print_json(values: dict[str, Any]) -> None:
    """One JSON object on standard output; infinities and NaN become null."""
    json.dump(finite(values), sys.stdout, ensure_ascii=False, allow_nan=False)
    sys.stdout.write("\n")


def print_rows(rows: dict[str, Any]) -> None:
    """Names and values in two aligned columns."""
    width = max(len(name) for name in rows)
    for name, value in rows.items():
        print(f"{name:<{width}}  {_format(value)}")


def _format(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4f}" if value == 0 or abs(value) >= 0.01 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
