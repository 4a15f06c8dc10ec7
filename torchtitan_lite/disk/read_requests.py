"""Plan of the reads of a file: the wanted pieces as requests, in the order of the file.

No file is opened here: `ReadsBlocks` is what does that. A request is at most `REQUEST_BYTES` long and does not cross a
multiple of it; in a file with digests it covers whole blocks.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torchtitan_lite.disk.digest import BLOCK_BYTES, FileRecord

# Twice a writer's request: a read gains nothing from smaller ones, and loses where the file is in the page cache.
REQUEST_BYTES = 4 * BLOCK_BYTES
"""The largest read; a whole number of blocks."""
GAP_BYTES = 256 << 10
"""Without digests, a gap of up to this size between two pieces is read, not skipped."""
PORTION_BYTES = BLOCK_BYTES // 2
"""Bytes read and hashed at a time: source and destination fit together into a core's cache."""
_LARGE_COPY = 32 << 10
"""Bytes from which a copy releases the GIL."""
_MANY_PIECES = 32
"""Pieces of one block above which one read and copies are faster than many small reads."""


class TakesBytes(Protocol):
    """Takes bytes to where no processor writes."""

    def copy(self, parts: Sequence[tuple[Any, memoryview]]) -> None:
        """Begin to copy to each `Elsewhere` its bytes, which may change once this returns. Any thread."""


class Elsewhere(Protocol):
    """Memory that no processor writes to, as that of a GPU: its `len` is the number of bytes, its slices are parts."""

    @property
    def ring(self) -> TakesBytes: ...

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> Elsewhere: ...


class Piece(NamedTuple):
    """Some bytes of a file and their destination."""

    at: int
    """Offset of the first byte in the file."""
    into: memoryview | Elsewhere
    """Writable destination; its length is the number of bytes to read."""

    @classmethod
    def of_memory(cls, at: int, address: int, num_bytes: int) -> Piece:
        """Return the piece of `num_bytes` from byte `at` of the file to the memory at `address`.

        The memory must outlive it.
        """
        return cls(at, memoryview((ctypes.c_ubyte * num_bytes).from_address(address)).cast("B"))


class Segment(NamedTuple):
    """One request: bytes [begin, end) of the file, which contain `pieces` and `spans`."""

    begin: int
    end: int
    pieces: list[Piece]
    spans: list[BlockPieces]

    @classmethod
    def of(cls, piece: Piece) -> Segment:
        """Return the request for `piece` and nothing else."""
        return cls(piece.at, piece.at + len(piece.into), [piece], [])


def portions(places: list[memoryview]) -> Iterator[list[memoryview]]:
    """Yield `places`, in order, cut into lists of at most `PORTION_BYTES`."""
    portion: list[memoryview] = []
    room = PORTION_BYTES
    for place in places:
        while len(place) > room:
            yield [*portion, place[:room]]
            place, portion, room = place[room:], [], PORTION_BYTES
        portion.append(place)
        room -= len(place)
    if portion:
        yield portion


def after(places: list[memoryview], done: int) -> list[memoryview]:
    """Return `places` without their first `done` bytes."""
    rest = []
    for place in places:
        skipped = min(done, len(place))
        done -= skipped
        if skipped < len(place):
            rest.append(place[skipped:])
    return rest


def segments(
    pieces: Sequence[Piece], size: int, whole_blocks: bool, table: PieceTable | None = None
) -> Iterator[Segment]:
    """Yield the requests that cover `pieces` and those of `table`, in the order of the file.

    With `whole_blocks`, whole blocks only.
    """
    gap = 0 if whole_blocks else GAP_BYTES
    together: Segment | None = None
    for part in _cut_segments(pieces, table):
        begin, end = part.begin, part.end
        if whole_blocks:
            begin -= begin % BLOCK_BYTES
            # A piece past the end of the file stays so: reading it must fail.
            end = max(end, min(-(-max(end, begin + 1) // BLOCK_BYTES) * BLOCK_BYTES, size))
        if together and begin <= together.end + gap and begin // REQUEST_BYTES == together.begin // REQUEST_BYTES:
            together.pieces.extend(part.pieces)
            together.spans.extend(part.spans)
            together = together._replace(end=max(end, together.end))
            continue
        if together and together.begin < together.end:
            yield together
        together = Segment(begin, end, part.pieces, part.spans)
    if together and together.begin < together.end:
        yield together


def _cut_segments(pieces: Sequence[Piece], table: PieceTable | None) -> list[Segment]:
    """Return `pieces`, cut at multiples of REQUEST_BYTES, and the spans of `table`, in the order of the file."""
    parts, few = [], list(pieces)
    for span in table.spans() if table is not None else ():
        if len(span.begins) <= _MANY_PIECES:
            few += map(Piece.of_memory, *span)
        else:
            parts.append(Segment(span.begins[0], span.end, [], [span]))
    for piece in few:
        parts += map(Segment.of, _cut_piece(piece, REQUEST_BYTES))
    return sorted(parts, key=itemgetter(0))


def _cut_piece(piece: Piece, unit: int) -> Sequence[Piece]:
    """Return `piece` cut at multiples of `unit` in the file."""
    at, into = piece
    if len(into) <= unit - at % unit:
        return (piece,)
    parts, done = [], 0
    while done < len(into):
        part = into[done : done + unit - (at + done) % unit]
        parts.append(Piece(at + done, part))
        done += len(part)
    return parts


def scatter(segment: Segment, begin: int, data: memoryview, address: int | None = None) -> None:
    """Copy to the pieces of `segment` their bytes of `data`, which begins with byte `begin` of the file.

    It is at `address`; None: in memory that has none here, as that of a client's bytes. Any thread.
    """
    if address is None and segment.spans:
        copy = (ctypes.c_char * len(data)).from_buffer_copy(data)
        data, address = memoryview(copy).cast("B"), ctypes.addressof(copy)
    if address is not None:
        for span in segment.spans:
            span.fill(address, begin)
    elsewhere = []
    for at, into in segment.pieces:
        count = len(into)
        if not isinstance(into, memoryview):
            elsewhere.append((into, data[at - begin : at - begin + count]))
        elif address is not None and count >= _LARGE_COPY:
            ctypes.memmove(ctypes.addressof(ctypes.c_char.from_buffer(into)), address + at - begin, count)
        elif count:  # Pieces of no bytes may be in memory that is read-only.
            into[:] = data[at - begin : at - begin + count]
    if elsewhere:
        elsewhere[0][0].ring.copy(elsewhere)


def by_block(segment: Segment) -> Iterator[Segment]:
    """Yield `segment` cut at the block boundaries of the file."""
    if segment.begin // BLOCK_BYTES == (segment.end - 1) // BLOCK_BYTES:
        yield segment
        return
    pieces: dict[int, list[Piece]] = {}
    spans: dict[int, list[BlockPieces]] = {}
    for piece in segment.pieces:
        for part in _cut_piece(piece, BLOCK_BYTES):
            pieces.setdefault(part.at // BLOCK_BYTES, []).append(part)
    for span in segment.spans:
        spans.setdefault(span.begins[0] // BLOCK_BYTES, []).append(span)
    for block in range(segment.begin // BLOCK_BYTES, -(-segment.end // BLOCK_BYTES)):
        begin, end = max(block * BLOCK_BYTES, segment.begin), min((block + 1) * BLOCK_BYTES, segment.end)
        yield Segment(begin, end, pieces.get(block, []), spans.get(block, []))


def pieces_in_order(part: Segment) -> list[tuple[int, memoryview]] | None:
    """Return the pieces of `part` if it pays to read straight into them: few, and without overlap. Else None."""
    if part.spans or len(part.pieces) > _MANY_PIECES:
        return None
    at = part.begin
    pieces = []
    for begin, into in part.pieces:
        if begin < at or not isinstance(into, memoryview):
            return None
        at = begin + len(into)
        if into:
            pieces.append((begin, into))
    return pieces


# Private memory for disk requests.
#
# Requests have private pages, huge ones where the system has them: the disk's driver splits a direct request over a
# thousand scattered small pages into many. Private memory and direct I/O need care where a process forks meanwhile
# (open(2)): a write after the fork would move the page away from under the disk. So a forked child does not get this
# memory at all.


HUGE_PAGE_BYTES = 2 << 20
"""On x86-64, and on arm64 with pages of 4 KiB; elsewhere only the alignment of the memory."""


def request_memory(num_bytes: int) -> memoryview:
    """Return `num_bytes` zero bytes, aligned to a huge page. A forked child must not touch them.

    Pages that are never touched take no memory.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    mapping = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, flags=flags)
    with contextlib.suppress(OSError):  # A kernel without huge pages.
        mapping.madvise(mmap.MADV_DONTFORK)
        # Smaller memory would be rounded up to a huge page.
        if num_bytes >= HUGE_PAGE_BYTES:
            mapping.madvise(mmap.MADV_HUGEPAGE)
    begin = -ctypes.addressof(ctypes.c_char.from_buffer(mapping)) % HUGE_PAGE_BYTES
    return memoryview(mapping)[begin : begin + num_bytes]


# Thousands of small pieces of a file, in columns: no object for each.
#
# A `PieceTable` collects them in any order; its spans are the pieces of one block each, in the order of the file. Their
# bytes are read into a buffer and copied from there. The memory of all pieces must outlive the read.


_copy = ctypes.PyDLL(None).memmove
"""Keeps the GIL: to take it back from other threads after each small copy takes longer than the copy."""
_copy.argtypes, _copy.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t), ctypes.c_void_p


def copy_memory(target: int, source: int, num_bytes: int) -> None:
    """Copy `num_bytes` from the address `source` to the address `target`. Any thread."""
    (ctypes.memmove if num_bytes >= _LARGE_COPY else _copy)(target, source, num_bytes)


class BlockPieces(NamedTuple):
    """Pieces within one block of a file, by ascending begin: columns of equal length."""

    begins: Sequence[int]
    """Offset of the first byte of each in the file."""
    addresses: Sequence[int]
    """Address of the memory for each."""
    counts: Sequence[int]
    """Number of bytes of each, at least 1."""

    @property
    def end(self) -> int:
        """The byte of the file after the last byte of any piece."""
        return max(map(int.__add__, self.begins, self.counts))

    def fill(self, address: int, begin: int) -> None:
        """Copy all pieces from the memory at `address`, which holds the file from byte `begin` on. Any thread."""
        sources = map((address - begin).__add__, self.begins)
        for _ in map(_copy, self.addresses, sources, self.counts):
            pass


@dataclass
class PieceTable:
    """Pieces of one file, in any order."""

    begins: list[int] = field(default_factory=list)
    addresses: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)

    def add(self, begins: Sequence[int], addresses: Sequence[int], count: int) -> None:
        """Add pieces of `count` bytes each, at least 1: from `begins` in the file to `addresses` in memory."""
        self.begins += begins
        self.addresses += addresses
        self.counts += [count] * len(begins)

    def spans(self) -> Iterator[BlockPieces]:
        """Yield the pieces by block, cut where they cross from one block to the next."""
        begins, addresses, counts = self._sorted(*self._cut())
        blocks = [begin // BLOCK_BYTES for begin in begins]
        borders = [number for number, (a, b) in enumerate(pairwise(blocks), 1) if a != b]
        for first, last in pairwise([0, *borders, len(blocks)]):
            if first < last:
                yield BlockPieces(begins[first:last], addresses[first:last], counts[first:last])

    def _cut(self) -> tuple[list[int], list[int], list[int]]:
        """Return the columns with each piece that crosses a border of blocks cut there."""
        columns = self.begins, self.addresses, self.counts
        crossing = [
            number
            for number, (begin, count) in enumerate(zip(self.begins, self.counts, strict=True))
            if begin % BLOCK_BYTES + count > BLOCK_BYTES
        ]
        if not crossing:
            return columns
        begins, addresses, counts = map(list, columns)
        for number in crossing:
            begin, address, count = begins[number], addresses[number], counts[number]
            counts[number] = done = BLOCK_BYTES - begin % BLOCK_BYTES
            while done < count:
                part = min(BLOCK_BYTES, count - done)
                begins.append(begin + done)
                addresses.append(address + done)
                counts.append(part)
                done += part
        return begins, addresses, counts

    @staticmethod
    def _sorted(begins: list[int], addresses: list[int], counts: list[int]) -> tuple[list[int], list[int], list[int]]:
        order = sorted(range(len(begins)), key=begins.__getitem__)
        return [begins[n] for n in order], [addresses[n] for n in order], [counts[n] for n in order]


# What reads parts of files, wherever their bytes are.


class ReadsBlocks(Protocol):
    """Reads parts of files from a disk, a store or memory; all decide by `CheckedFile` what is damaged."""

    def read(
        self, path: Path, record: FileRecord | None, pieces: Sequence[Piece], table: PieceTable | None = None
    ) -> None:
        """Fill each of `pieces`, and those of `table`, with its bytes of `path`, checked if `record` has digests.

        Raises `DamagedRange` if the bytes are proven wrong or missing, `CheckpointUnreadable` for what the disk or the
        store does not give, and `CheckpointUnsafe` if `path` is no regular file.
        """
        ...

    def verify(self, path: Path, record: FileRecord, blocks: Sequence[int]) -> None:
        """Check the digest of each of `blocks`, which ascend. Raises as `read` does."""
        self.read(path, record, [Piece(min(block * BLOCK_BYTES, record.size), memoryview(b"")) for block in blocks])
