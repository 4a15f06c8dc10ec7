"""The id of a folder of checkpoints: random, in a file there, so that a folder that was made again has another one.

A path and an inode come back; what remembers a folder outside of it, such as an image in memory, compares this id.
"""

from __future__ import annotations

import re
import secrets
from pathlib import Path

from torchtitan_lite.disk.durable import Durable
from torchtitan_lite.disk.plain_file import read_plain
from torchtitan_lite.errors import CheckpointUnsafe
from torchtitan_lite.store import layout

_ID = re.compile(rb"([0-9a-f]{32})\n")


def folder_id(root: Path, durable: Durable, *, make: bool) -> str:
    """Return the id of the folder `root`; with `make` give it one if it has none, else return the empty string.

    **Coordinator only**, under the lease if it may make one. Raises OSError.
    """
    path = root / layout.FOLDER_ID
    try:
        found = _ID.fullmatch(read_plain(path, 64))
    except (FileNotFoundError, NotADirectoryError, CheckpointUnsafe):
        found = None
    if found is not None:
        return found[1].decode()
    if not make:
        return ""
    new = secrets.token_hex(16)
    durable.write_atomically(path, f"{new}\n".encode())
    return new
