"""The files of a checkpoint: on disk, or wherever else their bytes are.

A reader asks for a file by its name only, so that a checkpoint need not be a folder. On disk no symbolic link is
followed, and nothing outside the folder is opened. `files_of` alone knows which kinds of places there are.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import singledispatch
from pathlib import Path
from typing import Protocol

from torchtitan_lite.disk.block_reader import BlockReader
from torchtitan_lite.disk.plain_file import opened_plain_file, size_finding, sizes_of
from torchtitan_lite.disk.read_requests import ReadsBlocks
from torchtitan_lite.distributed.host_exchange import ReadsAlike
from torchtitan_lite.errors import CheckpointDamaged, CheckpointUnsafe
from torchtitan_lite.store import layout
from torchtitan_lite.store.manifest import Manifest
from torchtitan_lite.store.place import ObjectPlace, Place

Identity = tuple[int | str, ...]


def differs(found: Identity | None, known: Identity | None) -> bool:
    """Return whether `found` proves that another checkpoint, or none, is where `known` was: an error proves nothing."""
    return found is None or (found != known and not _is_errno_identity(found) and not _is_errno_identity(known))


def _is_errno_identity(identity: Identity | None) -> bool:
    return identity is not None and len(identity) == 1 and isinstance(identity[0], int)


class Files(Protocol):
    """The files of one checkpoint."""

    def manifest(self) -> Manifest | None:
        """Return our manifest; None in a checkpoint of plain DCP. Raises as `Manifest.of_folder`."""
        ...

    def identity(self) -> Identity | None:
        """Return what differs once another checkpoint has this place; None if there is none any more.

        Where that cannot be known, the code of the error alone: see `differs`.
        """
        ...

    def path_of(self, name: str) -> Path:
        """Return what the reader takes for the file `name`, and messages show."""
        ...

    def sizes_of(self, names: Iterable[str]) -> dict[str, int]:
        """Return the size in bytes of each file of `names` that exists. Raises as `plain_file.sizes_of`."""
        ...

    def opened(self, name: str) -> AbstractContextManager[int]:
        """Open the file `name` for reading, until the end of the block. Raises OSError."""
        ...

    def reader(self, *, cached: bool = False) -> ReadsBlocks:
        """Return what reads the files. `cached`: for bytes that are probably read several times."""
        ...

    def shared_reader(self, own: ReadsBlocks, ranks: ReadsAlike) -> AbstractContextManager[ReadsBlocks]:
        """Return what reads the files in the block, together with `ranks`. **Collective**.

        That is `own`, a `reader` of these files, where no other rank reads the same.
        """
        ...

    def share(self, names: Sequence[str], number: int, count: int) -> Sequence[str]:
        """Return the part of `names` that rank `number` of `count` looks at; the parts are all of them together."""
        ...


class StoredFiles(Files, Protocol):
    """The files of one checkpoint where it was committed. Raises OSError."""

    def absence(self) -> str:
        """Return why there can be no checkpoint, in a few words; an empty string if there may be one."""
        ...

    def damage(self) -> CheckpointDamaged | None:
        """Return what is wrong with the manifest as a record of the commit shows it, where there is one."""
        ...

    @property
    def names(self) -> Collection[str]:
        """The names of all files, described or not, and of what else is there."""
        ...

    def size_finding(self, name: str, expected_bytes: int) -> str:
        """Return what is wrong with the size of the file `name`; an empty string if nothing is."""
        ...

    def sound_bytes(self, name: str, expected_bytes: int) -> int:
        """Return up to which byte the file `name`, which has another size, may be what was saved."""
        ...

    def drop_from_cache(self, names: Iterable[str]) -> None:
        """Have the next reader take the files `names` from where they are kept, not from a copy in memory."""

    def thread_reader(self) -> ReadsBlocks:
        """Return a reader for one of several threads, none of which waits for another one's."""
        ...


class FilesOnDisk:
    """The files in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def manifest(self) -> Manifest | None:
        return Manifest.of_folder(self._folder)

    def identity(self) -> Identity | None:
        try:
            found = (self._folder / layout.MANIFEST).lstat()
        except FileNotFoundError:
            return None
        except OSError as error:
            # ESTALE is what a network file system gives for a file that another host removed; the load meets other
            # errors.
            return None if error.errno == errno.ESTALE else (error.errno or 0,)
        return found.st_dev, found.st_ino, found.st_mtime_ns

    def path_of(self, name: str) -> Path:
        return self._folder / name

    def sizes_of(self, names: Iterable[str]) -> dict[str, int]:
        return sizes_of(self._folder, names)

    def opened(self, name: str) -> AbstractContextManager[int]:
        return opened_plain_file(self._folder / name)

    def reader(self, *, cached: bool = False) -> BlockReader:
        return BlockReader(direct=not cached)

    @contextmanager
    def shared_reader(self, own: ReadsBlocks, ranks: ReadsAlike) -> Iterator[ReadsBlocks]:
        # The page cache gives to all ranks of this host what one has read.
        yield ranks.over_hosts(own, self.reader(cached=True) if ranks.is_shared() else own)

    def share(self, names: Sequence[str], number: int, count: int) -> Sequence[str]:
        return names[number::count]

    def absence(self) -> str:
        if self._folder.is_dir():
            return ""
        return "it is not a folder" if os.path.lexists(self._folder) else "it does not exist"

    def damage(self) -> CheckpointDamaged | None:
        return None

    @property
    def names(self) -> list[str]:
        return [path.name for path in self._folder.iterdir()]

    def size_finding(self, name: str, expected_bytes: int) -> str:
        return size_finding(self._folder / name, expected_bytes)

    def sound_bytes(self, name: str, expected_bytes: int) -> int:
        try:
            found = (self._folder / name).lstat()
        except OSError:
            return 0
        return min(found.st_size, expected_bytes) if stat.S_ISREG(found.st_mode) else 0

    def drop_from_cache(self, names: Iterable[str]) -> None:
        for name in names:
            with suppress(OSError, CheckpointUnsafe, AttributeError), self.opened(name) as fd:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def thread_reader(self) -> BlockReader:
        return BlockReader(threads=1)


@singledispatch
def files_of(place: Place) -> StoredFiles:
    """Return the files of the checkpoint at `place`; opens nothing yet. Any rank.

    Raises `ExtraMissing` for an object store without its client.
    """
    raise TypeError(f"expected the path or address of a checkpoint, found {place!r}")


@files_of.register
def _(place: Path) -> StoredFiles:
    return FilesOnDisk(place)


@files_of.register
def _(place: ObjectPlace) -> StoredFiles:
    from torchtitan_lite.bucket.object_reader import files_at  # Its client is an extra, and takes its time.

    return files_at(place)
