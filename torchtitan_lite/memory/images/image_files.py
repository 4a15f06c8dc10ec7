"""The files of a checkpoint that lie in memory: each is the image of one rank.

There is no manifest in memory: a start puts it together from the cards. A rank may lack the images of other hosts. What
all ranks have alike is small, or is in every image: ranks lend each other these parts of their own files. To read
anything else of another host is damage of this source, so that the load continues with another one.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from torchtitan_lite.disk.digest import num_blocks
from torchtitan_lite.disk.read_requests import Piece, ReadsBlocks
from torchtitan_lite.distributed.host_exchange import ReadsAlike
from torchtitan_lite.memory.images.mapped_reader import MappedReader
from torchtitan_lite.store.manifest import Manifest


class FilesInMemory:
    """The files of `manifest`; `images` has the descriptors of those on this host, which stay the caller's."""

    def __init__(self, manifest: Manifest, images: Mapping[str, int], own: str | None = None) -> None:
        self._manifest = manifest
        self._images = images
        self._own = own
        self._reader = MappedReader(images)

    def manifest(self) -> Manifest | None:
        return self._manifest

    def identity(self) -> tuple[int | str, ...] | None:
        """Return nothing that ever differs: what is held stays."""
        return ()

    def path_of(self, name: str) -> Path:
        return Path(name)

    def sizes_of(self, names: Iterable[str]) -> dict[str, int]:
        """Return the recorded sizes: an arena is longer than the file in it, and the reader checks that it is."""
        return {name: self._manifest.files[name].size for name in names if name in self._manifest.files}

    @contextmanager
    def opened(self, name: str) -> Iterator[int]:
        if name not in self._images:
            raise FileNotFoundError(f"{name} is in the memory of another host")
        fd = os.dup(self._images[name])
        try:
            yield fd
        finally:
            os.close(fd)

    def reader(self, *, cached: bool = False) -> MappedReader:
        return self._reader

    @contextmanager
    def shared_reader(self, own: ReadsBlocks, ranks: ReadsAlike) -> Iterator[ReadsBlocks]:
        """Return `own`: all of it is in memory."""
        yield own

    def share(self, names: Sequence[str], number: int, count: int) -> Sequence[str]:
        """Return the own file of this rank if the images are spread over hosts, else a share of all."""
        if self._own is None:
            return names[number::count]
        return [name for name in names if name == self._own]

    def verify(self, number: int, count: int) -> None:
        """Verify every block of the share of rank `number` of `count`. Raises as `MappedReader.read`."""
        for name in self.share(sorted(self._manifest.files), number, count):
            record = self._manifest.files[name]
            self._reader.verify(Path(name), record, range(num_blocks(record.size)))

    def lend(self, ranges: Mapping[str, Sequence[tuple[int, int]]]) -> dict[str, dict[int, bytes]]:
        """Return, by file and first byte, the bytes of `ranges` (begin, count) in this rank's own file, verified.

        Raises as `MappedReader.read`.
        """
        if self._own is None or self._own not in ranges:
            return {}
        parts = {begin: bytearray(count) for begin, count in ranges[self._own]}
        pieces = [Piece(begin, memoryview(part)) for begin, part in parts.items()]
        self._reader.read(Path(self._own), self._manifest.files[self._own], pieces)
        return {self._own: {begin: bytes(part) for begin, part in parts.items()}}

    def borrow(self, lent: Iterable[Mapping[str, Mapping[int, bytes]]]) -> None:
        """Use what the ranks lend each other for the files that are not on this host."""
        self._reader.borrowed = {name: parts for of_rank in lent for name, parts in of_rank.items()}

    def close(self) -> None:
        """Unmap everything. Idempotent."""
        self._reader.close()
