"""Files that several checkpoints have together, under a name each: what a removal frees.

A file is gone with its last name. The file system counts the names, wherever they are: in checkpoints that were set
aside, in staging folders, in copies that a person made with links. So no count of ours can be wrong after a crash.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from torchtitan_lite.store.listing import Listing, in_order
from torchtitan_lite.store.manifest import CheckpointInfo
from torchtitan_lite.store.place import on_disk

FileId = tuple[int, int]
"""What the names of one file have in common: its device and its inode."""


class SharedFile(NamedTuple):
    """A file that may have several names."""

    nbytes: int
    num_names: int
    """In all folders."""


SharedFiles = Mapping[FileId, SharedFile]


def shared_files(info: CheckpointInfo) -> SharedFiles:
    """Return those files of `info`, a checkpoint on disk, that others may have, too, as far as they can be seen."""
    found: dict[FileId, SharedFile] = {}
    for name in info.still:
        with suppress(OSError):
            status = os.lstat(on_disk(info.path) / name)
            found[status.st_dev, status.st_ino] = SharedFile(status.st_size, status.st_nlink)
    return found


def no_shared_files(info: CheckpointInfo) -> SharedFiles:
    """Return nothing: where checkpoints lie, each has all of its bytes to itself."""
    return {}


class Removal:
    """A removal of checkpoints, one after another, of which `files_of` returns the shared files."""

    def __init__(self, files_of: Callable[[CheckpointInfo], SharedFiles]) -> None:
        self._files_of = files_of
        self._names_left: dict[FileId, int] = {}

    def add(self, info: CheckpointInfo) -> int:
        """Remove `info`, too; return the bytes that become free by that."""
        freed = info.nbytes
        for file, shared in self._files_of(info).items():
            self._names_left[file] = self._names_left.get(file, shared.num_names) - 1
            freed -= shared.nbytes if self._names_left[file] else 0
        return freed


def others_with(path: Path) -> list[str]:
    """Return the names of the other checkpoints in the folder, set aside or not, that have the file `path`, too."""
    try:
        status = os.lstat(path)
    except OSError:
        return []
    if status.st_nlink == 1:
        return []
    found = []
    for name in Listing(path.parent.parent).names:
        with suppress(OSError):  # It may be no checkpoint, or be removed meanwhile.
            other = os.lstat(path.parent.parent / name / path.name)
            if name != path.parent.name and (other.st_dev, other.st_ino) == (status.st_dev, status.st_ino):
                found.append(name)
    return in_order(found)


def shared_bytes(files: SharedFiles) -> int:
    """Return how many bytes of `files` have another name by now: a removal of these names alone does not free them."""
    return sum(shared.nbytes for shared in files.values() if shared.num_names > 1)


def bytes_together(files: Iterable[SharedFiles]) -> int:
    """Return how many bytes the checkpoints that have `files` would take more if each had its own."""
    seen: set[FileId] = set()
    twice = 0
    for of_one in files:
        twice += sum(shared.nbytes for file, shared in of_one.items() if file in seen)
        seen.update(of_one)
    return twice
