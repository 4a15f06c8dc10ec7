"""Where a folder of checkpoints in an object store is: s3://bucket/run.

A value of plain text, checked once: what has been parsed is safe to print and to join with a name. The secrets and the
server come from the environment, so an address that has any is refused, and what is refused is never printed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from torchtitan_lite.errors import ConfigError

SCHEMES = {"s3": "Amazon S3 and compatible stores", "gs": "Google Cloud Storage", "az": "Azure Blob Storage"}
"""Every kind of store, and what it is."""

_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_NAME = r"[A-Za-z0-9!_.,'()=+@-]+"
_FOLDER = re.compile(rf"({'|'.join(SCHEMES)})://([A-Za-z0-9][A-Za-z0-9._-]*)/({_NAME}(?:/{_NAME})*)/?")
_FORM = "Write a kind of store, a bucket and a folder in it, as in s3://bucket/run"


@dataclass(frozen=True)
class Address:
    """A folder of objects; its string is what people write."""

    scheme: str
    bucket: str
    """In Azure: the container."""
    prefix: str
    """Names with "/" between them, without one at the ends."""

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.prefix}"


def is_in_object_store(text: str) -> bool:
    """Return whether `text` is meant as the address of a folder in a store that is known."""
    return is_address(text) and text.partition("://")[0] in SCHEMES


def printable(text: str) -> str:
    """Return the address `text`, which may be of anything, without a login and without what may be a signature."""
    begin = re.match("[^:]*:/*", text)
    scheme, rest = ("", text) if begin is None else (begin[0], text[begin.end() :])
    host, slash, path = re.split("[?#]", rest)[0].partition("/")
    return scheme + host.rpartition("@")[2] + slash + path


def is_address(text: str) -> bool:
    """Return whether `text` is meant as an address: it begins with a scheme, known or not, and "://"."""
    return _ADDRESS.match(text) is not None


def parse_address(text: str) -> Address:
    """Return the address that `text` is. Raises ConfigError."""
    _refuse_secrets(text.partition("://")[2].partition("/")[0])
    if printable(text) != text:
        raise ConfigError(f"{printable(text)!r} is followed by '?' or '#', which no address of a folder has. {_FORM}.")
    found = _FOLDER.fullmatch(text)
    if found is None or {".", ".."} & {*found[3].split("/")}:
        known = ", ".join(f"{name}:// ({what})" for name, what in SCHEMES.items())
        raise ConfigError(
            f"{printable(text)!r} is not the address of a folder in an object store: expected {known}, then a bucket "
            f"of letters, digits, '.', '_' and '-', then a folder, whose names may also have !,'()=+@. {_FORM}."
        )
    return Address(found[1], found[2], found[3])


def _refuse_secrets(authority: str) -> None:
    """Raise ConfigError, without a word of the address, if it has more than a bucket before its first "/"."""
    if "@" in authority or ":" in authority:
        raise ConfigError(
            "an address of a folder in an object store has a user, a password or a port in it. "
            f"{_FORM}; keys and the server come from the environment, as AWS_ACCESS_KEY_ID and AWS_ENDPOINT_URL do."
        )
