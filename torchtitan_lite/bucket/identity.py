"""The id of a folder of checkpoints in an object store: random, in an object that is created once.

A folder gets it before anything else, and only where the store carries out conditions: two jobs in one folder rely on
that a write whose condition does not hold is refused. Some stores, and gateways in front of them, take the header and
ignore it. Then two jobs would both take a folder, so `probe` finds that out first.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from contextlib import suppress

from torchtitan_lite.bucket.objects import Condition, ConditionFailed, Objects, StoreUnavailable
from torchtitan_lite.errors import FolderUnusable
from torchtitan_lite.log import logger
from torchtitan_lite.store import layout

_ID = re.compile(rb"([0-9a-f]{32})\n")


def folder_id(objects: Objects, probe: Callable[[Objects], None], *, make: bool) -> str:
    """Return the id of the folder; with `make` give it one if it has none, else return the empty string. **Any job**.

    Before it makes one, `probe` finds that its store is fit. Raises what `probe` raises, and OSError.
    """
    found, condition = _read_folder_id(objects)
    if found or not make:
        return found
    probe(objects)
    new = f"{secrets.token_hex(16)}\n".encode()
    with suppress(ConditionFailed):  # Another job was faster, or the answer to our first try was lost.
        objects.put_if(layout.FOLDER_ID, new, condition)
    return _read_folder_id(objects)[0]


def _read_folder_id(objects: Objects) -> tuple[str, Condition | None]:
    try:
        data, condition = objects.get(layout.FOLDER_ID)
    except FileNotFoundError:
        return "", None
    found = _ID.fullmatch(data)
    return ("" if found is None else found[1].decode()), condition


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
        first = _written(objects, key, b"created", None)
        _refuse_unless_refused(objects, key, b"created twice", None)
        _written(objects, key, b"replaced", first)
        _refuse_unless_refused(objects, key, b"replaced twice", first)
    finally:
        _delete(objects, key)


def _written(objects: Objects, key: str, data: bytes, condition: Condition | None) -> Condition:
    """Write the object `key`, which has a name that no other job can have chosen, and return its version.

    Raises FolderUnusable if the store refuses that.
    """
    try:
        return objects.put_if(key, data, condition)
    except ConditionFailed:
        # The store may have carried out the first try of the client, but given an error for it.
        with suppress(FileNotFoundError):
            found, version = objects.get(key)
            if found == data:
                return version
    raise _unfit(objects)


def _refuse_unless_refused(objects: Objects, key: str, data: bytes, condition: Condition | None) -> None:
    try:
        objects.put_if(key, data, condition)
    except ConditionFailed:
        return
    raise _unfit(objects)


def _unfit(objects: Objects) -> FolderUnusable:
    finding = "the store does not carry out conditional writes, so two jobs could write the folder"
    return FolderUnusable(objects.address, f"{finding}. Use one that does, as Amazon S3")


def _delete(objects: Objects, key: str) -> None:
    try:
        objects.delete([key])
    except OSError as error:
        logger.warning("Could not delete %s/%s, a leftover of a few bytes: %s", objects.address, key, error)
