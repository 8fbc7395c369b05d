"""`longspan init`, `info` and `families`: create a model, describe one, list the families."""

from pathlib import Path
from typing import Annotated, Any

import typer

from longspan.cli.keys import keys_help
from longspan.cli.options import (
    DeviceName,
    DtypeName,
    Json,
    ModelOrBundled,
    Set,
    Threads,
    machine,
    note_bundled,
    print_json,
    print_rows,
)
from longspan.errors import ConfigError, UnknownNameError


def init(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The model folder to create.")],
    family: Annotated[str, typer.Option("--family", help="A family from `longspan families`.")] = "transformer-xl",
    set_: Set = [],  # noqa: B006 (typer copies it)
    tokens: Annotated[str, typer.Option("--tokens", help="bytes, characters, or a VOCAB.txt.")] = "bytes",
    seed: Annotated[int, typer.Option("--seed", help="Seed of the initial weights.")] = 0,
    device: DeviceName = "auto",
    dtype: DtypeName = "auto",
    threads: Threads = 0,
) -> None:
    import torch

    from longspan.checkpoints.model_folder import override, require_model_keys, save_model
    from longspan.config import parse_overrides
    from longspan.interop.vocabulary import tokenizer_for
    from longspan.models.families import build
    from longspan.models.families import family as family_of

    where = machine(device, dtype, threads)
    values = parse_overrides(set_)
    if unknown := set(values) - {"model", "reading"}:
        known = [f"model.{key}" for key in _keys_of(family)] + [f"reading.{key}" for key in family_of(family).settings]
        raise UnknownNameError("key", sorted(unknown)[0], known)
    torch.manual_seed(seed % 2**63)
    for table, example in (("model", "model.layers=6"), ("reading", "reading.memory=640")):
        if not isinstance(values.get(table, {}), dict):
            raise ConfigError(f"--set {table}={values[table]} has no key; write for example --set {example}")
    settings = values.get("model", {})
    require_model_keys(family, settings)
    reading = override(family, family_of(family).reading, values.get("reading", {}))
    vocabulary = settings.get("vocabulary")
    tokenizer = tokenizer_for(tokens, vocabulary if isinstance(vocabulary, int) else None)
    model = build(family, {"vocabulary": tokenizer.size, **settings}, reading)
    if dtype != "auto":
        model = model.to(where.dtype)
    save_model(out, model, tokenizer, notes=[f"Untrained, seed {seed}."])
    print(f"{out}: {family}, {model.parameter_count:,} parameters, untrained")


init.__doc__ = f"""Create an untrained model.

{keys_help()}
"""


def _keys_of(family_name: str) -> list[str]:
    from longspan.config import keys
    from longspan.models.families import family

    return list(keys(family(family_name).Config))


def info(
    model: ModelOrBundled = None,
    json: Json = False,
    device: DeviceName = "auto",
    dtype: DtypeName = "auto",
    threads: Threads = 0,
) -> None:
    """Print the size, reach, state size, config and reading of a model."""
    from longspan.bundled import model_path
    from longspan.checkpoints.model_folder import load_model, reading_of
    from longspan.config import plain
    from longspan.contract import UNBOUNDED
    from longspan.models.families import name_of, state_bytes

    machine(device, dtype, threads)
    loaded = load_model(model_path(model))
    note_bundled(model)
    net, parts = loaded.model, loaded.model.parameters_by_part()
    facts: dict[str, Any] = {
        "family": name_of(net),
        "parameters": net.parameter_count,
        "tokenizer": loaded.tokenizer.kind,
        "vocabulary": net.config.vocabulary,
        "reach": None if net.reach() == UNBOUNDED else net.reach(),
        "has_memory": net.has_memory(),
        "state_bytes_per_row": state_bytes(net),
        "hash": loaded.hash,
        **net.facts(),
    }
    if json:
        print_json({**facts, "parts": parts, "config": plain(net.config), "reading": reading_of(net)})
        return
    print_rows(facts | {"reach": "unbounded" if facts["reach"] is None else facts["reach"]})
    print("\nparameters by part")
    print_rows(parts)
    print("\nconfig")
    print_rows(plain(net.config))
    print("\nreading")
    print_rows(reading_of(net))


def families(json: Json = False) -> None:
    """List the model families, and whether they have a memory across segments."""
    from longspan.models.families import family, known_families

    # The first line of a family's module describes it and ends with the path of its page.
    lines = {name: _first_line(family(name)) for name in known_families()}
    memories = {name: _memory(name) for name in known_families()}
    if json:
        print_json({"families": lines, "memory": memories})
        return
    width = max(map(len, memories.values()))
    print_rows({name: f"{memories[name]:<{width}}  {line}" for name, line in lines.items()})


def _memory(family: str) -> str:
    """Whether a family has a memory: always, never, or by the setting reading.memory and its default."""
    from longspan.models.families import family as family_of
    from longspan.models.families import outline

    model = outline(family, family_of(family).Config())
    if "memory" in model.settings:
        return f"memory, default {model.reading.memory}"
    return "memory" if model.has_memory() else "no memory"


def _first_line(cls: type) -> str:
    import sys

    return (sys.modules[cls.__module__].__doc__ or "").splitlines()[0]
