"""`longspan init`, `info` and `families`: make a model, look at one, list what there is."""

from pathlib import Path
from typing import Annotated, Any

import typer

from longspan.cli.keys import keys_help
from longspan.cli.options import (
    DeviceName,
    DtypeName,
    Json,
    ModelOrBox,
    Set,
    Threads,
    machine,
    print_json,
    print_rows,
    tell_of_box,
)
from longspan.errors import ConfigError, UnknownNameError


def init(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The model folder to make.")],
    family: Annotated[str, typer.Option("--family", help="A name that `longspan families` lists.")] = "transformer-xl",
    set_: Set = [],  # noqa: B006 (typer copies it)
    tokens: Annotated[str, typer.Option("--tokens", help="bytes, characters, or a VOCAB.txt.")] = "bytes",
    seed: Annotated[int, typer.Option("--seed", help="Of the initial weights.")] = 0,
    device: DeviceName = "auto",
    dtype: DtypeName = "auto",
    threads: Threads = 0,
) -> None:
    import torch

    from longspan.checkpoints.model_folder import save_model
    from longspan.cli.convert import tokenizer_for
    from longspan.config import parse_overrides
    from longspan.models.families import build

    where = machine(device, dtype, threads)
    values = parse_overrides(set_)
    if strange := set(values) - {"model"}:
        known = [f"model.{key}" for key in _keys_of(family)]
        raise UnknownNameError("key", sorted(strange)[0], known)
    torch.manual_seed(seed % 2**63)
    chosen = values.get("model", {})
    if not isinstance(chosen, dict):
        raise ConfigError(f"--set model={chosen} gives no key; write for example --set model.memory=640")
    tokenizer = tokenizer_for(tokens, chosen.get("vocabulary") if isinstance(chosen.get("vocabulary"), int) else None)
    model = build(family, {"vocabulary": tokenizer.size, **chosen})
    if dtype != "auto":
        model = model.to(where.dtype)
    save_model(out, model, tokenizer, notes=[f"Untrained, seed {seed}."])
    print(f"{out}: {family}, {model.parameter_count:,} parameters, untrained")


init.__doc__ = f"""Make an untrained model.

{keys_help()}
"""


def _keys_of(family_name: str) -> list[str]:
    from longspan.config import keys
    from longspan.models.families import family

    return list(keys(family(family_name).Config))


def info(
    model: ModelOrBox = None,
    json: Json = False,
    device: DeviceName = "auto",
    dtype: DtypeName = "auto",
    threads: Threads = 0,
) -> None:
    """Parameters by part, state per row, reach, and the config of a model."""
    from longspan.box import box
    from longspan.checkpoints.model_folder import load_model
    from longspan.config import plain
    from longspan.contract import UNBOUNDED
    from longspan.models.families import name_of

    machine(device, dtype, threads)
    loaded = load_model(box(model))
    tell_of_box(model)
    net, parts = loaded.model, parameters_by_part(loaded.model)
    facts: dict[str, Any] = {
        "family": name_of(net),
        "parameters": net.parameter_count,
        "tokens": loaded.tokenizer.kind,
        "vocabulary": net.config.vocabulary,
        "reach": None if net.reach == UNBOUNDED else net.reach,
        "has_memory": net.has_memory,
        "state_bytes_per_row": net.state_size * next(net.parameters()).element_size(),
        "hash": loaded.hash,
        **net.facts(),
    }
    if json:
        print_json({**facts, "parts": parts, "config": plain(net.config)})
        return
    print_rows(facts | {"reach": "no bound" if facts["reach"] is None else facts["reach"]})
    print("\nparameters by part")
    print_rows(parts)
    print("\nconfig")
    print_rows(plain(net.config))


def parameters_by_part(model: Any) -> dict[str, int]:
    """Parameters of each top-level part; a tied one counts where it first stands."""
    parts: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        part = name.partition(".")[0]
        parts[part] = parts.get(part, 0) + parameter.numel()
    return parts


def families(json: Json = False) -> None:
    """The families of models, and what each carries from one segment to the next."""
    from longspan.models.families import FAMILIES

    # The first line of a family's file says what it is, and ends with its page in docs/.
    lines = {name: (_first_line(cls)) for name, cls in FAMILIES.items()}
    memories = {name: _memory(name) for name in FAMILIES}
    if json:
        print_json({"families": lines, "memory": memories})
        return
    width = max(map(len, memories.values()))
    print_rows({name: f"{memories[name]:<{width}}  {line}" for name, line in lines.items()})


def _memory(family: str) -> str:
    """Whether a family has a memory: always, never, or as `model.memory` says."""
    from longspan.models.families import family as family_of
    from longspan.models.families import outline

    model = outline(family, family_of(family).Config())
    if "memory" not in _keys_of(family):
        return "memory" if model.has_memory else "no memory"
    return f"model.memory, {model.config.memory} unless set"


def _first_line(cls: type) -> str:
    import sys

    return (sys.modules[cls.__module__].__doc__ or "").splitlines()[0]
