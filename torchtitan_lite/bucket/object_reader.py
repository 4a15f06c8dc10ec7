"""Parts of objects, read once, checked, and put into their places.

What `BlockReader` promises of a file on disk holds of an object: of each touched block all bytes are digested, from
the memory that they arrived in, before the read returns. A block with a wrong digest is read once more, and only then
reported as damage; what the store does not give is never reported as damage. What ranks of one host read alike each of
them fetches a part of, and gives it to the others. Memory: `THREADS` x `REQUEST_BYTES`, and the ring of an exchange.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from torchtitan_lite import faults
from torchtitan_lite.bucket.objects import Objects
from torchtitan_lite.disk.block_reader import DamagedRange
from torchtitan_lite.disk.digest import BLOCK_BYTES, DIGEST_BYTES, FileRecord, block_digest
from torchtitan_lite.disk.in_threads import in_threads
from torchtitan_lite.disk.piece_table import PieceTable
from torchtitan_lite.disk.read_requests import Piece, Segment, by_block, on_host, segments
from torchtitan_lite.distributed.host_exchange import Alone, Exchanges
from torchtitan_lite.errors import CheckpointUnreadable
from torchtitan_lite.log import logger

THREADS = 8
"""Requests under way at a time: one connection to a store gives only a part of what the network can."""
REQUEST_BYTES = 8 * BLOCK_BYTES
"""Of one request, about: a request takes as long as some megabytes until its first byte comes."""
GAP_BYTES = BLOCK_BYTES
"""A gap of up to this size between two segments is fetched, not skipped."""

T = TypeVar("T")


class ObjectReader:
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
        self._exchange = exchange or Alone()

    def read(
        self, path: Path, record: FileRecord | None, pieces: Sequence[Piece], table: PieceTable | None = None
    ) -> None:
        """Fill each of `pieces`, and those of `table`, with its bytes of the object with the name of `path`.

        They are checked if `record` has digests. Raises `DamagedRange` if the bytes are proven wrong or missing, and
        `CheckpointUnreadable` for what the store does not give.
        """
        size, blocks = self._size(path), record.blocks if record is not None else b""
        if record is not None and size != record.size:
            raise DamagedRange(path, min(size, record.size), record.size, f"it has {size} bytes")
        requests = list(_together(segments(pieces, size, bool(blocks), table)))
        # What has no digests is not taken from another rank: nothing would show that it is right.
        exchange = self._exchange if blocks else Alone()
        first = exchange.reserve(len(requests))
        read = _Object(self._objects, f"{self._prefix}/{path.name}", path, size, blocks, exchange).read
        _run(list(enumerate(requests, first)), read, min(self._threads, len(requests)))

    def verify(self, path: Path, record: FileRecord, blocks: Sequence[int]) -> None:
        """Check the digest of each of `blocks`, which ascend. Raises as `read` does."""
        self.read(path, record, [Piece(min(block * BLOCK_BYTES, record.size), memoryview(b"")) for block in blocks])

    def _size(self, path: Path) -> int:
        name = path.name
        if name not in self._sizes:
            self._sizes[name] = _readable(path, lambda: self._objects.head(f"{self._prefix}/{name}")).size
        return self._sizes[name]


class _Object:
    """One object of `size` bytes, whose digests are `blocks`; without digests nothing is checked."""

    def __init__(self, objects: Objects, key: str, path: Path, size: int, blocks: bytes, exchange: Exchanges) -> None:
        self._objects, self._key, self._path, self._size, self._blocks = objects, key, path, size, blocks
        self._exchange = exchange

    def read(self, numbered: tuple[int, Sequence[Segment]]) -> None:
        """Fill the pieces of the segments of a request with its number, which are fetched together. Any thread."""
        number, request = numbered
        begin, end = request[0].begin, max(segment.end for segment in request)
        if end > self._size:
            raise DamagedRange(self._path, self._size, end, f"the object ends after {self._size} bytes")
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
        expected = self._digest_of(part)
        if expected and block_digest(data) != expected:
            data = self._fetch(part.begin, part.end)
            found = block_digest(data)
            if found != expected:
                finding = f"expected a block with the digest {expected.hex()}, found {found.hex()}, twice"
                raise DamagedRange(self._path, part.begin, part.end, finding)
            logger.warning("%s: bytes %d to %d were right only when read again", self._path, part.begin, part.end)
        _scatter(part, data)

    def _digest_of(self, part: Segment) -> bytes:
        at = part.begin // BLOCK_BYTES * DIGEST_BYTES
        return self._blocks[at : at + DIGEST_BYTES]

    def _fetch(self, begin: int, end: int) -> memoryview:
        """Return bytes [begin, end) of the object. Raises `DamagedRange` if it ends before."""
        faults.point("read", path=self._path)
        data = _readable(self._path, lambda: self._objects.get_ranges(self._key, [(begin, end)]))[0]
        if len(data) < end - begin:
            raise DamagedRange(self._path, begin + len(data), end, "the object ends before them")
        return data


def _readable(path: Path, ask: Callable[[], T]) -> T:
    """Return what `ask` returns about the object at `path`. Raises CheckpointUnreadable."""
    try:
        return ask()
    except OSError as error:
        raise CheckpointUnreadable(str(path), f"{type(error).__name__}: {error.strerror}") from error


def _scatter(part: Segment, data: memoryview) -> None:
    """Copy to the pieces of `part` their bytes of `data`, which are those of `part`."""
    for at, into in on_host(part.pieces, part.begin, data):
        if into:  # `verify` has pieces of no bytes, in memory that is read-only.
            into[:] = data[at - part.begin : at - part.begin + len(into)]
    if part.spans:
        # A copy, because the memory of the client's bytes has no address here.
        block = (ctypes.c_char * len(data)).from_buffer_copy(data)
        for span in part.spans:
            span.fill(ctypes.addressof(block), part.begin)


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


def _run(requests: Sequence[T], read: Callable[[T], None], threads: int) -> None:
    """Call `read` with each of `requests`, in several threads; raise the worst of their errors.

    An error of the store outweighs damage, which may be another symptom of the same failure.
    """
    failures: list[Exception] = []

    def work(request: T) -> None:
        try:
            if not failures:
                read(request)
        except Exception as error:
            failures.append(error)

    in_threads(requests, max(1, threads), lambda: work)
    if failures:
        raise next((error for error in failures if not isinstance(error, DamagedRange)), failures[0])
