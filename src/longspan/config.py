"""Build frozen dataclasses from TOML and from `--set key=value`.

A config validates itself in `__post_init__`, so every instance is valid. This module handles the input: unknown keys
(with a suggestion), values of the wrong type and overrides from the command line.
"""

import dataclasses
import json
import math
import sys
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, TypeVar

from longspan.errors import ConfigError, UnknownNameError, not_read

C = TypeVar("C")


def build(cls: type[C], values: Mapping[str, Any], where: str = "") -> C:
    """An instance of the dataclass `cls` from plain values. Nested mappings become nested dataclasses."""
    hints = typing.get_type_hints(cls)
    known = {f.name: f for f in dataclasses.fields(cls) if f.init}  # type: ignore[arg-type]
    prefix = f"{where}." if where else ""
    converted = {}
    for name, value in values.items():
        if name not in known:
            raise UnknownNameError("key", f"{prefix}{name}", [f"{prefix}{k}" for k in known])
        converted[name] = convert(hints[name], value, f"{prefix}{name}")
    for name, entry in known.items():
        if name not in converted and entry.default is entry.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{prefix}{name} is missing; set it to a value of type {_type_name(hints[name])}")
    return cls(**converted)


def convert(hint: Any, value: Any, key: str) -> Any:
    """`value` converted to the annotated type, or an error with the expected type and the value."""
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
            raise UnknownNameError(f"option for {key}", value, [str(a) for a in args])
    elif origin is tuple and isinstance(value, Sequence) and not isinstance(value, str):
        if len(args) == 2 and args[1] is Ellipsis:
            return tuple(convert(args[0], item, f"{key}[{i}]") for i, item in enumerate(value))
        if len(args) == len(value):
            return tuple(convert(a, item, f"{key}[{i}]") for i, (a, item) in enumerate(zip(args, value, strict=True)))
    elif dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
        return build(typing.cast(type, hint), value, key)
    elif origin is dict and isinstance(value, Mapping):  # checked by whoever reads it
        return dict(value)
    elif hint is float and _is_number(value, Real):
        if abs(value) <= sys.float_info.max:  # false for infinity, NaN and integers too large for a float
            return float(value)
        raise ConfigError(f"{key}={shown(value)} is not finite; use a number in the range of a float")
    elif hint is int and _is_number(value, Integral):
        return int(value)
    elif hint in (str, bool) and isinstance(value, hint):
        if isinstance(value, str):
            require_unicode(value, key)
        return value
    raise ConfigError(f"{key}={shown(value)} must be {_type_name(hint)}")


def _is_number(value: Any, kind: type) -> bool:
    """Numbers of numpy included, bool excluded."""
    return isinstance(value, kind) and not isinstance(value, bool)


def convert_fields(config: Any) -> None:
    """Convert the fields of a frozen dataclass to their annotated types in place, or raise a ConfigError. For
    `__post_init__` of classes that Python code creates directly."""
    for name, hint in typing.get_type_hints(type(config)).items():
        object.__setattr__(config, name, convert(hint, getattr(config, name), name))


Bound = float | tuple[float, float]
"""The largest magnitude of a number. For a key that accepts [step, value] pairs: of the step and of the value."""


DEFAULT_BOUND = 2**20
"""For keys without their own bound, such as those of families in other packages."""


def require_bounds(config: Any, where: str, largest: Mapping[str, Bound]) -> None:
    """Check every number of a config, and those in its lists, against the bound of its key.

    Larger numbers would fail inside torch, overflow, or use up the memory of the machine. Call this before all other
    checks, so that they compute with numbers of reasonable size.
    """
    for entry in dataclasses.fields(config):
        for number, most in _bounded(getattr(config, entry.name), largest.get(entry.name, DEFAULT_BOUND)):
            if not abs(number) <= most:
                sign = "-" * (number < 0)
                raise ConfigError(
                    f"{where}.{entry.name}={shown(number)} is out of range; the limit is {sign}{shown(most)}"
                )


def _bounded(value: Any, most: Bound) -> Iterator[tuple[float, float]]:
    """The numbers in a value, each with its bound."""
    if isinstance(value, tuple):
        for item in value:
            if isinstance(most, tuple) and isinstance(item, tuple):
                yield from zip(item, most, strict=True)
            else:
                yield from _bounded(item, most)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield value, most[-1] if isinstance(most, tuple) else most


def require_unicode(text: str, key: str) -> None:
    """Reject strings with invalid bytes, which a shell can pass but a TOML or JSON file cannot store."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        readable = text.encode("utf-8", "replace").decode()
        raise ConfigError(f"{key}={shown(readable)} is not UTF-8; use another name") from None


def _type_name(hint: Any) -> str:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return " or ".join(repr(a) for a in args)
    if origin is tuple:
        return f"a list of {_type_name(args[0])}"
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type_name(a) for a in args if a is not type(None))
    names = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}
    return names.get(hint, "a table")


def plain(config: Any) -> dict[str, Any]:
    """A config as plain values for TOML and JSON, without keys that are None."""
    values: dict[str, Any] = {}
    for entry in dataclasses.fields(config):
        value = getattr(config, entry.name)
        if value is not None:
            values[entry.name] = plain(value) if dataclasses.is_dataclass(value) else _lists(value)
    return values


def _lists(value: Any) -> Any:
    """A value with lists in place of tuples, as a file would give it back."""
    if isinstance(value, Mapping):
        return {key: _lists(each) for key, each in value.items()}
    return [_lists(each) for each in value] if isinstance(value, list | tuple) else value


def finite(value: Any) -> Any:
    """A value for JSON, which has no infinity and no NaN: they become None, also inside lists and mappings."""
    if isinstance(value, Mapping):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def keys(cls: type, where: str = "") -> dict[str, Any]:
    """Every key of a config with its default (`...` if it is required). Nested keys are dotted."""
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
    """`["model.layers=6", ...]` as a nested dict. A value is parsed as TOML, or else is a string."""
    tree: dict[str, Any] = {}
    for pair in pairs:
        key, sign, text = pair.partition("=")
        key = key.strip()
        if not sign or not key or not all(part for part in key.split(".")):
            raise ConfigError(f"--set {pair!r} is not key=value; write for example --set model.layers=6")
        *path, last = key.split(".")
        node = tree
        for part in path:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                raise ConfigError(
                    f"--set {pair!r} uses {part!r} as a table, but another --set gives it a plain value; remove one of "
                    "them"
                )
        node[last] = _parse_value(text.strip())
    return tree


def _parse_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):  # not TOML, a number with too many digits, or too deeply nested
        return text


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` updated with the values of `over`, recursively."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = merge(below, value) if isinstance(value, Mapping) and isinstance(below, Mapping) else value
    return merged


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))  # some editors write a byte order mark
    except FileNotFoundError:
        raise ConfigError(f"there is no file {path}; check the name") from None
    except OSError as error:
        raise not_read(path, error, ConfigError) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 at byte {error.start}; save it as UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}; write key = value, with texts in quotes") from None
    except (ValueError, RecursionError):
        raise ConfigError(
            f"{path} is nested too deeply, or has a number of more than 4,300 digits; shorten it"
        ) from None


def to_toml(values: Mapping[str, Any]) -> str:
    """Plain values as TOML: first the keys of a table, then its subtables."""
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
    """A plain value in TOML syntax. Strings are written as JSON, which is valid TOML except for DEL."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return f"[{', '.join(show(item) for item in value)}]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)


def shown(value: Any) -> str:
    """A value of any type and size, shortened for an error message."""
    try:
        text = show(value)
    except (ValueError, RecursionError):  # an integer with too many digits for str(), or a deeply nested list
        text = f"a {type(value).__name__} too large to show"
    return text if len(text) <= 80 else f"{text[:77]}..."
