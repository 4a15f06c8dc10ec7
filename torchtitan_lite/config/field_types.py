"""Check the types of a section's fields, for sections that are made in Python.

The command line and TOML files are checked earlier, as text. In a training loop of your own, a number in quotes would
only fail at its first comparison, and a string in place of a list of names would be taken letter by letter. Two values
are converted, because only one meaning is possible: a path becomes its text, a list becomes a tuple.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from typing import Any, get_type_hints

from torchtitan_lite.config.value_kinds import ValueKind, value_text
from torchtitan_lite.errors import ConfigError


def check_types(section: object, name: str) -> None:
    """Convert paths and lists in `section`, called `name`, then raise ConfigError if a field is not of its kind."""
    for key, kind in _kinds(type(section)).items():  # type: ignore[arg-type]  # mypy: a class is hashable
        value = getattr(section, key)
        converted = _converted(value, kind)
        if converted is None and not (value is None and kind.optional):
            raise ConfigError(f"{name}.{key}: expected {kind.describe()}, found {_found_text(value, kind)}.")
        if converted is not value:
            object.__setattr__(section, key, converted)


def check_sections(config: object) -> None:
    """Raise ConfigError unless every field of `config` is an instance of its section's class."""
    for name, expected in _hints(type(config)).items():  # type: ignore[arg-type]  # the same
        value = getattr(config, name)
        if not isinstance(value, expected):
            found = "a dict" if isinstance(value, Mapping) else f"{type(value).__name__}"
            raise ConfigError(
                f"{name}: expected {expected.__name__}(...), found {found}. Import {expected.__name__} from "
                f"{expected.__module__}."
            )


@cache
def _kinds(section: type) -> dict[str, ValueKind]:
    hints = _hints(section)
    return {field.name: ValueKind.of(hints[field.name]) for field in fields(section)}


@cache
def _hints(section: type) -> dict[str, Any]:
    return get_type_hints(section)


def _converted(value: Any, kind: ValueKind) -> Any:
    """Return `value` as the field holds it, or None if it is not of the kind."""
    if kind.base is str and isinstance(value, os.PathLike):
        value = os.fspath(value)
    if kind.base is tuple:
        fits = isinstance(value, tuple | list) and kind.holds(value)
        return (value if isinstance(value, tuple) else tuple(value)) if fits else None
    expected = (int, float) if kind.base is float else kind.base
    is_of_kind = isinstance(value, expected) and (kind.base is bool or not isinstance(value, bool))
    return value if is_of_kind or kind.is_word(value) else None


def _found_text(value: Any, kind: ValueKind) -> str:
    if kind.base is tuple and isinstance(value, str):
        return f"the string {value!r}. Write ({value!r},), with the comma"
    return value_text(value, kind.base)
