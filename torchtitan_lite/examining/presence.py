"""Whether the checkpoint that is being read is still the one under its name.

A verb that only reads takes no lease, so the job that writes the folder may remove or replace a step meanwhile. Files
that are gone then are no damage, and no error of the machine.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from torchtitan_lite.checkpoint.reading.files import Identity, differs, files_of
from torchtitan_lite.errors import (
    CheckpointDamaged,
    CheckpointNotFound,
    CheckpointUnreadable,
    CheckpointUnsafe,
)
from torchtitan_lite.examining.other_libraries import description_of
from torchtitan_lite.store import layout
from torchtitan_lite.store.place import Place, on_disk


def checkpoint_identity(folder: Place) -> Identity | None:
    """Return what differs once another checkpoint has the name `folder`; None if there is no checkpoint.

    A checkpoint may be a single file.
    """
    if not folder.is_file() and not folder.is_dir():
        return files_of(folder).identity()
    home = on_disk(folder)
    marks = (home / layout.MANIFEST, home / layout.METADATA, description_of(home))
    for path in (home,) if folder.is_file() else marks:
        try:
            if path is None:
                return None
            found = path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            # ESTALE is what a network file system gives for a file that another host removed.
            return None if error.errno == errno.ESTALE else (error.errno or 0,)
        return found.st_dev, found.st_ino, found.st_mtime_ns
    return None


def refuse_if_gone(folder: Place, identity: Identity | None) -> None:
    """Raise `CheckpointNotFound` if the checkpoint in `folder` is not the one of `identity` any more."""
    if identity is None or differs(checkpoint_identity(folder), identity):
        raise CheckpointNotFound(str(folder), None, finding="it was removed or replaced while it was read")


@contextmanager
def reporting_removal(*folders: Place, always: bool = False) -> Iterator[None]:
    """In place of an error of reading, raise `CheckpointNotFound` if one of `folders` was removed or replaced.

    `always`: also where nothing failed, because parts of two checkpoints may have been read.
    """
    before = {folder: identity for folder in folders if (identity := checkpoint_identity(folder)) is not None}

    def refuse() -> None:
        for folder, identity in before.items():
            refuse_if_gone(folder, identity)

    try:
        yield
    except (CheckpointDamaged, CheckpointUnreadable, CheckpointUnsafe, FileNotFoundError):
        refuse()
        raise
    if always:
        refuse()
