"""The `longspan` command and how its errors reach a person: one sentence on standard error, exit code 2."""

import os
import select
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Annotated, Any, TextIO

import typer

from longspan import __version__
from longspan.cli import (
    bench,
    compare,
    convert,
    data,
    demo,
    evaluate,
    export,
    generate,
    init,
    pictures,
    recipes,
    recl,
    report,
    train,
)
from longspan.errors import LongspanError
from longspan.terminal import guarded_streams, visible

app = typer.Typer(
    name="longspan",
    help="Language models that remember beyond their window.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _version(asked: bool) -> bool:
    if asked:
        print(f"longspan {__version__}")
        raise typer.Exit
    return asked


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


app.command("init")(init.init)
app.command("info")(init.info)
app.command("families")(init.families)
app.command("import")(convert.import_model)
app.command("export")(export.export)
app.command("train")(train.train)
app.command("eval")(evaluate.evaluate)
app.command("generate")(generate.generate)
app.command("demo")(demo.demo)
app.command("recl")(recl.recl)
app.command("pictures")(pictures.pictures)
app.command("report")(report.report)
app.command("recipes")(recipes.recipes)
app.command("compare")(compare.compare)
app.add_typer(data.app, name="data")
app.add_typer(bench.app, name="bench")


def run(args: Sequence[str] | None = None) -> int:
    """The exit code of one command line: 0, 2 for what the caller can mend, 130 where it was interrupted."""
    _open_streams()
    with guarded_streams():
        return _run(list(sys.argv[1:] if args is None else args))


def _run(args: list[str]) -> int:
    try:
        with _warnings_in_a_line():
            code = _invoke(args)
        sys.stdout.flush()
        return code
    except LongspanError as error:
        return _tell(str(error))
    except KeyboardInterrupt:
        return _tell("interrupted", 130)
    except BrokenPipeError:
        # Some process that was written to is gone. Where it read what we print (`| head`) nothing is wrong, and Python
        # must not complain at exit either.
        left = [stream for stream in (sys.stdout, sys.stderr) if _reader_left(stream)]
        if not left:
            raise
        for stream in left:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return 0
    except OSError as error:
        return _tell(f"{error.filename or 'standard output'}: {error.strerror or error}")


def _invoke(args: list[str]) -> int:
    """The verb, without the error handling of typer, which ends in other codes and more than a sentence."""
    command = typer.main.get_command(app)
    try:
        with command.make_context("longspan", args or ["--help"]) as context:
            command.invoke(context)
        return 0
    except typer.Exit as end:
        return end.exit_code
    except typer.Abort:
        raise KeyboardInterrupt from None
    except Exception as error:
        # typer carries its own copy of click or uses the installed one: a usage error is known by what it can do.
        if not hasattr(error, "format_message"):
            raise
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error.format_message())
            return 0
        return _tell(error.format_message())


def _reader_left(stream: TextIO) -> bool:
    """Whether a stream is a pipe that nobody reads."""
    with suppress(OSError):  # a stream without a file is none
        watch = select.poll()
        watch.register(stream.fileno(), 0)
        return any(event & select.POLLERR for _, event in watch.poll(0))
    return False


def _open_streams() -> None:
    """Streams that were closed lead nowhere; a terminal that cannot show a character shows a question mark."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, PTH123 (open to the end)
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


@contextmanager
def _warnings_in_a_line() -> Iterator[None]:
    """What we warn of is for the person at the terminal: without the place in our source."""
    with warnings.catch_warnings():
        others = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            if category.__module__.startswith("longspan."):
                _tell(f"warning: {message}")
            else:
                others(message, category, *where, **more)

        warnings.showwarning = show
        yield


def _tell(sentence: str, code: int = 2) -> int:
    line = " ".join(sentence.splitlines())  # a name may hold a line break
    # Escaped here too: while rich draws a bar it takes over standard error.
    print(f"longspan: {visible(line) if sys.stderr.isatty() else line}", file=sys.stderr)
    return code


def main() -> None:
    sys.exit(run())


if __name__ == "__main__":
    main()
