"""Files of a checkpoint, opened without going anywhere else.

A name in a checkpoint's folder is a regular file in that folder. A symbolic link is not followed, and
what would wait for somebody at its other end (a pipe, a device) is not waited for: both are
`CheckpointUnsafe`. A file that is not there, or that the system refuses, is the system's OSError.

What describes a checkpoint (`manifest.json`, `.metadata`) is read only where it is no larger than the
data beside it can need, so that what it takes to read is bounded by what the folder holds.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torchtitan_lite.errors import CheckpointUnsafe
from torchtitan_lite.store import layout

DESCRIPTION_BYTES = 512 << 10
"""Of `manifest.json` or `.metadata`, whatever the data. In memory JSON takes up to 30 times as much, a pickle 72."""
DESCRIPTION_RATIO = 4
"""Further bytes of these for each byte of data. A chunk takes 60 to 160 bytes of a manifest, and its item in a rank's
file 700 at least, before its first element; with long names, scalars alone take 0.5 here and 0.9 in DCP's metadata."""
DESCRIPTION_MOST_BYTES = 16 << 30
"""Of these, whatever the data: of 100,000 tensors in 1,000 shards each a manifest has 6 GiB."""
_NAME_BYTES = 255
_DESCRIBES = frozenset({layout.MANIFEST, layout.METADATA, layout.FINDINGS})

_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def is_plain_name(name: str) -> bool:
    """Whether `name` can be the name of a file, and only of one in the folder that it is looked up in."""
    if name in ("", ".", "..") or any(character in name for character in "/\\\0"):
        return False
    try:
        return len(name.encode()) <= _NAME_BYTES
    except UnicodeEncodeError:  # Half a surrogate pair.
        return False


@contextmanager
def opened(path: Path, flags: int = 0) -> Iterator[int]:
    """A descriptor of the regular file `path`, for reading, with the further `flags`; closed at the end."""
    try:
        fd = os.open(path, _FLAGS | flags)
    except OSError as error:
        # ELOOP is a link; what cannot be opened for reading without a peer is no file either (ENXIO: a socket).
        if error.errno in (errno.ELOOP, errno.ENXIO) or path.is_symlink():
            raise _refusal(path) from None
        raise
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise _refusal(path)
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


def sizes_of(folder: Path, names: Iterable[str]) -> dict[str, int]:
    """The size in bytes of each file of `names` that is in `folder`. Raises `CheckpointUnsafe` for what is no file."""
    sizes = {}
    for name in names:
        if not is_plain_name(name):
            raise CheckpointUnsafe(str(folder), f"{name[:100]!r} is not the name of a file in it")
        try:
            found = (folder / name).lstat()
        except FileNotFoundError:
            continue
        if not stat.S_ISREG(found.st_mode):
            raise _refusal(folder / name)
        sizes[name] = found.st_size
    return sizes


def size_finding(path: Path, expected_bytes: int) -> str:
    """What is wrong with the size of the file `path`; empty if nothing is."""
    try:
        found = path.lstat()
        if stat.S_ISREG(found.st_mode) and found.st_size == expected_bytes:
            return ""
        # Opening it makes a network filesystem look again, so that a size of before is not taken for damage.
        with opened(path) as fd:
            found_bytes = os.fstat(fd).st_size
    except FileNotFoundError:
        return f"{path.name} is missing"
    except CheckpointUnsafe:
        return f"{path.name} is {kind_of(path)}"
    return "" if found_bytes == expected_bytes else f"{path.name} has {found_bytes} bytes, not {expected_bytes}"


def kind_of(path: Path) -> str:
    """What there is in the place of the file `path`."""
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


def _refusal(path: Path) -> CheckpointUnsafe:
    return CheckpointUnsafe(str(path), f"expected a file, found {kind_of(path)}")
