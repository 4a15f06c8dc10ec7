"""The store of a folder, on disk or in an object store, and what helps where it cannot be used."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torchtitan_lite.config.address import is_in_object_store
from torchtitan_lite.disk.block_writer import LOOK_SECONDS
from torchtitan_lite.errors import FolderUnusable, TorchtitanLiteError
from torchtitan_lite.store.protocol import StoresCheckpoints
from torchtitan_lite.store.store import CheckpointStore


def open_store(folder: str, dump_folder: str = "", look_seconds: float = LOOK_SECONDS) -> StoresCheckpoints:
    """Return the store of `folder`: an address such as s3://bucket/run, else a path below `dump_folder`. Any rank.

    `look_seconds`: for how long a rank looks for the folder of a save that another host made.
    Touches neither disk nor network. Raises ConfigError for another address, `ExtraMissing` without the client of one.
    """
    if not is_in_object_store(folder):
        return CheckpointStore(Path(dump_folder) / folder, look_seconds=look_seconds)
    from torchtitan_lite.bucket.bucket_store import open_bucket  # Its client is an extra, and takes its time.

    return open_bucket(folder)


def look_seconds(timeout_seconds: float) -> float:
    """Return for how long a rank looks for what another host has made, while the others wait `timeout_seconds`."""
    return min(LOOK_SECONDS, timeout_seconds / 2)


_FIXES = {
    "Give this user the permissions for it": (errno.EACCES, errno.EPERM),
    "Mount it so that it can be written": (errno.EROFS,),
    "Make room there": (errno.ENOSPC, errno.EDQUOT),
    "Make it a folder": (errno.ENOTDIR, errno.ENOENT, errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG),
    "Raise the limit of open files": (errno.EMFILE, errno.ENFILE),
    "The cause is its file system, not a permission: mount one there that can do this": (
        *(errno.EINVAL, errno.EXDEV, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOTTY),
    ),
}
_IT_FAILED = "The cause is its file system, not a permission: start the same command again once it works"
"""For EIO, ESTALE, ENOLCK, ENOTEMPTY, ETIMEDOUT and the like: there are many, and each file system has its own."""


@contextmanager
def usable(folder: Path | str, key: str = "") -> Iterator[None]:
    """Raise `FolderUnusable` for an OSError in the block; errors of this package pass unchanged.

    `key` is the option that names `folder`; empty for that of the checkpoints.
    """
    try:
        yield
    except TorchtitanLiteError:
        raise
    except OSError as error:
        fix = ""
        if error.errno and not is_in_object_store(str(folder)):
            fix = next((fix for fix, codes in _FIXES.items() if error.errno in codes), _IT_FAILED)
        raise FolderUnusable(str(folder), str(error), key, fix) from error
