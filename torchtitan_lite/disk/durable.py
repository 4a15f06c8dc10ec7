"""Operations on disk.

The only module that syncs, renames and removes trees. Each method of `Durable` is one operation,
after which a crash leaves either its state before or its state after (`remove_tree` any part of the
tree, `write_file` any part of the file), so that a stand-in which stops at the n-th operation
visits every state that a killed process can leave. Nothing here knows what a checkpoint is.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_NO_ALLOCATION = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.ENODEV)
O_DIRECT: int = getattr(os, "O_DIRECT", 0)
"""0 where the system has no direct I/O."""
# EPERM is what sandboxes answer to a call that they do not know; where it is meant, the plain rename says it again.
_NO_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name `path` in an OSError that names no file, as those of an open file do."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


class Durable:
    """The real filesystem. Every method raises the OSError that the system gives; it names what a path was given of."""

    def rename(self, src: Path, dst: Path) -> None:
        """`src` is called `dst`, atomically; durable once the folder is synced."""
        src.rename(dst)

    def replace(self, src: Path, dst: Path) -> None:
        """The file `src` stands in the place of `dst`, atomically; durable once the folder is synced."""
        src.replace(dst)

    def exchange(self, a: Path, b: Path) -> bool:
        """`a` and `b` have swapped names in one atomic step; False, and nothing done, where there is no such call."""
        renameat2 = _renameat2()
        if renameat2 is None:
            return False
        if renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0:
            return True
        code = ctypes.get_errno()
        if code in _NO_EXCHANGE:
            return False
        raise OSError(code, os.strerror(code), str(a), None, str(b))

    def create(self, path: Path, *, direct: bool) -> int:
        """A descriptor of the new, empty file `path`; `direct`: past the page cache (OSError EINVAL where refused)."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | (O_DIRECT if direct else 0), 0o644)

    def allocate(self, fd: int, num_bytes: int) -> None:
        """The disk has room for `num_bytes` of the open file `fd`; nothing is done where it cannot tell."""
        fallocate = _fallocate()
        while fallocate is not None and fallocate(fd, 0, 0, num_bytes) != 0:
            code = ctypes.get_errno()
            if code in _NO_ALLOCATION:
                return
            if code != errno.EINTR:
                raise OSError(code, os.strerror(code))

    def write_at(self, fd: int, data: memoryview, offset: int) -> int:
        """Some of `data`, from its beginning, is in the open file `fd` at `offset`; returns how many bytes."""
        return os.pwrite(fd, data, offset)

    def set_size(self, fd: int, num_bytes: int) -> None:
        """The open file `fd` ends after `num_bytes`."""
        os.ftruncate(fd, num_bytes)

    def fsync_file(self, fd: int) -> None:
        """The bytes of the open file `fd` are on the disk."""
        os.fsync(fd)

    def fsync_dir(self, path: Path) -> None:
        """The names in the folder `path` are on the disk."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with naming(path):
                os.fsync(fd)
        finally:
            os.close(fd)

    def write_file(self, path: Path, data: bytes) -> None:
        """`path` holds `data`, on the disk; its name is durable once the folder is synced."""
        with naming(path), path.open("wb") as file:
            file.write(data)
            file.flush()
            self.fsync_file(file.fileno())

    def write_atomically(self, path: Path, data: bytes) -> None:
        """`path` holds what it held before or `data`, whole, whenever it is read; on return `data`, durably."""
        temporary = path.with_name(temporary_name(path.name))
        self.write_file(temporary, data)
        self.replace(temporary, path)
        self.fsync_dir(path.parent)

    def remove_file(self, path: Path) -> None:
        """`path`, a file or a link, is gone; what a link points to is untouched."""
        path.unlink()

    def remove_tree(self, path: Path) -> None:
        """The folder `path` is gone with all that was in it; links in it are not followed."""
        shutil.rmtree(path)

    def make_dir(self, path: Path) -> None:
        """`path` is a folder, and the names of it and of the parents that were missing are durable."""
        if path.is_dir():
            return
        self.make_dir(path.parent)
        path.mkdir(exist_ok=True)
        self.fsync_dir(path.parent)


def temporary_name(name: str) -> str:
    """Name under which the next contents of the file `name` are written, in the same folder."""
    return f".{name}.tmp"


@functools.cache
def _fallocate() -> Any:
    """The system call, or None. Not os.posix_fallocate: where a file system has none, that one writes to every page."""
    function = getattr(ctypes.CDLL(None, use_errno=True), "fallocate64", None)
    if function is not None:
        function.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
        function.restype = ctypes.c_int
    return function


@functools.cache
def _renameat2() -> Any:
    """The C library's renameat2, or None where it has none (glibc before 2.28, other systems)."""
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is not None:
        function.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
        function.restype = ctypes.c_int
    return function


DISK = Durable()
rename = DISK.rename
replace = DISK.replace
exchange = DISK.exchange
create = DISK.create
allocate = DISK.allocate
write_at = DISK.write_at
set_size = DISK.set_size
fsync_file = DISK.fsync_file
fsync_dir = DISK.fsync_dir
write_file = DISK.write_file
write_atomically = DISK.write_atomically
remove_file = DISK.remove_file
remove_tree = DISK.remove_tree
make_dir = DISK.make_dir
