"""A text written together with a model: continue, undo, fork, save and load. What `longspan write` uses."""

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from longspan.checkpoints.store import write_file
from longspan.config import convert
from longspan.decoding.sampling import Sampling
from longspan.decoding.session import Session
from longspan.errors import ConfigError, DataError, UnknownNameError, not_read
from longspan.text_model import TextModel

FORMAT = 1
MAIN = "main"
LONGEST = 1 << 16
UNDO_STEPS = 50
"""Steps that can be undone. Each one keeps a state, a few megabytes for the bundled model."""
_SAMPLING = {one.name: one.type for one in dataclasses.fields(Sampling)}
_OWN: dict[str, Any] = {"length": int, "memory": int | None, "seed": int}


@dataclass(frozen=True)
class DraftSettings:
    """How a draft is continued."""

    length: int = 120
    """Tokens per continuation."""
    memory: int | None = None
    """Memory length. Default: the model's."""
    seed: int = 0
    sampling: Sampling = field(default_factory=lambda: Sampling(temperature=0.8, top_p=0.95))

    def __post_init__(self) -> None:
        if not 1 <= self.length <= LONGEST:
            raise ConfigError(f"length={self.length} must be between 1 and {LONGEST:,}")

    def changed(self, key: str, value: Any) -> "DraftSettings":
        """The settings with one key changed: length, memory, seed, or one of `Sampling`."""
        if key in _OWN:
            return dataclasses.replace(self, **{key: convert(_OWN[key], value, key)})
        if key not in _SAMPLING:
            raise UnknownNameError("setting", key, [*_OWN, *_SAMPLING])
        return dataclasses.replace(self, sampling=dataclasses.replace(self.sampling, **{key: value}))

    def values(self) -> dict[str, Any]:
        """Every key with its value."""
        return {key: getattr(self, key) for key in _OWN} | dataclasses.asdict(self.sampling)


@dataclass(frozen=True)
class Step:
    """The text up to a point and the session that has read it, which is never advanced: later steps copy it."""

    text: str
    session: Session


class Draft:
    """A text in named branches. Every addition and continuation is a step that can be undone."""

    def __init__(self, model: TextModel, settings: DraftSettings | None = None) -> None:
        self.model, self.settings = model, settings or DraftSettings()
        self.branches = {MAIN: [self._read("")]}
        self.branch = MAIN

    @property
    def text(self) -> str:
        """The text of the current branch."""
        return self._last.text

    @property
    def _last(self) -> Step:
        return self.branches[self.branch][-1]

    def add(self, text: str) -> None:
        """Add text of the user."""
        if not text:
            return
        before = self._last
        if not before.text:  # replaces the first token of an empty session
            self._append(dataclasses.replace(self._read(text), text=text))
            return
        session = before.session.fork()
        session.read(self.model.tokenizer.encode_prompt(text).tolist())
        session.held = b""
        self._append(Step(before.text + text, session))

    def write(self) -> Iterator[str]:
        """Continue the text with `settings.length` tokens, piece by piece. What was generated is kept if the caller
        stops early, or after Ctrl-C."""
        before, pieces = self._last, []
        session = before.session.fork()
        try:
            for piece in self.model.stream(session, self.settings.length, self.settings.sampling, last=False):
                pieces.append(piece)
                yield piece
        finally:
            if pieces:
                self._append(Step(before.text + "".join(pieces), session))

    def undo(self) -> bool:
        """Remove the last addition or continuation of the branch. False if there is none."""
        steps = self.branches[self.branch]
        if len(steps) > 1:
            steps.pop()
            return True
        return False

    def fork(self, name: str | None = None) -> str:
        """A new branch with the same text and other random numbers, which becomes the current one. Returns its name."""
        name = name or next(f"{self.branch}-{k}" for k in range(2, 1000) if f"{self.branch}-{k}" not in self.branches)
        if name in self.branches:
            raise ConfigError(f"a branch called {name!r} already exists; choose another name")
        last = self._last
        # Branches differ in their random numbers: with the same ones, both would continue in the same way.
        other = last.session.fork(self.settings.seed + len(self.branches))
        self.branches[name] = [*self.branches[self.branch][:-1], Step(last.text, other)]
        self.branch = name
        return name

    def switch(self, name: str) -> None:
        if name not in self.branches:
            raise UnknownNameError("branch", name, self.branches)
        self.branch = name

    def change(self, key: str, value: Any) -> None:
        """Change a setting. With another memory the text is read again."""
        settings = self.settings.changed(key, value)
        if settings.memory != self.settings.memory:
            self.model.reading_with(**_reading(settings))  # an invalid memory changes nothing
        before, self.settings = self.settings, settings
        if settings.memory != before.memory:
            self.branches = {name: [self._read(steps[-1].text)] for name, steps in self.branches.items()}
        elif settings.seed != before.seed:
            last = self._last
            self.branches[self.branch][-1] = Step(last.text, last.session.fork(settings.seed))

    def save(self, path: Path) -> None:
        """Write the current branch as plain text, or all branches and settings if the name ends in .json."""
        if path.suffix.lower() != ".json":
            write_file(path, self.text.encode())
            return
        texts = {name: steps[-1].text for name, steps in self.branches.items()}
        values = {"format": FORMAT, "branch": self.branch, "branches": texts, "settings": self.settings.values()}
        write_file(path, (json.dumps(values, ensure_ascii=False, indent=1) + "\n").encode())

    def load(self, path: Path) -> None:
        """Replace everything by a saved draft, or the current branch by a text. The model reads it again."""
        try:
            data = path.read_bytes().decode()
        except OSError as error:
            raise not_read(path, error) from None
        except UnicodeDecodeError:
            raise DataError(f"{path} is not UTF-8; load a text, or a .json draft saved by longspan") from None
        if path.suffix.lower() != ".json":
            self.branches[self.branch] = [self._read(data)]
            return
        branch, texts, settings = _parse(data, path)
        before, self.settings = self.settings, settings
        try:
            self.branches = {name: [self._read(text)] for name, text in texts.items()}
        except Exception:
            self.settings = before
            raise
        self.branch = branch

    def _read(self, text: str) -> Step:
        """A text, read from its beginning."""
        session = self.model.session(text, seed=self.settings.seed, **_reading(self.settings))
        return Step(text, session)

    def _append(self, step: Step) -> None:
        steps = self.branches[self.branch]
        steps.append(step)
        if len(steps) > UNDO_STEPS + 1:
            del steps[0]


def _reading(settings: DraftSettings) -> Any:
    return {} if settings.memory is None else {"memory": settings.memory}


def _parse(data: str, path: Path) -> tuple[str, dict[str, str], DraftSettings]:
    """Branch, texts and settings of a saved draft."""
    try:
        values = json.loads(data)
        if values["format"] != FORMAT:
            raise DataError(
                f"{path} has format {values['format']!r:.40}; this version of longspan reads format {FORMAT}"
            )
        texts, branch = values["branches"], values["branch"]
        if branch not in texts or not all(isinstance(text, str) for text in texts.values()):
            raise ValueError
        settings = DraftSettings()
        for key, value in values["settings"].items():
            settings = settings.changed(key, value)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise DataError(f"{path} is not a draft; load a text, or a .json draft saved by longspan") from None
    return branch, texts, settings
