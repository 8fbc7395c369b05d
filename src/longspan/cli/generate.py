"""`longspan generate`: text that follows a prompt, streamed as it is written."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TextIO

import typer

from longspan.cli.options import DeviceName, DtypeName, ModelOrBox, Threads, machine, tell_of_box
from longspan.errors import ConfigError, DataError, GenerationError
from longspan.terminal import unguarded

PROMPT_BYTES = 16 << 20  # several times the longest novel


def generate(
    model: ModelOrBox = None,
    source: Annotated[str, typer.Argument(metavar="[-]", help="- reads the prompt from standard input.")] = "",
    prompt: Annotated[str | None, typer.Option("-p", "--prompt", help="The text to go on from.")] = None,
    prompt_file: Annotated[Path | None, typer.Option("--prompt-file", help="A file with it, at most 16 MiB.")] = None,
    count: Annotated[int, typer.Option("-n", "--tokens", help="How many tokens to write.")] = 200,
    temp: Annotated[float, typer.Option("--temp", help="Temperature; 0 takes the likeliest token.")] = 1.0,
    top_k: Annotated[int, typer.Option("--top-k", help="Only the k likeliest tokens; 0 is off.")] = 0,
    top_p: Annotated[float, typer.Option("--top-p", help="Only the likeliest that make up p; 1 is off.")] = 1.0,
    min_p: Annotated[
        float, typer.Option("--min-p", help="Only tokens at least p times the likeliest; 0 is off.")
    ] = 0.0,
    seed: Annotated[
        int | None, typer.Option("--seed", help="Same seed, same text; 0 unless given, or as a loaded state left it.")
    ] = None,
    save_state: Annotated[
        Path | None, typer.Option("--save-state", help="Where to leave the state at the end.")
    ] = None,
    load_state: Annotated[Path | None, typer.Option("--load-state", help="A saved state to go on from.")] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Write control characters to a terminal unchanged, not as \\x1b.")
    ] = False,
    device: DeviceName = "auto",
    dtype: DtypeName = "auto",
    threads: Threads = 0,
) -> None:
    """Write text that follows a prompt."""
    from longspan.generation.sampling import Sampling
    from longspan.text_model import load

    if count < 0:
        raise ConfigError(f"-n {count} must not be negative")
    if save_state is not None and save_state.is_dir():
        raise ConfigError(f"--save-state {save_state} is a folder; give the name of a file")
    if save_state is not None and save_state.exists() and not save_state.is_file():
        raise ConfigError(f"--save-state {save_state} is a device or a pipe; give the name of a plain file")
    if str(model) == "-" and not source:
        model, source = None, "-"
    sampling = Sampling(temp, top_k, top_p, min_p)
    out = unguarded(sys.stdout) if raw else sys.stdout
    if model is not None and not (source or prompt or prompt_file):
        _check_is_no_prompt(model)
    text = _prompt(source, prompt, prompt_file)
    where = machine(device, dtype, threads)
    loaded = load(model, device=where.device, dtype=where.dtype)
    session = loaded.session(text, seed=seed, state=load_state)
    tell_of_box(model)
    try:
        _put(loaded.spelled(session, text), out)
        for piece in loaded.stream(session, count, sampling, last=save_state is None):
            _put(piece, out)
    except GenerationError:
        save_state = None  # the state is not finite either, and may be about to replace one that is
        raise
    finally:
        # Whatever ends it, an interrupt or a reader that went away, what was read and written is kept.
        if save_state is not None:
            loaded.save_session(session, save_state)
    _put("\n", out)


def _put(text: str, out: TextIO) -> None:
    out.write(text)
    out.flush()


def _check_is_no_prompt(model: Path) -> None:
    """Whoever types a prompt where the model stands is told where it goes."""
    if not os.path.lexists(model):  # unlike Path.exists, this takes what is too long for a name
        raise ConfigError(f"there is no model folder {str(model)[:60]!r}; if that is the prompt, put -p before it")
    if model.is_file():
        raise ConfigError(f"{model} is a file and no model folder; if it holds the prompt, write --prompt-file {model}")


def _prompt(source: str, prompt: str | None, prompt_file: Path | None) -> bytes:
    """The prompt from the one place it was given."""
    given = [name for name, there in (("-p", prompt), ("--prompt-file", prompt_file), ("-", source)) if there]
    if len(given) > 1:
        raise ConfigError(f"the prompt was given twice, by {' and '.join(given)}; use one of them")
    if source == "-":
        if sys.stdin is None:
            raise DataError("standard input is closed; give the prompt with -p or --prompt-file")
        return _bounded(sys.stdin.buffer.read, "standard input")
    if source:
        raise ConfigError(f"{source!r} is no prompt; write -p {source!r}, or - for standard input")
    if prompt_file is not None:
        try:
            with prompt_file.open("rb") as file:
                return _bounded(file.read, str(prompt_file))
        except OSError as error:
            raise DataError(f"the prompt {prompt_file} cannot be read: {error.strerror}") from None
    return (prompt or "").encode("utf-8", errors="surrogateescape")


def _bounded(read: Callable[[int], bytes], name: str) -> bytes:
    """All of a file, unless it is longer than a prompt may be; a device or a pipe may never end."""
    text = read(PROMPT_BYTES + 1)
    if len(text) > PROMPT_BYTES:
        raise DataError(f"the prompt {name} has more than {PROMPT_BYTES:,} bytes; give a shorter one")
    return text
