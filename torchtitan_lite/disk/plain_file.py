"""Files of a checkpoint, opened safely.

A name in a checkpoint's folder must be a regular file in that folder. A symbolic link is not followed, and opening
never blocks on a pipe or a device: both raise `CheckpointUnsafe`. A missing file, or one that the system refuses to
open, raises the OSError of the system.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torchtitan_lite.errors import CheckpointUnsafe

_NAME_BYTES = 255

_USUAL = re.compile(r"\w[\w.-]{0,200}", re.ASCII)
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def is_plain_name(name: str) -> bool:
    """Return whether `name` can only be a file in the folder that it is looked up in."""
    if _USUAL.fullmatch(name):
        return True
    if name in ("", ".", "..") or any(character in name for character in "/\\\0"):
        return False
    try:
        return len(name.encode()) <= _NAME_BYTES
    except UnicodeEncodeError:  # Half a surrogate pair.
        return False


def is_plain_path(path: str) -> bool:
    """Return whether `path` can only be a file in the folder where it is looked up, or in one below, but for links."""
    return all(map(is_plain_name, path.split("/")))


@contextmanager
def opened_plain_file(path: Path, flags: int = 0) -> Iterator[int]:
    """Yield a read-only descriptor of the regular file `path`, opened with the extra `flags`; close it at the end."""
    try:
        fd = os.open(path, _FLAGS | flags)
    except OSError as error:
        # ELOOP is a symbolic link. ENXIO is a socket, which cannot be read as a file.
        if error.errno in (errno.ELOOP, errno.ENXIO) or path.is_symlink():
            raise _not_regular_file(path) from None
        raise
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise _not_regular_file(path)
        yield fd
    finally:
        os.close(fd)


def read_plain(path: Path, limit: int) -> bytes:
    """Return the contents of the regular file `path`. Raise `CheckpointUnsafe` if it has more than `limit` bytes."""
    with opened_plain_file(path) as fd, os.fdopen(fd, "rb", closefd=False) as file:
        size = os.fstat(fd).st_size
        if size > limit:
            raise CheckpointUnsafe(str(path), f"expected at most {limit} bytes, found {size}")
        return file.read(size)


def sizes_of(folder: Path, names: Iterable[str]) -> dict[str, int]:
    """Return the size in bytes of each file of `names`, which may be paths, that exists in `folder`.

    Raises `CheckpointUnsafe` for a name that cannot be a file's, and for what is no regular file.
    """
    sizes = {}
    for name in names:
        if not is_plain_path(name):
            raise CheckpointUnsafe(str(folder), f"{name[:100]!r} is not the name of a file in it")
        for below in [*Path(name).parents][:-1]:
            if (folder / below).is_symlink():
                raise CheckpointUnsafe(str(folder / below), "expected a folder, found a symbolic link")
        try:
            found = (folder / name).lstat()
        except FileNotFoundError:
            continue
        if not stat.S_ISREG(found.st_mode):
            raise _not_regular_file(folder / name)
        sizes[name] = found.st_size
    return sizes


def size_finding(path: Path, expected_bytes: int) -> str:
    """Return what is wrong with the size of the file `path`; an empty string if nothing is."""
    try:
        found = path.lstat()
        if stat.S_ISREG(found.st_mode) and found.st_size == expected_bytes:
            return ""
        # Opening the file makes a network file system ask its server, so that a stale size is not taken for damage.
        with opened_plain_file(path) as fd:
            found_bytes = os.fstat(fd).st_size
    except FileNotFoundError:
        return f"{path.name} is missing"
    except CheckpointUnsafe:
        return f"{path.name} is {file_kind(path)}"
    return "" if found_bytes == expected_bytes else f"{path.name} has {found_bytes} bytes, not {expected_bytes}"


def file_kind(path: Path) -> str:
    """Return what `path` is, in words: "a file", "a symbolic link", "a pipe" ..."""
    mode = path.lstat().st_mode
    kinds = {
        stat.S_IFREG: "a file",
        stat.S_IFLNK: "a symbolic link",
        stat.S_IFIFO: "a pipe",
        stat.S_IFSOCK: "a socket",
        stat.S_IFDIR: "a folder",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
    }
    return kinds.get(stat.S_IFMT(mode), "something else")


def _not_regular_file(path: Path) -> CheckpointUnsafe:
    return CheckpointUnsafe(str(path), f"expected a file, found {file_kind(path)}")
