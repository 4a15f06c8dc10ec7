"""Folders and addresses of object stores in a configuration.

Where only a folder will do, an address and ~ are refused: a run would make a folder of that name.
"""

from __future__ import annotations

import re

from torchtitan_lite.errors import ConfigError

# One slash: an address that went through pathlib.Path has lost the other.
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")

OBJECT_STORES = ("s3", "gs", "az")
"""The schemes of addresses that name a folder in an object store."""


def is_in_object_store(value: str) -> bool:
    """Return whether `value` is the address of a folder in an object store, such as s3://bucket/run."""
    scheme, separator, _ = value.partition("://")
    return bool(separator) and scheme in OBJECT_STORES


def refuse_unknown_address(key: str, value: str) -> None:
    """Raise ConfigError if `value` of `key` is an address, but of no object store that is known; or starts with ~/."""
    if _has_login(value):
        raise ConfigError(
            f"{key}: the address has a user or a password in it. Give the credentials of a store in the environment; "
            "docs/object_stores.md names the variables."
        )
    if not is_in_object_store(value):
        known = ", ".join(f"{scheme}://" for scheme in OBJECT_STORES)
        refuse_address(key, value, f"Name a folder, or an address that begins with one of {known}.")


def refuse_address(key: str, value: str, instead: str) -> None:
    """Raise ConfigError if `value` of `key` is an address such as s3://bucket/run, or starts with ~/.

    `instead` is the fix to name for an address.
    """
    if value == "~" or value.startswith("~/"):
        raise ConfigError(f"{key}: {value!r} starts with ~, which only a shell expands. Give the full path.")
    if _ADDRESS.match(value):
        # Neither a login nor what is signed: messages are logged.
        shown = (
            f"an address at {value.partition(':')[0]}:"
            if _has_login(value) or "?" in value
            else f"the address {value!r}"
        )
        raise ConfigError(f"{key}: expected a folder of a file system, found {shown}. {instead}")


def _has_login(value: str) -> bool:
    """Return whether `value` is an address with a user before its host."""
    return _ADDRESS.match(value) is not None and "@" in value.partition(":")[2].lstrip("/").partition("/")[0]
