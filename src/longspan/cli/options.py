"""Options that several verbs share, and what they mean on this machine."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from longspan.box import ABOUT
from longspan.errors import ConfigError

if TYPE_CHECKING:
    import torch

Model = Annotated[Path, typer.Argument(metavar="MODEL", help="A model folder, or the folder of a training run.")]
ModelOrBox = Annotated[
    Path | None,
    typer.Argument(
        metavar="MODEL", help="A model folder, or the folder of a training run; the one in the box unless named."
    ),
]
Set = Annotated[
    list[str], typer.Option("--set", metavar="KEY=VALUE", help="A key of the config, for example model.memory=640.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output and nothing else.")]
DeviceName = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N.")]
DtypeName = Annotated[
    str, typer.Option("--dtype", help="auto (float32 on a CPU, bfloat16 on CUDA), float32, bfloat16 or float64.")
]
Threads = Annotated[int, typer.Option("--threads", help="CPU threads; 0 leaves the choice to torch.")]


@dataclass(frozen=True)
class Machine:
    device: "torch.device"
    dtype: "torch.dtype"


def machine(device: str, dtype: str, threads: int) -> Machine:
    """What --device, --dtype and --threads mean on this machine."""
    import torch

    from longspan.device import find_device, find_dtype

    if threads < 0:
        raise ConfigError(f"--threads {threads} must not be negative; 0 leaves the choice to torch")
    if threads:
        torch.set_num_threads(min(threads, 1024))
    where = find_device(device)
    return Machine(where, find_dtype(dtype, where))


def say(sentence: str) -> None:
    """What a reader should know beside the result, where no pipe takes it for the result."""
    print(f"longspan: {sentence}", file=sys.stderr, flush=True)


def tell_of_box(model: Path | None) -> None:
    """Which model this is where none was named; called when nothing is left to refuse, a sentence of its own."""
    if model is None:
        say(f"no MODEL was named; this is {ABOUT}")


def print_json(values: dict[str, Any]) -> None:
    """One object on standard output; numbers JSON cannot hold become null."""
    clean = {k: None if isinstance(v, float) and not abs(v) < float("inf") else v for k, v in values.items()}
    json.dump(clean, sys.stdout, ensure_ascii=False)
    sys.stdout.write("\n")


def print_rows(rows: dict[str, Any]) -> None:
    """Names and values, aligned."""
    width = max(len(name) for name in rows)
    for name, value in rows.items():
        print(f"{name:<{width}}  {_shown(value)}")


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4f}" if value == 0 or abs(value) >= 0.01 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
