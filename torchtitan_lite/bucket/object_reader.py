"""Parts of objects, read once, checked, and put into their places.

What `BlockReader` promises of a file on disk holds of an object: of each touched block all bytes are digested, from
the memory that they arrived in, before the read returns. A block with a wrong digest is read once more, and only then
reported as damage; what the store does not give is never reported as damage. What ranks of one host read alike each of
them fetches a part of, and gives it to the others. Memory: `THREADS` x `REQUEST_BYTES`, and the ring of an exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from torchtitan_lite import faults
from torchtitan_lite.bucket.objects import Objects
from torchtitan_lite.disk.block_reader import CheckedFile, DamagedRange, run
from torchtitan_lite.disk.digest import BLOCK_BYTES, FileRecord
from torchtitan_lite.disk.piece_table import PieceTable
from torchtitan_lite.disk.read_requests import Piece, Segment, by_block, scatter
from torchtitan_lite.disk.reads_blocks import ReadsBlocks
from torchtitan_lite.distributed.host_exchange import Exchanges
from torchtitan_lite.errors import CheckpointUnreadable

THREADS = 8
"""Requests under way at a time: one connection to a store gives only a part of what the network can."""
REQUEST_BYTES = 8 * BLOCK_BYTES
"""Of one request, about: a request takes as long as some megabytes until its first byte comes."""
GAP_BYTES = BLOCK_BYTES
"""A gap of up to this size between two segments is fetched, not skipped."""

T = TypeVar("T")


class ObjectReader(ReadsBlocks):
    """Reads objects below `prefix`, which were written once; `threads` requests at a time. Any thread.

    `sizes` has those of the objects that are known; the reader adds to them.
    """

    def __init__(
        self,
        objects: Objects,
        prefix: str,
        sizes: dict[str, int] | None = None,
        *,
        threads: int = THREADS,
        exchange: Exchanges | None = None,
    ) -> None:
        self._objects = objects
        self._prefix = prefix
        self._threads = threads
        self._sizes = {} if sizes is None else sizes
        self._exchange = exchange or Exchanges()

    def read(
        self, path: Path, record: FileRecord | None, pieces: Sequence[Piece], table: PieceTable | None = None
    ) -> None:
        """Fill `pieces` from the object with the name of `path`; see `ReadsBlocks`."""
        checked = CheckedFile(path, record, self._size(path))
        requests = list(_together(checked.requests(pieces, table)))
        # What has no digests is not taken from another rank: nothing would show that it is right.
        exchange = self._exchange if checked.blocks else Exchanges()
        first = exchange.reserve(len(requests))
        read = _Object(self._objects, f"{self._prefix}/{path.name}", checked, exchange).read
        run(list(enumerate(requests, first)), lambda: read, self._threads)

    def _size(self, path: Path) -> int:
        name = path.name
        if name not in self._sizes:
            self._sizes[name] = _readable(path, lambda: self._objects.head(f"{self._prefix}/{name}")).size
        return self._sizes[name]


class _Object:
    """One object, with its digests in `checked`."""

    def __init__(self, objects: Objects, key: str, checked: CheckedFile, exchange: Exchanges) -> None:
        self._objects, self._key, self._checked, self._exchange = objects, key, checked, exchange

    def read(self, numbered: tuple[int, Sequence[Segment]]) -> None:
        """Fill the pieces of the segments of a request with its number, which are fetched together. Any thread."""
        number, request = numbered
        begin, end = request[0].begin, max(segment.end for segment in request)
        path, size = self._checked.path, self._checked.size
        if end > size:
            raise DamagedRange(path, size, end, f"the object ends after {size} bytes")
        name = f"{self._key} {begin} {end}"
        try:
            data = self._exchange.take(number, name)
            if data is None:
                data = self._fetch(begin, end)
                self._exchange.offer(number, name, data)
            for segment in request:
                for part in by_block(segment):
                    self._fill(part, data[part.begin - begin : part.end - begin])
        except BaseException:
            # Nothing more is read, and no other rank is to wait for what this one would offer.
            self._exchange.leave()
            raise
        finally:
            self._exchange.release(number)

    def _fill(self, part: Segment, data: memoryview) -> None:
        """Fill the pieces of `part`, which are within one block, from `data`, its bytes; from others if wrong."""
        for begin, end in self._checked.wrong(part.begin, data):
            data = self._fetch(begin, end)
            self._checked.check_again(begin, data)
        scatter(part, part.begin, data)

    def _fetch(self, begin: int, end: int) -> memoryview:
        """Return bytes [begin, end) of the object. Raises `DamagedRange` if it ends before."""
        path = self._checked.path
        faults.point("read", path=path)
        data = _readable(path, lambda: self._objects.get_ranges(self._key, [(begin, end)]))[0]
        if len(data) < end - begin:
            raise DamagedRange(path, begin + len(data), end, "the object ends before them")
        return data


def _readable(path: Path, ask: Callable[[], T]) -> T:
    """Return what `ask` returns about the object at `path`. Raises CheckpointUnreadable."""
    try:
        return ask()
    except OSError as error:
        raise CheckpointUnreadable(str(path), f"{type(error).__name__}: {error.strerror}") from error


def _together(found: Iterable[Segment]) -> Iterator[list[Segment]]:
    """Yield the segments `found`, which ascend, in lists of those that one request fetches."""
    together: list[Segment] = []
    for segment in found:
        near = together and segment.begin <= together[-1].end + GAP_BYTES
        if together and not (near and segment.end - together[0].begin <= REQUEST_BYTES):
            yield together
            together = []
        together.append(segment)
    if together:
        yield together
