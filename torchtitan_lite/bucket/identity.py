"""The id of a folder of checkpoints in an object store: random, in an object that is created once.

A folder gets it before anything else, and only where the store carries out conditions: all that follows relies on them.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable

from torchtitan_lite.bucket.objects import Condition, ConditionFailed, Objects
from torchtitan_lite.store import layout

_ID = re.compile(rb"([0-9a-f]{32})\n")


def id_of(objects: Objects) -> str:
    """Return the id of the folder; empty if it has none. Raises OSError."""
    return _read(objects)[0]


def make_id(objects: Objects, probe: Callable[[Objects], None]) -> str:
    """Return the id of the folder; give it one if it has none, after `probe` found that its store is fit. **Any job**.

    Raises what `probe` raises, and OSError.
    """
    found, condition = _read(objects)
    if found:
        return found
    probe(objects)
    new = f"{secrets.token_hex(16)}\n".encode()
    try:
        if condition is None:
            objects.put_if_absent(layout.FOLDER_ID, new)
        else:
            objects.put_if_match(layout.FOLDER_ID, new, condition)
    except ConditionFailed:
        pass  # Another job was faster, or the answer to our first try was lost: what is there counts.
    return _read(objects)[0]


def _read(objects: Objects) -> tuple[str, Condition | None]:
    try:
        data, condition = objects.get(layout.FOLDER_ID)
    except FileNotFoundError:
        return "", None
    found = _ID.fullmatch(data)
    return ("" if found is None else found[1].decode()), condition
