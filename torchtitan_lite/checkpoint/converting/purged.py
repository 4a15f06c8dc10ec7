"""A checkpoint that is removed while it is read.

A verb that only reads takes no lease, so a job may purge the step meanwhile. That is not damage, and not an I/O error.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torchtitan_lite.errors import CheckpointDamaged, CheckpointNotFound, CheckpointUnreadable


@contextmanager
def unless_purged(folder: Path) -> Iterator[None]:
    """Turn errors of reading into CheckpointNotFound if `folder` was there at the start and is not any more."""
    try:
        yield
    except (CheckpointDamaged, CheckpointUnreadable, FileNotFoundError) as error:
        if isinstance(error, CheckpointNotFound) or folder.is_dir():
            raise
        finding = "it was removed while it was read, by a job's retention or by hand"
        raise CheckpointNotFound(str(folder), None, finding=finding) from None
