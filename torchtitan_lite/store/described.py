"""What describes a checkpoint (`manifest.json`, `.metadata`), read within limits.

It is read only where it is no larger than the data beside it can need, so that what it takes to read is bounded by
what the folder holds.
"""

from __future__ import annotations

import os
from pathlib import Path

from torchtitan_lite.disk.plain_file import opened
from torchtitan_lite.errors import CheckpointUnsafe
from torchtitan_lite.store import layout

DESCRIPTION_BYTES = 512 << 10
"""Of `manifest.json` or `.metadata`, whatever the data. In memory JSON takes up to 30 times as much, a pickle 72."""
DESCRIPTION_RATIO = 4
"""Further bytes of these for each byte of data. A chunk takes 60 to 160 bytes of a manifest, and its item in a rank's
file 700 at least, before its first element; with long names, scalars alone take 0.5 here and 0.9 in DCP's metadata."""
DESCRIPTION_MOST_BYTES = 16 << 30
"""Of these, whatever the data: of 100,000 tensors in 1,000 shards each a manifest has 6 GiB."""
_DESCRIBES = frozenset({layout.MANIFEST, layout.METADATA, layout.FINDINGS})


def read_description(path: Path, ending: bytes) -> bytes:
    """Return the bytes of `path`, `manifest.json` or `.metadata`. Raise `CheckpointUnsafe` where it is too large.

    A large one that does not end with `ending` is no description, and is not read either.
    """
    with opened(path) as fd, os.fdopen(fd, "rb", closefd=False) as file:
        size = os.fstat(fd).st_size
        if size > DESCRIPTION_BYTES:
            if (most := most_description_bytes(path.parent, size)) < size:
                raise CheckpointUnsafe(
                    str(path), f"expected at most {most} bytes beside data of this size, found {size}"
                )
            if os.pread(fd, len(ending), size - len(ending)) != ending:
                raise CheckpointUnsafe(str(path), f"expected {size} bytes that end as it does, found others")
        return file.read(size)


def most_description_bytes(folder: Path, size: int) -> int:
    """Return how large a description beside the data in `folder` may be; `size` or more if that is not too much."""
    data_bytes = 0
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name not in _DESCRIBES and entry.is_file(follow_symlinks=False):
                data_bytes += entry.stat(follow_symlinks=False).st_size
                if (most := allowed_description_bytes(data_bytes)) >= size:
                    return most
    return allowed_description_bytes(data_bytes)


def allowed_description_bytes(data_bytes: int) -> int:
    """Return how large the description of so much data may be."""
    return min(DESCRIPTION_BYTES + DESCRIPTION_RATIO * data_bytes, DESCRIPTION_MOST_BYTES)
