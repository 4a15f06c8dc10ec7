"""The lock under which one of several processes makes the file of tokens that all of them read.

It ends with its process, so a kill leaves nothing to remove. The file of the lock says who has it and how far the work
is: a process that waits logs that. Waits have no time-out.
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from torchtitan_lite.log import logger

_LOG_SECONDS = 30.0
_POLL_SECONDS = 0.2


@contextmanager
def making_lock(path: Path, sleep: Callable[[float], None]) -> Iterator[tuple[Callable[[str], None], bool]]:
    """Hold the lock of the file `path` in the block, however long that takes.

    Yield a function that notes in the file how far the work is, and whether no other process is in the block. A file,
    not its folder: NFS has such locks on files. Where there is none, every process gets it: each then writes a file of
    its own, and the last one stays.
    """
    with path.open("a+b", buffering=0) as file:
        waited = 0.0
        while (is_locked := _try_lock(file)) is False:
            if waited == 0 or waited % _LOG_SECONDS < _POLL_SECONDS:
                logger.info("Waiting for %s, which tokenises the corpus", _note_in(file) or "another process")
            sleep(_POLL_SECONDS)
            waited += _POLL_SECONDS

        def note(progress: str) -> None:
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}{progress and f': {progress}'}".encode())

        try:
            note("")
            yield note, bool(is_locked)
        finally:
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_UN)  # A process that was forked meanwhile has the descriptor, too.


def _try_lock(file: BinaryIO) -> bool | None:
    """Return whether this process has the lock; None where the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _note_in(file: BinaryIO) -> str:
    file.seek(0)
    return file.read(256).decode(errors="replace")
