"""`longspan eval`: how well a model predicts a text."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from longspan.cli.options import (
    DeviceName,
    DtypeName,
    Json,
    ModelOrBox,
    Threads,
    machine,
    print_json,
    print_rows,
    say,
    tell_of_box,
)
from longspan.cli.progress import progress
from longspan.errors import ConfigError

if TYPE_CHECKING:
    from longspan.evaluation.dynamic import Dynamics
    from longspan.evaluation.likelihood import Pace, Stretch, Tally


def evaluate(
    *,
    model: ModelOrBox = None,
    data: Annotated[str, typer.Option("--data", help="A file or folder, or a corpus that `longspan data list` names.")],
    split: Annotated[
        str | None, typer.Option("--split", help="train, valid or test; the whole text unless told.")
    ] = None,
    segment: Annotated[
        int | None, typer.Option("--segment", help="Tokens read at once, or the length of a sliding window.")
    ] = None,
    memory: Annotated[int | None, typer.Option("--memory", help="Positions remembered.")] = None,
    clamp: Annotated[int | None, typer.Option("--clamp", help="Distances beyond this look alike; 0 is off.")] = None,
    copy: Annotated[
        int | None,
        typer.Option("--copy", help="Positions tokens may be copied from, where a model can; 0 is off."),
    ] = None,
    same_length: Annotated[
        bool | None, typer.Option("--same-length/--no-same-length", help="Every query sees as many keys as the memory.")
    ] = None,
    sliding: Annotated[
        bool | None,
        typer.Option(
            "--sliding/--no-sliding",
            help="A fresh window of --segment tokens before every target, or segment after segment; "
            "a window unless told where a model has no memory.",
        ),
    ] = None,
    temp: Annotated[
        float, typer.Option("--temp", help="Divide scores by this before the softmax; 1 leaves them as they are.")
    ] = 1.0,
    dynamic: Annotated[
        bool,
        typer.Option(
            "--dynamic",
            help="Learn from every segment once it is scored, and score without that too; weights on disk stay.",
        ),
    ] = False,
    dynamic_rate: Annotated[
        float | None, typer.Option("--dynamic-rate", help="How far a weight moves per segment; 5e-5 unless told.")
    ] = None,
    dynamic_decay: Annotated[
        float | None, typer.Option("--dynamic-decay", help="How strongly it is drawn back; 0 unless told.")
    ] = None,
    lanes: Annotated[int, typer.Option("--lanes", help="Cut the text into this many streams read side by side.")] = 1,
    losses: Annotated[
        Path | None, typer.Option("--losses", help="Write the losses in nats to this file, .npy (float32) or .csv.")
    ] = None,
    json: Json = False,
    device: DeviceName = "auto",
    dtype: DtypeName = "auto",
    threads: Threads = 0,
) -> None:
    """Bits, nats and perplexity of a text. Flags left out come from the model's config."""
    import torch

    from longspan.box import box
    from longspan.checkpoints.model_folder import find_model, open_model
    from longspan.data import CORPORA, open_corpus
    from longspan.evaluation.dynamic import dynamic_losses
    from longspan.evaluation.likelihood import (
        Pace,
        Tally,
        check_temperature,
        slides,
        sliding_losses,
        stream_losses,
        warm_up,
    )
    from longspan.evaluation.loss_file import check_loss_file, loss_file
    from longspan.models.families import name_of
    from longspan.training.recipe import held_out_of

    where = machine(device, dtype, threads)
    weights, products = where.dtype, None
    if dynamic and weights == torch.bfloat16:
        # Steps of learning are lost in bfloat16, whose neighbours lie further apart than they reach; products are not.
        weights, products = torch.float32, torch.bfloat16
    dynamics = _dynamics(dynamic, sliding, lanes, dynamic_rate, dynamic_decay)
    if segment is not None and segment < 1:
        raise ConfigError(f"--segment {segment} must be at least 1")
    check_temperature(temp)
    if losses is not None:
        check_loss_file(losses, data)
    given = {"memory": memory, "clamp": clamp, "same_length": same_length, "copy": copy}
    overrides = {name: value for name, value in given.items() if value is not None}
    found = find_model(box(model))
    _check_flags(overrides, found.contents["config.json"])
    loaded = open_model(found, overrides=overrides, device=where.device, dtype=weights)
    loaded.model.head.temperature = temp
    config = loaded.model.config
    window = config.segment if segment is None else segment
    windowed = slides(loaded.model, sliding)
    slid = windowed and dynamics is None
    if slid and lanes != 1:
        why = "--sliding" if sliding else "a model without memory"
        raise ConfigError(f"--lanes are of a stream, and {why} reads a window for every token; use --no-sliding")
    text = open_corpus(data, split, loaded.tokenizer, held_out=held_out_of(found.path, data))
    wanted: dict[str, Any] = {"segment": window, "starts": text.starts[1:]}

    def tell() -> None:
        tell_of_box(model)
        if split is None and data in CORPORA:
            _tell_of_splits(data)
        for line in text.tell_files(*([split] if split else [])):
            say(line)
        if windowed and sliding is None:
            _tell_of_windows(name_of(loaded.model), window, learning=dynamics is not None)

    add_up = partial(_add_up, total=len(text.ids) - 1, lanes=lanes, quiet=json)
    warm = warm_up(loaded.model, window)
    with loss_file(losses, len(text.ids) - 1) as out:
        tally, static = Tally(out), Tally()
        if dynamics is not None:
            with torch.autocast(where.device.type, products, enabled=products is not None):
                add_up(static, Pace(warm), stream_losses(loaded.model, text.ids, **wanted), tell)
            stretches = dynamic_losses(loaded.model, text.ids, **wanted, dynamics=dynamics, products=products)
        elif slid:
            stretches = sliding_losses(loaded.model, text.ids, **wanted)
        else:
            stretches = stream_losses(loaded.model, text.ids, **wanted, lanes=lanes)
        pace = Pace(warm)
        add_up(tally, pace, stretches, None if static.count else tell)
    facts: dict[str, Any] = {"tokens": len(text.ids), "scored": tally.count, "nats": tally.mean}
    facts |= {
        f"bits_per_{loaded.tokenizer.unit}": tally.bits,
        "perplexity": tally.perplexity,
        "tokens_per_second": pace.tokens_per_second,
        "seconds": pace.seconds,
        "segment": window,
        **({} if loaded.model.has_memory else {"memory": 0}),
        **{name: getattr(config, name) for name in given if hasattr(config, name)},
        "lanes": lanes,
        "sliding": slid,
        "temperature": temp,
        **loaded.model.facts(),
    }
    if dynamics is not None:
        facts |= {"dynamic": True, "dynamic_rate": dynamics.rate, "dynamic_decay": dynamics.decay}
        facts |= {f"static_bits_per_{loaded.tokenizer.unit}": static.bits, "static_perplexity": static.perplexity}
    if json:
        print_json(facts | ({"split": split, "files": list(text.splits[split])} if split and text.splits else {}))
    else:
        print_rows(facts)


def _add_up(
    tally: "Tally",
    pace: "Pace",
    stretches: "Iterator[Stretch]",
    tell: Callable[[], None] | None,
    *,
    total: int,
    lanes: int,
    quiet: bool,
) -> None:
    first = next(stretches)  # what cannot be scored is refused here, in one sentence
    if tell is not None:
        tell()
    with progress("scoring", quiet=quiet) as watch:
        for count, stretch in enumerate(chain([first], stretches), start=1):
            tally.add(stretch)
            if count % lanes == 0:  # a segment of every lane
                pace.mark(tally.count)
            if watch is not None:
                watch(tally.count, total)


def _dynamics(
    asked: bool, sliding: bool | None, lanes: int, rate: float | None, decay: float | None
) -> "Dynamics | None":
    from longspan.evaluation.dynamic import Dynamics

    given = {key: value for key, value in (("rate", rate), ("decay", decay)) if value is not None}
    if not asked:
        for key in given:
            raise ConfigError(f"--dynamic-{key} is a setting of --dynamic; add that too")
        return None
    if sliding:
        raise ConfigError("--dynamic learns from segments as they pass, and --sliding has none; choose one of them")
    if lanes != 1:
        raise ConfigError(f"--dynamic learns in the order of the text, and --lanes {lanes} reads ahead; leave it out")
    return Dynamics(**given)


def _tell_of_splits(corpus: str) -> None:
    say(f"{corpus} is read whole, its training text too; --split test reads what no recipe trains on")


def _tell_of_windows(family: str, window: int, *, learning: bool) -> None:
    slides = (
        f"each token is scored with a fresh window of the {window} tokens before it, its best, at the cost of one "
        "window per token; --no-sliding reads segment by segment"
    )
    learns = f"--dynamic reads segments of {window} tokens, the first of each with nothing before it"
    say(f"this {family} has no memory, so {learns if learning else slides}")


def _check_flags(overrides: dict[str, Any], described: bytes) -> None:
    """A flag must be a key of the model's family."""
    from longspan.checkpoints.manifest import read_json
    from longspan.config import keys
    from longspan.models.families import family

    name = str(read_json(described, "config.json").get("family"))
    for flag in overrides:
        if flag not in keys(family(name).Config):
            raise ConfigError(
                f"--{flag.replace('_', '-')} is not for a {name}, which has no model.{flag}; leave it out"
            )
