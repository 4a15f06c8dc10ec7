"""Files of a checkpoint, opened without going anywhere else.

A name in a checkpoint's folder is a regular file in that folder. A symbolic link is not followed, and
what would wait for somebody at its other end (a pipe, a device) is not waited for: both are
`CheckpointUnsafe`. A file that is not there, or that the system refuses, is the system's OSError.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torchtitan_lite.errors import CheckpointUnsafe

_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def is_plain_name(name: str) -> bool:
    """Whether `name` can only be a file of the folder that it is looked up in."""
    return name not in ("", ".", "..") and not any(character in name for character in "/\\\0")


@contextmanager
def opened(path: Path, flags: int = 0) -> Iterator[int]:
    """A descriptor of the regular file `path`, for reading, with the further `flags`; closed at the end."""
    try:
        fd = os.open(path, _FLAGS | flags)
    except OSError as error:
        # ELOOP is a link; what cannot be opened for reading without a peer is no file either (ENXIO: a socket).
        if error.errno in (errno.ELOOP, errno.ENXIO) or path.is_symlink():
            raise CheckpointUnsafe(str(path), _kind(path)) from None
        raise
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise CheckpointUnsafe(str(path), _kind(path))
        yield fd
    finally:
        os.close(fd)


def read_plain(path: Path, limit: int) -> bytes:
    """The bytes of the regular file `path`. Raises `CheckpointUnsafe` if they are more than `limit`."""
    with opened(path) as fd, os.fdopen(fd, "rb", closefd=False) as file:
        size = os.fstat(fd).st_size
        if size > limit:
            raise CheckpointUnsafe(str(path), f"expected at most {limit} bytes, found {size}")
        return file.read(size)


def sizes_of(folder: Path, names: Iterable[str]) -> dict[str, int]:
    """The size in bytes of each file of `names` that is in `folder`. Raises `CheckpointUnsafe` for what is no file."""
    sizes = {}
    for name in names:
        if not is_plain_name(name):
            raise CheckpointUnsafe(str(folder), f"{name!r} is not the name of a file in it")
        try:
            found = (folder / name).lstat()
        except FileNotFoundError:
            continue
        if not stat.S_ISREG(found.st_mode):
            raise CheckpointUnsafe(str(folder / name), _kind(folder / name))
        sizes[name] = found.st_size
    return sizes


def _kind(path: Path) -> str:
    mode = path.lstat().st_mode
    kinds = {
        stat.S_IFLNK: "a symbolic link",
        stat.S_IFIFO: "a pipe",
        stat.S_IFSOCK: "a socket",
        stat.S_IFDIR: "a folder",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
    }
    return f"expected a file, found {kinds.get(stat.S_IFMT(mode), 'something else')}"
