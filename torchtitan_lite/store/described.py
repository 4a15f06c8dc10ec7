"""Reading `manifest.json` and `.metadata` within limits.

Each is read only if it is no larger than the data next to it can need, so the memory for reading it is bounded by what
the folder holds.
"""

from __future__ import annotations

import os
from pathlib import Path

from torchtitan_lite.disk.plain_file import opened_plain_file
from torchtitan_lite.errors import CheckpointDamaged, CheckpointUnsafe
from torchtitan_lite.store import layout

DESCRIPTION_BYTES = 512 << 10
"""Allowed for each file, however little data there is. In memory JSON takes up to 30 times its length, a pickle 72."""
DESCRIPTION_RATIO = 4
"""Bytes allowed on top for each byte of data. A chunk takes 60 to 160 bytes of a manifest; its item in a rank's file
takes at least 700, before its first element. With long names, scalars alone need 0.5 here and 0.9 in DCP's metadata."""
DESCRIPTION_MOST_BYTES = 16 << 30
"""Allowed at most, however much data there is: 100,000 tensors of 1,000 shards each need 6 GiB of manifest."""
_DESCRIBES = frozenset({layout.MANIFEST, layout.METADATA, layout.FINDINGS})


def read_description(path: Path, ending: bytes) -> bytes:
    """Return the contents of `path`, a `manifest.json` or `.metadata`. Raise `CheckpointUnsafe` if it is too large.

    A file over `DESCRIPTION_BYTES` that does not end with `ending` raises `CheckpointDamaged`, before it is read.
    """
    with opened_plain_file(path) as fd, os.fdopen(fd, "rb", closefd=False) as file:
        size = os.fstat(fd).st_size
        if size > DESCRIPTION_BYTES:
            if (most := most_description_bytes(path.parent, size)) < size:
                raise CheckpointUnsafe(str(path), f"expected at most {most} bytes for data of this size, found {size}")
            if os.pread(fd, len(ending), size - len(ending)) != ending:
                raise CheckpointDamaged(
                    str(path.parent), f"{path.name}: expected {ending!r} at the end of {size} bytes, found others"
                )
        return file.read(size)


def most_description_bytes(folder: Path, size: int) -> int:
    """Return how large a description next to the data in `folder` may be.

    Stops counting as soon as the answer is at least `size`.
    """
    data_bytes = 0
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name not in _DESCRIBES and entry.is_file(follow_symlinks=False):
                data_bytes += entry.stat(follow_symlinks=False).st_size
                if (most := allowed_description_bytes(data_bytes)) >= size:
                    return most
    return allowed_description_bytes(data_bytes)


def allowed_description_bytes(data_bytes: int) -> int:
    """Return how large the description of `data_bytes` of data may be."""
    return min(DESCRIPTION_BYTES + DESCRIPTION_RATIO * data_bytes, DESCRIPTION_MOST_BYTES)
