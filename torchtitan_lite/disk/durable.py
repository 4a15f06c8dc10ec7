"""Operations on disk.

The only module that syncs, renames and removes trees. Each method of `Durable` is one operation. A crash leaves either
the state before it or the state after it (`remove_tree`: any part of the tree; `write_file`: any part of the file), so
a test double that stops at the n-th operation visits every state that a killed process can leave. Nothing here knows
what a checkpoint is.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torchtitan_lite.disk.shared_memory import libc
from torchtitan_lite.log import logger

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
# EPERM: a sandbox that does not know the call. Where EPERM is real, the write raises it again.
_NO_ALLOCATION = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.ENODEV, errno.EPERM)
ALIGNMENT = 4096
"""Bytes. Direct I/O needs memory, offset and length to be multiples of the disk's sector, 512 or 4096."""
NO_DIRECT_IO = (errno.EINVAL, errno.EOPNOTSUPP)
"""What a file system answers that refuses direct I/O."""
# Sandboxes answer EPERM to a call that they do not know. Where EPERM is real, the plain rename raises it again.
_NO_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add `path` to an OSError that names no file, as errors of an open file do."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


class Durable:
    """The real file system. Every method raises the OSError of the system, with the path where the method has one."""

    def rename(self, src: Path, dst: Path) -> None:
        """Rename `src` to `dst`, atomically; durable once the folder is synced."""
        _rename_once(src, dst)

    def replace(self, src: Path, dst: Path) -> None:
        """Rename the file `src` over `dst`, atomically; durable once the folder is synced."""
        _rename_once(src, dst)

    def exchange(self, a: Path, b: Path) -> bool:
        """Swap the names of `a` and `b` in one atomic step.

        Return False, with nothing changed, where the kernel or the file system has no such call.
        """
        # Of every C library that torch runs with (glibc 2.28).
        if libc().renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0:
            return True
        code = ctypes.get_errno()
        if code in _NO_EXCHANGE:
            return False
        raise OSError(code, os.strerror(code), str(a), None, str(b))

    def create(self, path: Path) -> int:
        """Return a descriptor of the new, empty file `path`. Raises FileExistsError if there is one."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)

    def set_direct(self, fd: int, is_direct: bool) -> None:
        """Have writes to `fd` bypass the page cache, or not; raises OSError EINVAL where the system refuses that."""
        # Never with O_DIRECT in `create`: a FUSE file system that passes the flags on (mergerfs) would refuse writes
        # later, and for good.
        flags = fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | (os.O_DIRECT if is_direct else 0))

    def allocate(self, fd: int, num_bytes: int) -> None:
        """Reserve `num_bytes` on the disk for the open file `fd`; do nothing where the file system cannot."""
        # Not os.posix_fallocate: on a file system without the call, that function writes to every page.
        while libc().fallocate64(fd, 0, 0, num_bytes) != 0:
            code = ctypes.get_errno()
            if code in _NO_ALLOCATION:
                return
            if code != errno.EINTR:
                raise OSError(code, os.strerror(code))

    def write_at(self, fd: int, data: memoryview, offset: int) -> int:
        """Write the first bytes of `data` to the open file `fd` at `offset`; return how many."""
        return os.pwrite(fd, data, offset)

    def set_size(self, fd: int, num_bytes: int) -> None:
        """Truncate or extend the open file `fd` to `num_bytes`."""
        os.ftruncate(fd, num_bytes)

    def fsync_file(self, fd: int) -> None:
        """Sync the contents of the open file `fd`."""
        os.fsync(fd)

    def fsync_dir(self, path: Path) -> None:
        """Sync the names in the folder `path`."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with naming(path):
                os.fsync(fd)
        finally:
            os.close(fd)

    def write_file(self, path: Path, data: bytes) -> None:
        """Write `data` to `path` and sync it; the name is durable once the folder is synced."""
        with naming(path), path.open("wb") as file:
            file.write(data)
            file.flush()
            self.fsync_file(file.fileno())

    def write_atomically(self, path: Path, data: bytes) -> None:
        """Replace the contents of `path` by `data`, durably; a reader sees the old ones or the new ones, complete."""
        temporary = path.with_name(temporary_name(path.name))
        if os.path.lexists(temporary):
            # Opening it would follow a link that leads out of the folder.
            self.remove_file(temporary)
        try:
            self.write_file(temporary, data)
            self.replace(temporary, path)
        except OSError:
            with suppress(OSError):  # The first error counts.
                self.remove_file(temporary)  # On a full disk it would take what room there is.
            raise
        self.fsync_dir(path.parent)

    def remove_file(self, path: Path) -> None:
        """Remove the file or link `path`, if it is there; the target of a link stays."""
        path.unlink(missing_ok=True)

    def remove_tree(self, path: Path) -> None:
        """Remove the folder `path` with everything in it; links in it are not followed."""
        shutil.rmtree(path, **_UNLESS_GONE)

    def remove_dir(self, path: Path) -> None:
        """Remove the folder `path`, which is empty; durable once the folder that it is in is synced."""
        path.rmdir()

    def make_dir(self, path: Path) -> None:
        """Create the folder `path` and its missing parents, all durably."""
        if path.is_dir():
            return
        # The parent first: a name is durable only in a folder that is.
        self.make_dir(path.parent)
        path.mkdir(exist_ok=True)
        self.fsync_dir(path.parent)


def _rename_once(src: Path, dst: Path) -> None:
    was = src.lstat() if os.path.lexists(src) else None
    try:
        src.replace(dst)
    except FileNotFoundError:
        # The client of a network file system may send a request twice: the first one was carried out.
        is_done = was is not None and os.path.lexists(dst) and os.path.samestat(was, dst.lstat())
        if not is_done:
            raise


def _raise_unless_gone(function: object, path: object, error: Any) -> None:
    """Raise the `error` of a removal, unless it says that the thing is gone: another removed it, or a request twice."""
    error = error[1] if isinstance(error, tuple) else error
    if not isinstance(error, FileNotFoundError):
        raise error


_UNLESS_GONE: dict[str, Any] = {"onexc" if sys.version_info >= (3, 12) else "onerror": _raise_unless_gone}


@functools.cache
def log_no_direct_io(folder: str, refusal: str, instead: str) -> None:
    """Log once that direct I/O is refused in `folder`, and what is done `instead`."""
    logger.info("%s: direct I/O is refused here (%s); %s through the page cache", folder, refusal, instead)


def temporary_name(name: str) -> str:
    """Return the name under which the next contents of the file `name` are written, in the same folder."""
    return f".{name}.tmp"


DISK = Durable()
