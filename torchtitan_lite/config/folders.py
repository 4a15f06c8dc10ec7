"""Refuse addresses of object stores, and ~, where a folder is expected: a run would make a folder of that name."""

from __future__ import annotations

import re

from torchtitan_lite.errors import ConfigError

# One slash: an address that went through pathlib.Path has lost the other.
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def refuse_address(key: str, value: str, instead: str) -> None:
    """Raise ConfigError if `value` of `key` is an address such as s3://bucket/run, or starts with ~/.

    `instead` is the fix to name for an address.
    """
    if value == "~" or value.startswith("~/"):
        raise ConfigError(f"{key}: {value!r} starts with ~, which only a shell expands. Give the full path.")
    if _ADDRESS.match(value):
        raise ConfigError(
            f"{key}: expected a folder of a file system, found the address {value!r}; "
            f"object stores are not supported yet. {instead}"
        )
