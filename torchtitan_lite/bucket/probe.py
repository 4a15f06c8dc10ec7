"""Whether a store refuses a write whose condition does not hold, on which two jobs in one folder rely.

Some stores, and gateways in front of them, take the header and ignore it. Then two jobs would both take a folder.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import suppress

from torchtitan_lite.bucket.objects import Condition, ConditionFailed, Objects, StoreUnavailable
from torchtitan_lite.errors import FolderUnusable
from torchtitan_lite.log import logger

TRIES = 3
"""Of the probe: one request in it whose answer is lost leaves its outcome unknown, and the next try has another key."""


def probe(objects: Objects) -> None:
    """Raise FolderUnusable unless the store of `objects` carries out conditional writes.

    Writes an object with a random name in the folder and deletes it; other jobs may do the same meanwhile.
    """
    for _ in range(TRIES - 1):
        with suppress(StoreUnavailable):
            return _probe_once(objects)
    _probe_once(objects)


def _probe_once(objects: Objects) -> None:
    key = f"probe-{secrets.token_hex(8)}"
    try:
        first = _created(objects, key)
        _refuse_unless_refused(objects, lambda: objects.put_if_absent(key, b"created twice"))
        _replace(objects, key, first)
        _refuse_unless_refused(objects, lambda: objects.put_if_match(key, b"replaced twice", first))
    finally:
        _delete(objects, key)


def _created(objects: Objects, key: str) -> Condition:
    """Create the object `key`, which has a name that no other job can have chosen, and return its version."""
    try:
        return objects.put_if_absent(key, b"created")
    except ConditionFailed:
        # The store carried out the first try of the client, but gave an error for it.
        return _found(objects, key, b"created")


def _replace(objects: Objects, key: str, condition: Condition) -> None:
    try:
        objects.put_if_match(key, b"replaced", condition)
    except ConditionFailed:
        _found(objects, key, b"replaced")  # Likewise.


def _found(objects: Objects, key: str, expected: bytes) -> Condition:
    """Return the version of the object `key`. Raises FolderUnusable unless it has the contents `expected`."""
    with suppress(FileNotFoundError):
        data, condition = objects.get(key)
        if data == expected:
            return condition
    finding = "does not carry out conditional writes, so a job could not keep its folder"
    raise FolderUnusable(objects.address, f"the store {finding}")


def _refuse_unless_refused(objects: Objects, write: Callable[[], object]) -> None:
    try:
        write()
    except ConditionFailed:
        return
    finding = "ignores conditional writes, so two jobs would both write the folder"
    raise FolderUnusable(objects.address, f"the store {finding}. Use a store that has them, as Amazon S3 does")


def _delete(objects: Objects, key: str) -> None:
    try:
        objects.delete([key])
    except OSError as error:
        logger.warning("Could not delete %s/%s, a few bytes without use: %s", objects.address, key, error)
