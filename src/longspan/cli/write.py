"""`longspan write`: an interactive session in the terminal. docs/generation.md"""

import inspect
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from longspan.cli.options import DeviceName, DtypeName, ModelOrBundled, Threads, machine, note_bundled
from longspan.errors import ConfigError, LongspanError, UnknownNameError

if TYPE_CHECKING:
    from longspan.draft import Draft

HELP = """\
text            add this text and let the model continue
(empty line)    let the model continue
/add TEXT       add this text without continuing
/undo           remove the last addition or continuation
/fork [NAME]    create a branch with the same text and switch to it
/branches       list the branches
/switch NAME    switch to another branch
/set KEY VALUE  change a setting, for example /set memory 256 or /set temperature 0.7
/settings       show the settings
/show           show the complete text
/save FILE      save this branch as text, or all branches and settings if FILE ends in .json
/load FILE      load a text, or a .json file that /save wrote
/quit           quit; so does Ctrl-D. Ctrl-C stops a continuation, Alt-Enter inserts a line break."""


def write(
    model: ModelOrBundled = None,
    load: Annotated[
        Path | None, typer.Option("--load", metavar="FILE", help="Start with a saved draft or a text file.")
    ] = None,
    length: Annotated[int, typer.Option("-n", "--tokens", help="Tokens per continuation.")] = 120,
    memory: Annotated[int | None, typer.Option("--memory", help="Memory length. Default: the model's.")] = None,
    temp: Annotated[float, typer.Option("--temp", help="Temperature; 0 is greedy.")] = 0.8,
    top_p: Annotated[
        float, typer.Option("--top-p", help="Sample from the most likely tokens whose probabilities sum to p.")
    ] = 0.95,
    seed: Annotated[int, typer.Option("--seed", help="Random seed.")] = 0,
    device: DeviceName = "auto",
    dtype: DtypeName = "auto",
    threads: Threads = 0,
) -> None:
    """Write a text together with a model in the terminal.

    The model continues what you write; you can undo, fork, save and load.
    """
    read_line = _line_reader()
    from longspan.decoding.sampling import Sampling
    from longspan.draft import Draft, DraftSettings
    from longspan.text_model import load as load_model

    settings = DraftSettings(length, memory, seed, Sampling(temperature=temp, top_p=top_p))
    where = machine(device, dtype, threads)
    draft = Draft(load_model(model, device=where.device, dtype=where.dtype), settings)
    note_bundled(model)
    if load is not None:
        draft.load(load)
    if _on_terminal():
        print("Write something and press Enter; /help lists the commands.")
    Dialogue(draft).run(read_line)


def _line_reader() -> Callable[[str], str]:
    """Asks for a line, with history and completion of commands. Lines of a pipe or a file are read as they are."""
    if not _on_terminal():
        return _piped_line
    try:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import WordCompleter
        from prompt_toolkit.key_binding import KeyBindings
    except ImportError:
        raise ConfigError("write needs prompt_toolkit; install it with: pip install 'longspan[write]'") from None
    commands = [line.split()[0] for line in HELP.splitlines() if line.startswith("/")]
    keys = KeyBindings()
    keys.add("escape", "enter")(lambda event: event.current_buffer.insert_text("\n"))
    session: Any = PromptSession(
        completer=WordCompleter(commands, sentence=True), complete_while_typing=False, key_bindings=keys
    )
    return session.prompt  # type: ignore[no-any-return]


def _on_terminal() -> bool:
    return sys.stdin.isatty()


def _piped_line(prompt: str) -> str:  # noqa: ARG001 (nobody sees a prompt)
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.removesuffix("\n")


def _end(text: str, length: int = 60) -> str:
    """The end of a text, with dots if there is more before it."""
    return f"...{text[-length:]}" if len(text) > length else text


class Dialogue:
    """Lines of the user in, text and answers out. An error is one line and changes nothing."""

    def __init__(self, draft: "Draft") -> None:
        self.draft = draft
        self.commands: dict[str, Callable[..., None]] = {
            "/add": self.add,
            "/undo": self.undo,
            "/fork": self.fork,
            "/branches": self.branches,
            "/switch": self.switch,
            "/set": self.set,
            "/settings": self.settings,
            "/show": self.show,
            "/save": self.save,
            "/load": self.load,
            "/help": lambda: print(HELP),
        }

    def run(self, read_line: Callable[[str], str]) -> None:
        while True:
            try:
                line = read_line(f"{self.draft.branch}> ")
            except KeyboardInterrupt:
                continue
            except EOFError:
                return
            if line.strip() == "/quit":
                return
            try:
                self.answer(line)
            except KeyboardInterrupt:
                print()
            except LongspanError as error:
                print(f"longspan: {error}")
            except OSError as error:
                print(f"longspan: {error.filename}: {error.strerror}")

    def answer(self, line: str) -> None:
        """Do what one line says."""
        if not line.startswith("/"):
            self.draft.add(line)
            self.continue_text()
            return
        name, _, rest = line.partition(" ")
        if name not in self.commands:
            raise UnknownNameError(
                "command", name, [*self.commands, "/quit"], otherwise="use /add to add a text that starts with /"
            )
        command = self.commands[name]
        try:
            words = [rest] if name == "/add" else shlex.split(rest)
            inspect.signature(command).bind(*words)
        except (TypeError, ValueError):  # another number of words, or a quotation mark that is not closed
            usage = next((text for text in HELP.splitlines() if text.startswith(f"{name} ")), name)
            raise ConfigError(f"{line.strip()!r} has missing or extra words; write: {usage}") from None
        command(*words)

    def continue_text(self) -> None:
        for piece in self.draft.write():
            sys.stdout.write(piece)
            sys.stdout.flush()
        print()

    def add(self, text: str) -> None:
        self.draft.add(text)

    def undo(self) -> None:
        done = self.draft.undo()
        print(_end(self.draft.text) if done else "there is nothing to undo")

    def fork(self, name: str = "") -> None:
        print(f"now on branch {self.draft.fork(name or None)}")

    def branches(self) -> None:
        for name, steps in self.draft.branches.items():
            mark = "*" if name == self.draft.branch else " "
            print(f"{mark} {name}: {len(steps[-1].text):,} characters, {_end(steps[-1].text, 40)!r}")

    def switch(self, name: str) -> None:
        self.draft.switch(name)
        print(_end(self.draft.text))

    def set(self, key: str, value: str) -> None:
        from longspan.config import parse_overrides

        self.draft.change(key, parse_overrides([f"value={value}"])["value"])
        print(f"{key} = {self.draft.settings.values()[key]}")

    def settings(self) -> None:
        for key, value in self.draft.settings.values().items():
            print(f"{key} = {value}")

    def show(self) -> None:
        print(self.draft.text)

    def save(self, path: str) -> None:
        self.draft.save(Path(path))
        print(f"saved to {path}")

    def load(self, path: str) -> None:
        self.draft.load(Path(path))
        print(_end(self.draft.text))
