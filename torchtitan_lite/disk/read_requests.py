"""What is read of a file at a time: the pieces that are wanted, as requests in the order of the file.

Pure functions of pieces and sizes; no file is touched. A request is at most `REQUEST_BYTES` long and does not cross a
multiple of it; of a file with digests it covers whole blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torchtitan_lite.disk.digest import BLOCK_BYTES

REQUEST_BYTES = 4 * BLOCK_BYTES
"""The largest read; a whole number of blocks."""
GAP_BYTES = 256 << 10
"""Without digests, a gap between two pieces up to this size is read rather than skipped."""
PORTION_BYTES = BLOCK_BYTES // 2
"""Read and hashed at a time: what is read from and what is read into fit into a core's cache together."""
_MANY_PIECES = 32
"""In one block: so many small reads are slower than one read and a copy."""


class Piece(NamedTuple):
    """Bytes of a file, and where they go."""

    at: int
    """The first byte in the file."""
    into: memoryview
    """Writable bytes; as many are read."""


class Segment(NamedTuple):
    """One request: bytes [begin, end) of the file, of which `pieces` are wanted."""

    begin: int
    end: int
    pieces: list[Piece]


def portions(places: list[memoryview]) -> Iterator[list[memoryview]]:
    """`places`, in order, cut into lists of at most `PORTION_BYTES`."""
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
    """What of `places` comes after the first `done` bytes."""
    rest = []
    for place in places:
        skipped = min(done, len(place))
        done -= skipped
        if skipped < len(place):
            rest.append(place[skipped:])
    return rest


def segments(pieces: Sequence[Piece], size: int, whole_blocks: bool) -> Iterator[Segment]:
    """`pieces` as requests, in the order of the file; with `whole_blocks`, of whole blocks."""
    gap = 0 if whole_blocks else GAP_BYTES
    first = last = 0
    together: list[Piece] = []
    for piece in sorted(pieces, key=_at):
        for part in _split(piece, REQUEST_BYTES):
            begin = part.at
            end = begin + len(part.into)
            if whole_blocks:
                begin -= begin % BLOCK_BYTES
                # Nothing past the end of the file is covered up: reading it is an error.
                end = max(end, min(-(-max(end, begin + 1) // BLOCK_BYTES) * BLOCK_BYTES, size))
            if together and begin <= last + gap and begin // REQUEST_BYTES == first // REQUEST_BYTES:
                together.append(part)
                last = max(end, last)
                continue
            if first < last:
                yield Segment(first, last, together)
            first, last, together = begin, end, [part]
    if first < last:
        yield Segment(first, last, together)


def _split(piece: Piece, unit: int) -> Sequence[Piece]:
    """`piece` cut where the file has multiples of `unit`."""
    at, into = piece
    if len(into) <= unit - at % unit:
        return (piece,)
    parts, done = [], 0
    while done < len(into):
        part = into[done : done + unit - (at + done) % unit]
        parts.append(Piece(at + done, part))
        done += len(part)
    return parts


def by_block(segment: Segment) -> Iterator[Segment]:
    """`segment` cut where blocks of the file begin."""
    if segment.begin // BLOCK_BYTES == (segment.end - 1) // BLOCK_BYTES:
        yield segment
        return
    parts: dict[int, list[Piece]] = {}
    for piece in segment.pieces:
        for part in _split(piece, BLOCK_BYTES):
            parts.setdefault(part.at // BLOCK_BYTES, []).append(part)
    for block in range(segment.begin // BLOCK_BYTES, -(-segment.end // BLOCK_BYTES)):
        begin, end = max(block * BLOCK_BYTES, segment.begin), min((block + 1) * BLOCK_BYTES, segment.end)
        yield Segment(begin, end, parts.get(block, []))


def in_order(part: Segment) -> list[Piece] | None:
    """The pieces of `part` if they can be read straight into their places: few, and none of the same bytes."""
    if len(part.pieces) > _MANY_PIECES:
        return None
    at = part.begin
    for piece in part.pieces:
        if piece.at < at:
            return None
        at = piece.at + len(piece.into)
    return [piece for piece in part.pieces if len(piece.into)]


def _at(piece: Piece) -> int:
    return piece.at
