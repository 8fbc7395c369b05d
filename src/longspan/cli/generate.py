"""`longspan generate`: text that follows a prompt, printed as it is generated."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TextIO

import typer

from longspan.cli.options import DeviceName, DtypeName, ModelOrBundled, Threads, machine, note_bundled
from longspan.cli.reading_options import Clamp, Discount, Memory, Pointer, SameLength, Segment, given_settings
from longspan.errors import ConfigError, DataError, GenerationError
from longspan.terminal import unguarded

PROMPT_BYTES = 16 << 20
"""Longest prompt: several times the longest novel."""


def generate(
    model: ModelOrBundled = None,
    source: Annotated[str, typer.Argument(metavar="[-]", help="- reads the prompt from standard input.")] = "",
    prompt: Annotated[str | None, typer.Option("-p", "--prompt", help="The prompt.")] = None,
    prompt_file: Annotated[
        Path | None, typer.Option("--prompt-file", help="A file with the prompt, at most 16 MiB.")
    ] = None,
    count: Annotated[int, typer.Option("-n", "--tokens", help="Number of tokens to generate.")] = 200,
    temp: Annotated[float, typer.Option("--temp", help="Temperature; 0 is greedy.")] = 1.0,
    top_k: Annotated[int, typer.Option("--top-k", help="Sample from the k most likely tokens; 0 is off.")] = 0,
    top_p: Annotated[
        float, typer.Option("--top-p", help="Sample from the most likely tokens that sum to p; 1 is off.")
    ] = 1.0,
    min_p: Annotated[
        float, typer.Option("--min-p", help="Drop tokens below p times the highest probability; 0 is off.")
    ] = 0.0,
    segment: Segment = None,
    memory: Memory = None,
    clamp: Clamp = None,
    discount: Discount = None,
    pointer: Pointer = None,
    same_length: SameLength = None,
    seed: Annotated[
        int | None, typer.Option("--seed", help="Random seed. Default: 0, or the generator of --load-state.")
    ] = None,
    save_state: Annotated[
        Path | None, typer.Option("--save-state", help="Write the state after the last token to this file.")
    ] = None,
    load_state: Annotated[Path | None, typer.Option("--load-state", help="Continue from a saved state.")] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Print control characters unchanged to a terminal, not as \\x1b.")
    ] = False,
    device: DeviceName = "auto",
    dtype: DtypeName = "auto",
    threads: Threads = 0,
) -> None:
    """Generate text that follows a prompt."""
    from longspan.decoding.sampling import Sampling
    from longspan.text_model import load

    if count < 0:
        raise ConfigError(f"-n {count} must be at least 0")
    if save_state is not None and save_state.is_dir():
        raise ConfigError(f"--save-state {save_state} is a folder; give the name of a file")
    if save_state is not None and save_state.exists() and not save_state.is_file():
        raise ConfigError(f"--save-state {save_state} is a device or a pipe; give the name of a regular file")
    if str(model) == "-" and not source:
        model, source = None, "-"
    sampling = Sampling(temp, top_k, top_p, min_p)
    out = unguarded(sys.stdout) if raw else sys.stdout
    if model is not None and not (source or prompt or prompt_file):
        _check_not_a_prompt(model)
    text = _prompt(source, prompt, prompt_file)
    where = machine(device, dtype, threads)
    loaded = load(model, device=where.device, dtype=where.dtype)
    context = given_settings(segment=segment, memory=memory, clamp=clamp, discount=discount)
    settings = context | given_settings(same_length=same_length, pointer=pointer)
    session = loaded.session(text, seed=seed, state=load_state, **settings)
    note_bundled(model)
    try:
        _put(loaded.echo(session, text), out)
        for piece in loaded.stream(session, count, sampling, last=save_state is None):
            _put(piece, out)
    except (GenerationError, KeyboardInterrupt) as error:
        _put("\n", out)  # the sentence about the error gets a line of its own
        if isinstance(error, GenerationError):
            save_state = None  # the state is not finite either and must not replace a good one
        raise
    finally:
        # The state is saved also after an interrupt, or if the reader of a pipe has exited.
        if save_state is not None:
            loaded.save_session(session, save_state)
    _put("\n", out)


def _put(text: str, out: TextIO) -> None:
    out.write(text)
    out.flush()


def _check_not_a_prompt(model: Path) -> None:
    """Explain how to pass a prompt to a user who gave it in place of MODEL."""
    if not os.path.lexists(model):  # unlike Path.exists, this accepts names that are too long
        raise ConfigError(f"there is no model folder {str(model)[:60]!r}; if that is the prompt, put -p before it")
    if model.is_file():
        raise ConfigError(f"{model} is a file, not a model folder; if it is the prompt, use --prompt-file {model}")


def _prompt(source: str, prompt: str | None, prompt_file: Path | None) -> bytes:
    """The prompt from -p, --prompt-file or standard input; only one may be given."""
    given = [name for name, value in (("-p", prompt), ("--prompt-file", prompt_file), ("-", source)) if value]
    if len(given) > 1:
        raise ConfigError(f"the prompt is given twice, by {' and '.join(given)}; use one of them")
    if source == "-":
        if sys.stdin is None:
            raise DataError("standard input is closed; give the prompt with -p or --prompt-file")
        return _bounded(sys.stdin.buffer.read, "standard input")
    if source:
        raise ConfigError(f"{source!r} is an unexpected argument; write -p {source!r}, or - for standard input")
    if prompt_file is not None:
        try:
            with prompt_file.open("rb") as file:
                return _bounded(file.read, str(prompt_file))
        except OSError as error:
            raise DataError(f"--prompt-file {prompt_file} cannot be read: {error.strerror}") from None
    return (prompt or "").encode("utf-8", errors="surrogateescape")


def _bounded(read: Callable[[int], bytes], name: str) -> bytes:
    """The contents of a file, at most PROMPT_BYTES: a device or a pipe may be endless."""
    text = read(PROMPT_BYTES + 1)
    if len(text) > PROMPT_BYTES:
        raise DataError(f"the prompt {name} has more than {PROMPT_BYTES:,} bytes; give a shorter one")
    return text
