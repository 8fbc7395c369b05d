"""The `longspan` command. An error is one sentence on standard error and exit code 2."""

import os
import re
import select
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Annotated, Any, TextIO

import typer
import typer.core

from longspan import __version__
from longspan.cli import (
    bench,
    compare,
    config,
    convert,
    data,
    demo,
    docs,
    evaluate,
    export,
    figures,
    generate,
    init,
    lm_eval,
    recipes,
    recl,
    report,
    scaling,
    score,
    serve,
    tokenizer,
    train,
    transfer,
    write,
)
from longspan.errors import LongspanError, UnknownNameError
from longspan.terminal import guarded_streams, is_silent, visible
from longspan.threads import has_abandoned_threads, prepare_threads


class GroupedCommands(typer.core.TyperGroup):
    """Lists commands in groups. typer does this only with rich, whose boxes need wide terminals."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            if command is not None and not command.hidden:
                group = getattr(command, "rich_help_panel", None)
                groups.setdefault(group if isinstance(group, str) else "Commands", []).append(
                    (name, command.get_short_help_str(limit=formatter.width))
                )
        for group, rows in groups.items():
            with formatter.section(group):
                formatter.write_dl(rows)


app = typer.Typer(
    name="longspan",
    help="Train, evaluate and use language models with memory beyond their window.",
    no_args_is_help=True,
    cls=GroupedCommands,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _version(requested: bool) -> bool:
    if requested:
        print(f"longspan {__version__}")
        raise typer.Exit
    return requested


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


GROUPS: dict[str, dict[str, Callable[..., None]]] = {
    "Use a model": {
        "generate": generate.generate,
        "write": write.write,
        "eval": evaluate.evaluate,
        "score": score.score,
        "serve": serve.serve,
        "info": init.info,
    },
    "Train": {
        "train": train.train,
        "compare": compare.compare,
        "recipes": recipes.recipes,
        "config": config.config,
        "families": init.families,
        "init": init.init,
    },
    "Measure": {
        "recl": recl.recl,
        "figures": figures.figures,
        "report": report.report,
        "scaling": scaling.scaling,
    },
    "Learn": {"demo": demo.demo, "docs": docs.docs},
    "Tasks": {
        "finetune": transfer.finetune,
        "predict": transfer.predict,
        "embed": transfer.embed,
        "evaluate-tasks": transfer.evaluate_tasks,
        "lm-eval": lm_eval.lm_eval,
    },
    "Convert": {"export": export.export, "import": convert.import_model},
}
for group, verbs in GROUPS.items():
    for name, verb in verbs.items():
        app.command(name, rich_help_panel=group)(verb)
app.add_typer(data.app, name="data", rich_help_panel="Train")
app.add_typer(tokenizer.app, name="tokenizer", rich_help_panel="Train")
app.add_typer(bench.app, name="bench", rich_help_panel="Measure")


def run(args: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code: 0, 2 for an error of the user, 130 after an interrupt."""
    _open_streams()
    with guarded_streams():
        return _run(list(sys.argv[1:] if args is None else args))


def _run(args: list[str]) -> int:
    try:
        with _plain_warnings():
            code = _invoke(args)
        sys.stdout.flush()
        return code
    except LongspanError as error:
        return _print_error(str(error)) if _reports(error) else 2
    except KeyboardInterrupt:
        exec("")  # `python -m` ignores the exit code if the last `exec` was interrupted; imports make dataclasses so
        return _print_error("interrupted", 130)
    except BrokenPipeError:
        # A pipe was closed by its reader. If it reads our output (`| head`), that is not an error, and Python must not
        # report one at exit either.
        closed = [stream for stream in (sys.stdout, sys.stderr) if _is_closed_pipe(stream)]
        if not closed:
            raise
        for stream in closed:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return 0
    except OSError as error:
        return _print_error(f"{error.filename or 'standard output'}: {error.strerror or error}")


def _invoke(args: list[str]) -> int:
    """Run the command without the error handling of typer, which uses other exit codes and several lines."""
    command = typer.main.get_command(app)
    try:
        with command.make_context("longspan", args or ["--help"]) as context:
            command.invoke(context)
        return 0
    except typer.Exit as exit:
        return exit.exit_code
    except typer.Abort:
        raise KeyboardInterrupt from None
    except Exception as error:
        # typer bundles click or uses the installed one, so a usage error is recognised by its method, not its class.
        if not hasattr(error, "format_message"):
            raise
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error.format_message())
            return 0
        return _print_error(_usage(error, args))


def _usage(error: Any, args: Sequence[str]) -> str:
    """The message of a usage error, with the option's value or the names of the commands, which click leaves out."""
    message = error.format_message()
    if unknown := re.match(r"No such command '(.*?)'", message, re.DOTALL):
        return str(UnknownNameError("command", unknown[1], error.ctx.command.list_commands(error.ctx)))
    for name in getattr(getattr(error, "param", None), "opts", ()):
        for place, arg in enumerate(args):
            if arg.startswith(f"{name}="):
                return f"{arg}: {error.message}"
            if arg == name and place + 1 < len(args):
                return f"{name} {args[place + 1]}: {error.message}"
    return message


def _reports(error: LongspanError) -> bool:
    """Whether this process prints an error. Of several processes, one does."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return True
    from longspan.training.processes import reports_error

    return reports_error(error)


def _is_closed_pipe(stream: TextIO) -> bool:
    """Whether a stream is a pipe without a reader."""
    with suppress(OSError):  # a stream without a file
        poll = select.poll()
        poll.register(stream.fileno(), 0)
        return any(event & select.POLLERR for _, event in poll.poll(0))
    return False


def _open_streams() -> None:
    """Replace closed streams by the null device, and characters that a terminal cannot encode by question marks."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, PTH123 (open until exit)
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """Print our own warnings as one line, without the source location, and each sentence once."""
    with warnings.catch_warnings():
        default = warnings.showwarning
        printed: set[str] = set()

        def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            if category.__module__.startswith("longspan."):
                if str(message) not in printed and not is_silent():
                    _print_error(f"warning: {message}")
                printed.add(str(message))
            else:
                default(message, category, *where, **more)

        warnings.showwarning = show
        yield


def _print_error(message: str, code: int = 2) -> int:
    line = " ".join(message.splitlines())  # a file name may contain a newline
    # Escaped here too: rich replaces standard error while it draws a progress bar.
    print(f"longspan: {visible(line) if sys.stderr.isatty() else line}", file=sys.stderr)
    return code


def main() -> None:
    if "_LONGSPAN_COMPLETE" in os.environ:  # the shell asks for completions
        typer.main.get_command(app).main(prog_name="longspan")
    prepare_threads()  # before torch is imported
    code = run()
    if has_abandoned_threads():  # they would end the process with an error once they need the interpreter
        sys.stdout.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    main()
