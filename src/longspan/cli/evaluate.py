"""`longspan eval`: the score of a text."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from longspan.cli.options import (
    DeviceName,
    DtypeName,
    Json,
    ModelOrBundled,
    Threads,
    machine,
    note,
    note_bundled,
    print_json,
    print_rows,
)
from longspan.cli.progress import progress
from longspan.cli.reading_options import Clamp, Discount, Memory, Pointer, SameLength, Segment, given_settings
from longspan.cli.text_options import Data, Encoding, Field, Sentences, Split, data_path
from longspan.errors import ConfigError

if TYPE_CHECKING:
    from longspan.contract import LanguageModel
    from longspan.reading import Reading
    from longspan.scoring.dynamic import Dynamics
    from longspan.scoring.score import Score


def evaluate(
    *,
    model: ModelOrBundled = None,
    data: Data,
    field: Field = None,
    encoding: Encoding = None,
    split: Split = None,
    sentences: Sentences = None,
    segment: Segment = None,
    memory: Memory = None,
    clamp: Clamp = None,
    discount: Discount = None,
    pointer: Pointer = None,
    same_length: SameLength = None,
    sliding: Annotated[
        bool | None,
        typer.Option(
            "--sliding/--no-sliding",
            help="Score every token with a sliding window of --segment tokens, or score segment by segment. "
            "Default: sliding if the model has no memory.",
        ),
    ] = None,
    temp: Annotated[
        float | None,
        typer.Option("--temp", help="Divide logits by this before the softmax. Default: the model's setting."),
    ] = None,
    dynamic: Annotated[
        bool,
        typer.Option(
            "--dynamic",
            help="Dynamic evaluation: take a gradient step on every segment after scoring it. The model on disk is "
            "unchanged.",
        ),
    ] = False,
    dynamic_rate: Annotated[
        float | None, typer.Option("--dynamic-rate", help="Learning rate of --dynamic. Default: 5e-5.")
    ] = None,
    dynamic_decay: Annotated[
        float | None,
        typer.Option("--dynamic-decay", help="Decay towards the original weights for --dynamic. Default: 0."),
    ] = None,
    streams: Annotated[
        int, typer.Option("--streams", help="Cut the text into this many parts and read them in parallel.")
    ] = 1,
    losses: Annotated[
        Path | None,
        typer.Option("--losses", help="Write the loss of every token, in nats, to this .npy (float32) or .csv file."),
    ] = None,
    json: Json = False,
    device: DeviceName = "auto",
    dtype: DtypeName = "auto",
    threads: Threads = 0,
) -> None:
    """Print the loss of a text in bits and nats, and its perplexity.

    Settings that are not given are those of the model.
    """
    from longspan.bundled import model_path
    from longspan.checkpoints.model_folder import find_model, open_model
    from longspan.data import CORPORA
    from longspan.models.families import name_of
    from longspan.scoring.dynamic import learning_dtypes, static_reading
    from longspan.scoring.loss_file import check_loss_file, loss_file
    from longspan.scoring.losses import check_text
    from longspan.scoring.score import default_method, score
    from longspan.training.model_text import open_text_for

    where = machine(device, dtype, threads)
    weights, precision = learning_dtypes(where.dtype) if dynamic else (where.dtype, None)
    dynamics = _dynamics(dynamic, sliding, streams, dynamic_rate, dynamic_decay)
    if losses is not None:
        check_loss_file(losses, data)
    context = given_settings(segment=segment, memory=memory, clamp=clamp, discount=discount)
    settings = context | given_settings(same_length=same_length, pointer=pointer, temperature=temp)
    found = find_model(model_path(model))
    loaded = open_model(found, overrides=settings, device=where.device, dtype=weights)
    net, reading = loaded.model, loaded.model.reading
    net.require_next_token()
    natural = default_method(net, reading)
    method = natural if sliding is None else "sliding" if sliding else "stream"
    if method == "sliding" and streams != 1 and dynamics is None:
        why = "--sliding" if sliding else "a model without memory"
        raise ConfigError(f"--streams {streams} cannot be combined with the sliding window of {why}; use --no-sliding")
    form: Any = {"field": field, "encoding": encoding, "sentences": sentences}
    with progress("encoding", quiet=json, in_bytes=True) as bar:
        text = open_text_for([found.path], data_path(data), loaded.tokenizer, split, progress=bar, **form)
    total = check_text(net, text.ids)
    note_bundled(model)
    if split is None and data in CORPORA:
        note(f"scoring all of {data}, including training text; use --split test for held-out text")
    if split is not None:
        note(text.describe())
    if natural == "sliding" and sliding is None:
        _note_window(name_of(net), reading.segment, learning=dynamics is not None)

    def run(name: str, way: "Reading" = reading, **options: Any) -> Any:
        with progress(name, quiet=json) as bar:
            return score(net, text, way, precision=precision, progress=bar, **options)

    alone = static_reading(reading, where.device)
    static = None if dynamics is None else run("scoring", alone, method="stream")
    with loss_file(losses, total) as out:
        options: dict[str, Any] = {"losses": False if out is None else out}
        if dynamics is not None:
            result = run("learning", method="dynamic", dynamics=dynamics, **options)
        else:
            result = run("scoring", method=method, streams=streams, **options)
    facts = {"tokens": len(text.ids)} | _facts(net, result, static, dynamics, loaded.tokenizer.unit)
    if json:
        print_json(facts | ({"split": split, "files": list(text.files)} if split else {}))
    else:
        print_rows(facts)


def _facts(
    model: "LanguageModel", result: "Score", static: "Score | None", dynamics: "Dynamics | None", unit: str
) -> dict[str, Any]:
    """The values that are printed. `static` is the score without learning, for comparison with a dynamic one."""
    from longspan.checkpoints.model_folder import reading_of

    facts: dict[str, Any] = {
        "scored": result.scored,
        "nats": result.nats,
        f"bits_per_{unit}": result.bits,
        "perplexity": result.perplexity,
        **({} if unit == "byte" else {"bits_per_byte": result.bits_per_byte}),
        "perplexity_per_word": result.perplexity_per_word,
        "tokens_per_second": result.tokens_per_second,
        "seconds": result.seconds,
        **({} if model.has_memory() else {"memory": 0}),
        **reading_of(model),
        "streams": result.streams,
        "sliding": result.method == "sliding",
        **model.facts(),
    }
    if dynamics is not None and static is not None:
        facts |= {"dynamic": True, "dynamic_rate": dynamics.rate, "dynamic_decay": dynamics.decay}
        facts |= {f"static_bits_per_{unit}": static.bits, "static_perplexity": static.perplexity}
    return facts


def _dynamics(
    asked: bool, sliding: bool | None, streams: int, rate: float | None, decay: float | None
) -> "Dynamics | None":
    """The settings of --dynamic, or None without it; refuses flags that it cannot be combined with."""
    from longspan.scoring.dynamic import Dynamics

    given = {key: value for key, value in (("rate", rate), ("decay", decay)) if value is not None}
    if not asked:
        for key in given:
            raise ConfigError(f"--dynamic-{key} {given[key]} has no effect without --dynamic; add --dynamic")
        return None
    if sliding:
        raise ConfigError(
            "--dynamic learns segment by segment, so it cannot be combined with --sliding; use only one of them"
        )
    if streams != 1:
        raise ConfigError(
            f"--dynamic reads the text as one stream, so it cannot be combined with --streams {streams}; leave "
            "out --streams"
        )
    return Dynamics(**given)


def _note_window(family: str, window: int, *, learning: bool) -> None:
    slides = (
        f"each token gets a full window of {window} tokens (slow, but the best score); "
        "--no-sliding scores segment by segment"
    )
    learns = f"--dynamic scores segments of {window} tokens, each without context"
    note(f"{family} is read without memory, so {learns if learning else slides}")
