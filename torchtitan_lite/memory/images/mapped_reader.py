"""The files of a checkpoint that lie in memory, each the image of one rank, and what reads parts of them.

There is no manifest in memory: a start puts it together from the cards. A rank may lack the images of other hosts. What
all ranks have alike is small, or is in every image: ranks lend each other these parts of their own files. To read
anything else of another host is damage of this source, so that the load continues with another one.

A file is the first bytes of a memfd, which another process may have written and left behind. It is mapped, not read: a
copy out of the mapping takes two thirds of the time of a read. As in `BlockReader`, all of every touched block is
digested: from its destination, while that is in a core's cache, or from the mapping where a block is copied in many
small pieces. A block with a wrong digest is damage at once: memory gives the same bytes when it is read again.
"""

from __future__ import annotations

import ctypes
import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from torchtitan_lite.disk.block_reader import CheckedFile, DamagedRange
from torchtitan_lite.disk.digest import BlockDigest, FileRecord, block_digest, num_blocks
from torchtitan_lite.disk.read_requests import (
    Piece,
    PieceTable,
    ReadsBlocks,
    Segment,
    by_block,
    copy_memory,
    pieces_in_order,
    scatter,
)
from torchtitan_lite.disk.shared_memory import address_of, map_shared
from torchtitan_lite.disk.threads import in_threads
from torchtitan_lite.distributed.host_exchange import ReadsAlike
from torchtitan_lite.store.manifest import Manifest

THREADS = min(8, max(2, len(os.sched_getaffinity(0)) // 2))
"""Two cores of a small machine copy as fast as its memory does, one takes 1.7 times as long; a large one has more."""
_PORTION_BYTES = 256 << 10
"""Bytes copied and hashed at a time: source and destination fit together into a core's cache."""
ELSEWHERE = "it is in the memory of another host"


class MappedReader(ReadsBlocks):
    """Reads the files of `images`: the descriptor of each by its name. They stay the caller's; `close` unmaps them.

    No process may cut a file while it is read: that would end this one with SIGBUS. Of the other files there may be
    parts in `borrowed`: by file, the first byte of each part and its bytes, which whoever sent them has checked.
    """

    def __init__(self, images: Mapping[str, int], threads: int = THREADS) -> None:
        self._images = dict(images)
        self._threads = threads
        self.borrowed: Mapping[str, Mapping[int, bytes]] = {}
        self._mapped: dict[str, _Mapping] = {}

    def read(
        self, path: Path, record: FileRecord | None, pieces: Sequence[Piece], table: PieceTable | None = None
    ) -> None:
        """Fill `pieces` from the file with the name of `path`; see `ReadsBlocks`."""
        if path.name not in self._images and path.name in self.borrowed:
            _fill_from(self.borrowed[path.name], path, pieces, table)
            return
        mapping = self._mapping(path, record)
        checked = CheckedFile(path, record, len(mapping.view) if record is None else record.size)
        requests = list(checked.requests(pieces, table))
        in_threads(requests, max(1, min(self._threads, len(requests))), lambda: partial(_fill, mapping, checked))

    def close(self) -> None:
        """Unmap all files. Idempotent; no thread may be reading."""
        self._mapped.clear()

    def _mapping(self, path: Path, record: FileRecord | None) -> _Mapping:
        name, expected = path.name, record.size if record is not None else 0
        if name not in self._images:
            raise DamagedRange(path, 0, expected, ELSEWHERE)
        if name not in self._mapped:
            size = os.fstat(self._images[name]).st_size
            if size < expected:
                raise DamagedRange(path, size, expected, f"its memory has {size} bytes")
            memory = map_shared(self._images[name], size)
            self._mapped[name] = _Mapping(memory, address_of(memory), memory.toreadonly())
        return self._mapped[name]


def _fill_from(parts: Mapping[int, bytes], path: Path, pieces: Sequence[Piece], table: PieceTable | None) -> None:
    """Fill `pieces`, and those of `table`, from `parts` of the file. Raises `DamagedRange` for what is in none."""
    begins = sorted(parts)

    def bytes_at(at: int, count: int) -> bytes:
        begin = begins[max(0, bisect_right(begins, at) - 1)] if begins else at
        part = parts.get(begin, b"")
        if not begin <= at or at + count > begin + len(part):
            raise DamagedRange(path, at, at + count, ELSEWHERE)
        return part[at - begin : at - begin + count]

    small = () if table is None else map(Piece.of_memory, table.begins, table.addresses, table.counts)
    for piece in (*pieces, *small):
        if len(piece.into):
            scatter(Segment.of(piece), piece.at, memoryview(bytes_at(piece.at, len(piece.into))))


class _Mapping(NamedTuple):
    """The mapped memory of one descriptor."""

    memory: memoryview
    address: int
    view: memoryview
    """The same, read-only: its pages are shared with the one who wrote them, and no code here writes to them."""


def _fill(mapping: _Mapping, checked: CheckedFile, segment: Segment) -> None:
    """Fill the pieces of `segment` from a mapped file with the digests in `checked`. Any thread."""
    if segment.end > checked.size:
        raise DamagedRange(checked.path, checked.size, segment.end, f"the file ends after {checked.size} bytes")
    for part in by_block(segment):
        pieces = pieces_in_order(part)
        if pieces is not None and checked.blocks:
            checked.check(part.begin, part.end, _placed_and_digested(mapping, part, pieces))
            continue
        if checked.blocks:
            checked.check(part.begin, part.end, block_digest(mapping.view[part.begin : part.end]))
        scatter(part, 0, mapping.memory, mapping.address)


def _placed_and_digested(mapping: _Mapping, part: Segment, pieces: Sequence[tuple[int, memoryview]]) -> bytes:
    """Fill `pieces`, which are in order, and return the digest of all bytes of `part`."""
    digest, view = BlockDigest(), mapping.view
    done = part.begin
    for at, into in pieces:
        if at > done:
            digest.update(view[done:at])
        count = len(into)
        target = ctypes.addressof(ctypes.c_char.from_buffer(into))
        for begin in range(0, count, _PORTION_BYTES):
            end = min(begin + _PORTION_BYTES, count)
            copy_memory(target + begin, mapping.address + at + begin, end - begin)
            digest.update(into[begin:end])
        done = at + count
    if done < part.end:
        digest.update(view[done : part.end])
    return digest.digest()


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
