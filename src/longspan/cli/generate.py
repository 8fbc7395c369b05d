"""`longspan generate`: text that follows a prompt, printed as it is generated."""

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from longspan.cli.options import DeviceName, DtypeName, ModelOrBundled, Threads, machine, note, note_bundled
from longspan.cli.reading_options import Clamp, Discount, Memory, Pointer, SameLength, Segment, given_settings
from longspan.errors import ConfigError, DataError, GenerationError
from longspan.terminal import unguarded

if TYPE_CHECKING:
    from longspan.decoding.session import Session
    from longspan.text_model import TextModel

PROMPT_BYTES = 16 << 20
"""Longest prompt: several times the longest novel."""


def generate(
    model: ModelOrBundled = None,
    source: Annotated[str, typer.Argument(metavar="-", help="- reads the prompt from standard input.")] = "",
    prompt: Annotated[str | None, typer.Option("-p", "--prompt", help="The prompt.")] = None,
    prompt_file: Annotated[
        Path | None, typer.Option("--prompt-file", help="A file with the prompt, at most 16 MiB.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option("--prompts", metavar="FILE", help='Many prompts: one per line, or JSON lines with "prompt".'),
    ] = None,
    samples: Annotated[int, typer.Option("--n", help="Continuations of every prompt, with consecutive seeds.")] = 1,
    stop: Annotated[
        list[str], typer.Option("--stop", metavar="TEXT", help="End before this text; can be given several times.")
    ] = [],  # noqa: B006 (typer copies it)
    count: Annotated[int, typer.Option("-n", "--tokens", help="Number of tokens to generate.")] = 200,
    temp: Annotated[float, typer.Option("--temp", help="Temperature; 0 is greedy.")] = 1.0,
    top_k: Annotated[int, typer.Option("--top-k", help="Sample from the k most likely tokens; 0 is off.")] = 0,
    top_p: Annotated[
        float, typer.Option("--top-p", help="Sample from the most likely tokens that sum to p; 1 is off.")
    ] = 1.0,
    min_p: Annotated[
        float, typer.Option("--min-p", help="Drop tokens below p times the highest probability; 0 is off.")
    ] = 0.0,
    presence_penalty: Annotated[
        float, typer.Option("--presence-penalty", help="Lower the logits of generated tokens by this; 0 is off.")
    ] = 0.0,
    frequency_penalty: Annotated[
        float, typer.Option("--frequency-penalty", help="The same, times how often they were generated; 0 is off.")
    ] = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option("--repetition-penalty", help="Divide positive logits of generated tokens; 1 is off.")
    ] = 1.0,
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
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per text: prompt, sample and text.")
    ] = False,
    int8: Annotated[
        bool | None,
        typer.Option(
            "--int8/--no-int8",
            help="On a CPU: int8 weights and cache, several times faster. Default: for folders of export --int8.",
        ),
    ] = None,
    device: DeviceName = "auto",
    dtype: DtypeName = "auto",
    threads: Threads = 0,
) -> None:
    """Generate text that follows a prompt."""
    from longspan.decoding.prompts import read_prompts
    from longspan.decoding.sampling import Sampling
    from longspan.decoding.stop import StopText
    from longspan.text_model import load

    if count < 0:
        raise ConfigError(f"-n {count} must be at least 0")
    if save_state is not None and save_state.is_dir():
        raise ConfigError(f"--save-state {save_state} is a folder; give the name of a file")
    if save_state is not None and save_state.exists() and not save_state.is_file():
        raise ConfigError(f"--save-state {save_state} is a device or a pipe; give the name of a regular file")
    if str(model) == "-" and not source:
        model, source = None, "-"
    if samples < 1:
        raise ConfigError(f"--n {samples} must be at least 1")
    if save_state is not None and (prompts is not None or samples > 1):
        raise ConfigError(f"--save-state {save_state} stores one text; leave out --prompts and --n")
    sampling = Sampling(temp, top_k, top_p, min_p, presence_penalty, frequency_penalty, repetition_penalty)
    StopText(stop)  # checks the strings
    out = unguarded(sys.stdout) if raw else sys.stdout
    if model is not None and not (source or prompt or prompt_file or prompts):
        _check_not_a_prompt(model)
    text = _prompt(source, prompt, prompt_file, prompts)
    texts = [text] if prompts is None else [one.encode() for one in read_prompts(prompts)]
    where = machine(device, dtype, threads)
    loaded = load(model, device=where.device, dtype=where.dtype, int8=int8)
    context = given_settings(segment=segment, memory=memory, clamp=clamp, discount=discount)
    settings = context | given_settings(same_length=same_length, pointer=pointer)
    if as_json or len(texts) > 1 or samples > 1:
        seeds = [None] if samples == 1 else [(seed or 0) + k for k in range(samples)]
        start = partial(loaded.session, seed=seed, state=load_state, **settings)
        write = partial(loaded.stream, count=count, sampling=sampling, stop=stop)
        note_bundled(model)
        _print_many(loaded, start, write, texts, seeds, _JsonOutput(out) if as_json else _PlainOutput(out))
        return
    session = loaded.session(text, seed=seed, state=load_state, **settings)
    note_bundled(model)
    if int8 and not session.decodes_int8:
        note("int8 is not used: it needs a CPU, a C compiler and a model that docs/generation.md names")
    try:
        _put(loaded.echo(session, text), out)
        for piece in loaded.stream(session, count, sampling, last=save_state is None, stop=stop):
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


class _PlainOutput:
    """Texts as they are generated, each below a line with its numbers."""

    def __init__(self, out: TextIO) -> None:
        self.out = out

    def write(self, prompt: str, place: tuple[int, int], pieces: Iterator[str]) -> None:
        _put(f"--- prompt {place[0]}, sample {place[1]} ---\n{prompt}", self.out)
        for piece in pieces:
            _put(piece, self.out)
        _put("\n", self.out)


class _JsonOutput(_PlainOutput):
    """One JSON object per text."""

    def write(self, prompt: str, place: tuple[int, int], pieces: Iterator[str]) -> None:
        found = {"prompt": prompt, "sample": place[1], "text": "".join(pieces)}
        _put(json.dumps(found, ensure_ascii=False) + "\n", self.out)


def _print_many(
    model: "TextModel",
    start: "Callable[[bytes], Session]",
    write: "Callable[[Session], Iterator[str]]",
    prompts: Sequence[bytes],
    seeds: Sequence[int | None],
    output: _PlainOutput,
) -> None:
    """Every prompt is read once, and each of its continuations starts from a copy of that session."""
    for k, prompt in enumerate(prompts, start=1):
        session = start(prompt)
        shown = model.echo(session, prompt)
        for n, seed in enumerate(seeds, start=1):
            output.write(shown, (k, n), write(session if len(seeds) == 1 else session.fork(seed)))


def _put(text: str, out: TextIO) -> None:
    out.write(text)
    out.flush()


def _check_not_a_prompt(model: Path) -> None:
    """Explain how to pass a prompt to a user who gave it in place of MODEL."""
    if not os.path.lexists(model):  # unlike Path.exists, this accepts names that are too long
        raise ConfigError(f"there is no model folder {str(model)[:60]!r}; if that is the prompt, put -p before it")
    if model.is_file():
        raise ConfigError(f"{model} is a file, not a model folder; if it is the prompt, use --prompt-file {model}")


def _prompt(source: str, prompt: str | None, prompt_file: Path | None, prompts: Path | None) -> bytes:
    """The prompt from -p, --prompt-file or standard input; only one of these and --prompts may be given."""
    named = {"-p": prompt, "--prompt-file": prompt_file, "--prompts": prompts, "-": source}
    given = [name for name, value in named.items() if value]
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
