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
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9!_.,'()=+@-]")
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
    scheme, _, rest = text.partition("://")
    bucket, _, prefix = rest.partition("/")
    _refuse_secrets(bucket)
    shown = printable(text)
    if not is_in_object_store(text):
        known = ", ".join(f"{name}:// ({what})" for name, what in SCHEMES.items())
        raise ConfigError(f"{shown!r} is not the address of a folder in an object store: expected {known}. {_FORM}.")
    if shown != text:
        raise ConfigError(f"{shown!r} is followed by '?' or '#', which no address of a folder has. {_FORM}.")
    if _BUCKET.fullmatch(bucket) is None:
        expected = "a bucket of letters, digits, '.', '_' and '-'"
        raise ConfigError(f"{text!r} has no bucket: expected {expected} after {scheme}://, found {bucket!r}. {_FORM}.")
    return Address(scheme, bucket, _checked_prefix(prefix.removesuffix("/"), text))


def _refuse_secrets(authority: str) -> None:
    """Raise ConfigError, without a word of the address, if it has more than a bucket before its first "/"."""
    if "@" in authority or ":" in authority:
        raise ConfigError(
            "an address of a folder in an object store has a user, a password or a port in it. "
            f"{_FORM}; keys and the server come from the environment, as AWS_ACCESS_KEY_ID and AWS_ENDPOINT_URL do."
        )


def _checked_prefix(prefix: str, text: str) -> str:
    if not prefix:
        raise ConfigError(f"{text!r} is a complete bucket: name a folder in it, as in {text.rstrip('/')}/run.")
    for name in prefix.split("/"):
        if name in ("", ".", ".."):
            raise ConfigError(f"{text!r} has the folder {name!r} in it: expected names with one '/' between them.")
        if (found := _NOT_IN_A_NAME.search(name)) is not None:
            allowed = "letters, digits and !_.,'()=+@-"
            raise ConfigError(f"{text!r} has {found[0]!r} in the name of a folder: expected {allowed}.")
    return prefix
