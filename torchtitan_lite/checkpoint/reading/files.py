"""The files of a checkpoint: on disk, or wherever else their bytes are.

A reader asks for a file by its name only, so that a checkpoint need not be a folder. On disk no symbolic link is
followed, and nothing outside the folder is opened.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

from torchtitan_lite.disk.block_reader import BlockReader
from torchtitan_lite.disk.plain_file import opened, sizes_of
from torchtitan_lite.disk.reads_blocks import ReadsBlocks
from torchtitan_lite.distributed.host_exchange import ReadsAlike
from torchtitan_lite.store import layout
from torchtitan_lite.store.manifest import Manifest
from torchtitan_lite.store.place import Place

Identity = tuple[int | str, ...]


def differs(found: Identity | None, known: Identity | None) -> bool:
    """Return whether `found` proves that another checkpoint, or none, is where `known` was: an error proves nothing."""
    return found is None or (found != known and not _is_error(found) and not _is_error(known))


def _is_error(identity: Identity | None) -> bool:
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
        return opened(self._folder / name)

    def reader(self, *, cached: bool = False) -> BlockReader:
        return BlockReader(direct=not cached)

    @contextmanager
    def shared_reader(self, own: ReadsBlocks, ranks: ReadsAlike) -> Iterator[ReadsBlocks]:
        # The page cache gives to all ranks of this host what one has read.
        yield ranks.over_hosts(own, self.reader(cached=True) if ranks.is_shared() else own)

    def share(self, names: Sequence[str], number: int, count: int) -> Sequence[str]:
        return names[number::count]


def files_of(place: Place) -> Files:
    """Return the files of the checkpoint at `place`; opens nothing yet. Any rank.

    Raises `ExtraMissing` for an object store without its client.
    """
    if isinstance(place, Path):
        return FilesOnDisk(place)
    from torchtitan_lite.bucket.reader import files_at  # Its client is an extra, and takes its time.

    return files_at(place)
