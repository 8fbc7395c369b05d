"""`longspan init`, `info` and `families`: create a model, describe one, list the families."""

from pathlib import Path
from typing import Annotated, Any

import typer

from longspan.cli.completion import family_values
from longspan.cli.keys import keys_help
from longspan.cli.options import (
    DeviceName,
    DtypeName,
    FormerTokens,
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
    family: Annotated[
        str, typer.Option("--family", autocompletion=family_values, help="A family from `longspan families`.")
    ] = "transformer-xl",
    set_: Set = [],  # noqa: B006 (typer copies it)
    tokenizer: Annotated[
        str | None,
        typer.Option("--tokenizer", help="bytes, characters, or a VOCAB.txt with one word per line. Default: bytes."),
    ] = None,
    tokens: FormerTokens = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the initial weights.")] = 0,
    device: DeviceName = "auto",
    dtype: DtypeName = "auto",
    threads: Threads = 0,
) -> None:
    from longspan.api import create
    from longspan.config import parse_overrides
    from longspan.models.families import family as family_of

    where = machine(device, dtype, threads)
    values = parse_overrides(set_)
    if unknown := set(values) - {"model", "reading"}:
        known = [f"model.{key}" for key in _keys_of(family)] + [f"reading.{key}" for key in family_of(family).settings]
        raise UnknownNameError("key", sorted(unknown)[0], known)
    for table, example in (("model", "model.layers=6"), ("reading", "reading.memory=640")):
        if not isinstance(values.get(table, {}), dict):
            raise ConfigError(f"--set {table}={values[table]} has no key; write for example --set {example}")
    name = tokenizer or tokens or "bytes"
    model = create(family, values.get("model", {}), name, reading=values.get("reading"), seed=seed, device=where.device)
    if dtype != "auto":
        model.to(dtype=where.dtype)
    model.save(out, notes=[f"Untrained, seed {seed}."])
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
) -> None:
    """Print the size, config and reading settings of a model.

    Also prints its reach (the longest context that it can use) and the size of its state.
    """
    from longspan.bundled import model_path
    from longspan.checkpoints.model_folder import load_model, reading_of
    from longspan.config import plain
    from longspan.contract import UNBOUNDED
    from longspan.models.families import name_of, state_bytes

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
    """List the model families and whether they have a memory across segments."""
    from longspan.models.families import known_families, summary

    found = {name: summary(name) for name in known_families()}
    if json:
        lines = {name: one.description for name, one in found.items()}
        print_json({"families": lines, "memory": {name: one.memory for name, one in found.items()}})
        return
    width = max(len(one.memory) for one in found.values())
    print_rows({name: f"{one.memory:<{width}}  {one.description}" for name, one in found.items()})
