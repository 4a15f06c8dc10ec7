"""Checks of the values of the configuration: of one value whose key is `name`, and of all fields of a section."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Annotated, Any, get_type_hints

from torchtitan_lite.config.address import SCHEMES, is_in_object_store, parse_address, printable
from torchtitan_lite.config.value_kinds import ValueKind, value_text
from torchtitan_lite.errors import ConfigError


def at_least(name: str, value: int, low: int) -> None:
    """Raise ConfigError if `value` is below `low`."""
    if value < low:
        raise ConfigError(f"{name}: expected at least {low}, found {value}.")


def positive(name: str, value: float) -> None:
    """Raise ConfigError unless `value` is positive and finite."""
    if not 0 < value < float("inf"):
        raise ConfigError(f"{name}: expected a positive finite number, found {value}.")


def not_negative(name: str, value: float) -> None:
    """Raise ConfigError unless `value` is finite and at least 0."""
    if not 0 <= value < float("inf"):
        raise ConfigError(f"{name}: expected a finite number of at least 0, found {value}.")


Check = Callable[[str, Any], None]
"""Raises ConfigError for a value, given its key and the value."""
AtLeastOne = Annotated[int, partial(at_least, low=1)]
"""A number with its bound. The fields of a section that are annotated so are checked with their types."""
AtLeastZero = Annotated[int, partial(at_least, low=0)]
NotNegative = Annotated[float, not_negative]
Positive = Annotated[float, positive]


# Folders and addresses of object stores, as the keys of a configuration take them.
#
# Where only a folder will do, an address and ~ are refused: a run would make a folder of that name.


# One slash: an address that went through pathlib.Path has lost the other.
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def refuse_unknown_address(key: str, value: str) -> None:
    """Raise ConfigError if `value` of `key` is an address, but of no folder in a known store; or starts with ~/."""
    if is_in_object_store(value):
        try:
            parse_address(value)
        except ConfigError as error:
            raise ConfigError(f"{key}: {error}") from None
    else:
        known = ", ".join(f"{scheme}://" for scheme in SCHEMES)
        refuse_address(key, value, f"Name a folder, or an address that begins with one of {known}.")


def refuse_address(key: str, value: str, instead: str) -> None:
    """Raise ConfigError if `value` of `key` is an address such as s3://bucket/run, or starts with ~/.

    `instead` is the fix to name for an address.
    """
    if value == "~" or value.startswith("~/"):
        raise ConfigError(f"{key}: {value!r} starts with ~, which only a shell expands. Give the full path.")
    if _ADDRESS.match(value):
        found = printable(value)
        raise ConfigError(f"{key}: expected a folder of a file system, found the address {found!r}. {instead}")


# The fields of a section that is made in Python.
#
# The command line and TOML files are checked earlier, as text. In a training loop of your own, a number in quotes would
# only fail at its first comparison, and a string in place of a list of names would be taken letter by letter. Three
# values are converted, because only one meaning is possible: a path becomes its text, a list becomes a tuple, and a
# choice gets its exact spelling. The annotation of a field also says which values are too small.


def check_types(section: object, name: str) -> None:
    """Convert the values of `section`, called `name`, then raise ConfigError if one is not as its field says."""
    for key, (kind, checks) in _kinds(type(section)).items():  # type: ignore[arg-type]  # mypy: a class is hashable
        value = getattr(section, key)
        converted = kind.converted(value)
        if converted is None and not (value is None and kind.optional):
            raise ConfigError(f"{name}.{key}: expected {kind.describe()}, found {_found_text(value, kind)}.")
        if converted is not value:
            object.__setattr__(section, key, converted)
        for check in checks if isinstance(converted, int | float) else ():
            check(f"{name}.{key}", converted)


def check_sections(config: object) -> None:
    """Raise ConfigError unless every field of `config` is an instance of its section's class."""
    for name, expected in get_type_hints(type(config)).items():
        value = getattr(config, name)
        if not isinstance(value, expected):
            found = "a dict" if isinstance(value, Mapping) else f"{type(value).__name__}"
            raise ConfigError(
                f"{name}: expected {expected.__name__}(...), found {found}. Import {expected.__name__} from "
                f"{expected.__module__}."
            )


@cache
def _kinds(section: type) -> dict[str, tuple[ValueKind, tuple[Check, ...]]]:
    """Return the kind of each field, and the checks in its annotation."""
    annotations = get_type_hints(section, include_extras=True)
    return {name: (ValueKind.of(each), getattr(each, "__metadata__", ())) for name, each in annotations.items()}


def _found_text(value: Any, kind: ValueKind) -> str:
    if kind.base is tuple and isinstance(value, str):
        return f"the string {value!r}. Write ({value!r},), with the comma"
    if kind.choices and isinstance(value, str):
        return repr(value)
    return value_text(value, kind.base)
