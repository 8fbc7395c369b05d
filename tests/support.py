"""What many tests share."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from longspan.contract import LanguageModel
from longspan.models import families
from longspan.reading import Reading

READING = {field.name for field in fields(Reading)}


def build(family: str, values: Mapping[str, Any]) -> LanguageModel:
    """A model from keys of its config and of its reading together."""
    reading = {key: value for key, value in values.items() if key in READING}
    rest = {key: value for key, value in values.items() if key not in READING}
    return families.build(family, rest, replace(families.family(family).reading, **reading))
