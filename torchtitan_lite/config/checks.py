"""Checks of one value of the configuration, whose key is `name`."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

from torchtitan_lite.config.address import SCHEMES, is_in_object_store, parse_address, printable
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
