"""A lock on a folder, held for moments, by processes that change one thing in it.

It leaves no file behind, and ends with its process. Where the file system has no such locks (NFS has none on folders)
every process gets it, so what it protects must also be safe without it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_POLL_SECONDS = 0.05


@contextmanager
def locked(folder: Path, wait_seconds: float, sleep: Callable[[float], None] = time.sleep) -> Iterator[None]:
    """Hold the lock of `folder` in the block. Raise BlockingIOError if another process has it for `wait_seconds`."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _wait_for_lock(fd, folder, wait_seconds, sleep)
        yield
    finally:
        # A process that was forked meanwhile has the descriptor, too: closing this one would not end the lock.
        _unlock(fd)
        os.close(fd)


def _wait_for_lock(fd: int, folder: Path, wait_seconds: float, sleep: Callable[[float], None]) -> None:
    for _ in range(max(1, round(wait_seconds / _POLL_SECONDS))):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sleep(_POLL_SECONDS)
        except OSError:
            return
        else:
            return
    raise BlockingIOError(errno.EAGAIN, f"another process has locked it for {wait_seconds:g} s", str(folder))


def _unlock(fd: int) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_UN)
    except OSError:
        return
