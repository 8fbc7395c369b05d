"""Frozen dataclasses, TOML and `--set key=value`, one way between them.

A config checks itself when it is made (`__post_init__`), so a config that exists is one that can be built. What this
module adds is the way in: unknown keys with the nearest known one, values of the wrong type, overrides from a shell.
"""

import dataclasses
import json
import sys
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from longspan.errors import ConfigError, UnknownNameError

C = TypeVar("C")


def build(cls: type[C], values: Mapping[str, Any], where: str = "") -> C:
    """An instance of the dataclass `cls` from plain values; nested dataclasses from nested mappings."""
    hints = typing.get_type_hints(cls)
    known = {f.name: f for f in dataclasses.fields(cls) if f.init}  # type: ignore[arg-type]
    prefix = f"{where}." if where else ""
    made = {}
    for name, value in values.items():
        if name not in known:
            raise UnknownNameError("key", f"{prefix}{name}", [f"{prefix}{k}" for k in known])
        made[name] = convert(hints[name], value, f"{prefix}{name}")
    for name, entry in known.items():
        if name not in made and entry.default is entry.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{prefix}{name} is missing; give it a value of type {_type_name(hints[name])}")
    return cls(**made)


def convert(hint: Any, value: Any, key: str) -> Any:
    """`value` as the annotated type, or an error that says what was expected and what was received."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        inner = [a for a in args if a is not type(None)]
        if len(inner) == 1:
            return convert(inner[0], value, key)
        for candidate in inner:
            try:
                return convert(candidate, value, key)
            except ConfigError:
                continue
    elif origin is Literal:
        if isinstance(value, str) and value in args:
            return value
        if isinstance(value, str):
            raise UnknownNameError(f"value for {key}", value, [str(a) for a in args])
    elif origin is tuple and isinstance(value, Sequence) and not isinstance(value, str):
        if len(args) == 2 and args[1] is Ellipsis:
            return tuple(convert(args[0], item, f"{key}[{i}]") for i, item in enumerate(value))
        if len(args) == len(value):
            return tuple(convert(a, item, f"{key}[{i}]") for i, (a, item) in enumerate(zip(args, value, strict=True)))
    elif dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
        return build(typing.cast(type, hint), value, key)
    elif hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        if abs(value) <= sys.float_info.max:  # neither infinite nor NaN, nor a whole number that no float can hold
            return float(value)
        raise ConfigError(f"{key}={shown(value)} is no finite number; give one that a float can hold")
    elif (hint is int and isinstance(value, int) and not isinstance(value, bool)) or (
        hint in (str, bool) and isinstance(value, hint)
    ):
        if isinstance(value, str):
            require_unicode(value, key)
        return value
    raise ConfigError(f"{key}={shown(value)} is of the wrong type; it takes {_type_name(hint)}")


Bound = float | tuple[float, float]
"""The largest magnitude of a number; for a key that may list [step, value] pairs, that of a step and of a value."""


def require_bounds(config: Any, where: str, largest: Mapping[str, Bound]) -> None:
    """Every number of a config, also in its lists, is within the bound of its key; every key of numbers has one.

    What lies further would fail deep inside torch, overflow, or fill the machine before it does. Checked first, so that
    later checks compute with numbers of a sane size."""
    for entry in dataclasses.fields(config):
        for number, most in _bounded(getattr(config, entry.name), largest.get(entry.name, 0)):
            if not abs(number) <= most:
                sign = "-" * (number < 0)
                raise ConfigError(f"{where}.{entry.name}={shown(number)} is beyond the largest, {sign}{shown(most)}")


def _bounded(value: Any, most: Bound) -> Iterator[tuple[float, float]]:
    """The numbers of a value, each with its bound."""
    if isinstance(value, tuple):
        for item in value:
            if isinstance(most, tuple) and isinstance(item, tuple):
                yield from zip(item, most, strict=True)
            else:
                yield from _bounded(item, most)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield value, most[-1] if isinstance(most, tuple) else most


def require_unicode(text: str, key: str) -> None:
    """A shell can hand over bytes that are no text; no file of ours could hold them."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        readable = text.encode("utf-8", "replace").decode()
        raise ConfigError(f"{key}={shown(readable)} is not UTF-8; give it another name") from None


def _type_name(hint: Any) -> str:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return " or ".join(repr(a) for a in args)
    if origin is tuple:
        return f"a list of {_type_name(args[0])}"
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type_name(a) for a in args if a is not type(None))
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a word"}
    return names.get(hint, "a table")


def plain(config: Any) -> dict[str, Any]:
    """A config as plain values that TOML and JSON can hold; None is left out."""
    values: dict[str, Any] = {}
    for entry in dataclasses.fields(config):
        value = getattr(config, entry.name)
        if dataclasses.is_dataclass(value):
            values[entry.name] = plain(value)
        elif value is not None:
            values[entry.name] = list(value) if isinstance(value, tuple) else value
    return values


def keys(cls: type, where: str = "") -> dict[str, Any]:
    """Every key of a config with its default (`...` where it must be given), nested ones dotted."""
    prefix = f"{where}." if where else ""
    hints = typing.get_type_hints(cls)
    listed: dict[str, Any] = {}
    for entry in dataclasses.fields(cls):
        if dataclasses.is_dataclass(hints[entry.name]):
            listed |= keys(typing.cast(type, hints[entry.name]), f"{prefix}{entry.name}")
        elif entry.default is not dataclasses.MISSING:
            listed[f"{prefix}{entry.name}"] = entry.default
        else:
            listed[f"{prefix}{entry.name}"] = ...
    return listed


def parse_overrides(pairs: Sequence[str]) -> dict[str, Any]:
    """`["model.memory=640", ...]` as a nested dict; a value is read as TOML, and as a word where it is none."""
    tree: dict[str, Any] = {}
    for pair in pairs:
        key, sign, text = pair.partition("=")
        key = key.strip()
        if not sign or not key or not all(part for part in key.split(".")):
            raise ConfigError(f"--set {pair!r} is not key=value; write for example --set model.memory=640")
        *path, last = key.split(".")
        node = tree
        for part in path:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                raise ConfigError(f"--set {pair!r} goes below {part!r}, which another --set gave a plain value")
        node[last] = _read_value(text.strip())
    return tree


def _read_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):  # no TOML, a number of too many digits, or nested too deep
        return text


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the values of `over` laid on top, table by table."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = merge(below, value) if isinstance(value, Mapping) and isinstance(below, Mapping) else value
    return merged


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))  # some editors begin a file with a mark
    except FileNotFoundError:
        raise ConfigError(f"there is no file {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
    except (ValueError, RecursionError):
        raise ConfigError(f"{path} nests too deep, or has a number of more than 4,300 digits; shorten it") from None


def to_toml(values: Mapping[str, Any]) -> str:
    """Plain values as TOML: the keys of a table first, then the tables in it."""
    lines: list[str] = []

    def write(table: Mapping[str, Any], path: str) -> None:
        lines.extend(f"{k} = {show(v)}" for k, v in table.items() if not isinstance(v, Mapping))
        for key, value in table.items():
            if isinstance(value, Mapping):
                name = f"{path}.{key}" if path else key
                lines.extend(["", f"[{name}]"])
                write(value, name)

    write(values, "")
    return "\n".join(lines).strip() + "\n"


def show(value: Any) -> str:
    """A plain value as TOML writes it (JSON's strings, DEL aside, numbers and lists are TOML's too)."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return f"[{', '.join(show(item) for item in value)}]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)


def shown(value: Any) -> str:
    """A value of any kind and size for the sentence of an error."""
    try:
        text = show(value)
    except (ValueError, RecursionError):  # a number of more digits than Python writes, or a list nested too deep
        text = f"a {type(value).__name__} too large to show"
    return text if len(text) <= 80 else f"{text[:77]}..."
