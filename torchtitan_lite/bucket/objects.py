"""What a folder of checkpoints asks of an object store: few verbs, each of them one request that may be repeated.

A key names one object below the address. Nothing here knows what a checkpoint is. Conditions are the only means by
which two jobs that write at the same time are kept apart: `put_if` is carried out by the store as one step, or
refused. Any thread, any rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PosixPath
from typing import Protocol

Condition = Mapping[str, str]
"""What distinguishes one version of an object from every other: opaque, as the store's client returned it."""


class ConditionFailed(OSError):
    """The object is not in the state that a conditional write named, so nothing was written."""


class StoreUnavailable(OSError):
    """The store gave no usable answer before the deadline. A write may have been carried out, or may yet be."""


@dataclass(frozen=True)
class Listed:
    """One object, as a listing or `head` shows it."""

    key: str
    size: int
    """Bytes."""
    condition: Condition
    modified: float
    """Unix seconds, by the clock of the store."""


class Objects(Protocol):
    """The objects below one address.

    Every method raises `StoreUnavailable` without an answer before the deadline, PermissionError where the store
    refuses the key that it was given, and FileNotFoundError for an object (or a bucket) that does not exist.
    """

    address: str
    """As people write it: s3://bucket/run."""

    def get(self, key: str) -> tuple[bytes, Condition]:
        """Return the contents of the small object `key`, and the condition that it has this version."""
        ...

    def put(self, key: str, data: bytes) -> None:
        """Write the small object `key`; replace what was there."""
        ...

    def put_if(self, key: str, data: bytes, condition: Condition | None) -> Condition:
        """Replace the small object `key`, if it has the version of `condition`; with None, create it.

        Return its new version. Raises `ConditionFailed` if it has another version, or exists.
        """
        ...

    def upload(self, key: str, parts: Iterator[memoryview], part_bytes: int, at_a_time: int) -> None:
        """Write the object `key` from `parts`, each of `part_bytes` but the last, in several requests at a time."""
        ...

    def get_range(self, key: str, begin: int, end: int) -> memoryview:
        """Return the bytes [begin, end) of the object `key`; shorter where the object ends before."""
        ...

    def head(self, key: str) -> Listed:
        """Return what is known of the object `key` without its contents."""
        ...

    def list(self, prefix: str) -> Iterator[Listed]:
        """Yield every object whose key begins with `prefix`, in any order."""
        ...

    def delete(self, keys: Iterable[str]) -> None:
        """Delete the objects `keys`; those that do not exist are no error."""
        ...


class ObjectPath(PosixPath):
    """A path that no file system has: s3://bucket/run/step-5.0123456789abcdef/__0_0.distcp."""

    def __str__(self) -> str:
        return super().__str__().replace(":/", "://", 1)
