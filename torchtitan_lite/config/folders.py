"""That a folder is one of a file system: addresses of object stores would be made as folders of that name."""

from __future__ import annotations

import re

from torchtitan_lite.errors import ConfigError

# A path that Python has taken apart and put together again has one slash less.
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def refuse_address(key: str, value: str, instead: str) -> None:
    """Raise ConfigError if `value`, of `key`, is an address, as s3://bucket/run; `instead` says what to do."""
    if _ADDRESS.match(value):
        raise ConfigError(
            f"{key}: expected a folder of a file system, found the address {value!r}; "
            f"object stores are not supported yet. {instead}"
        )
