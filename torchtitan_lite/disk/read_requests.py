"""Plan of the reads of a file: the wanted pieces as requests, in the order of the file.

Pure functions of pieces and sizes; no file is opened. A request is at most `REQUEST_BYTES` long and does not cross a
multiple of it; in a file with digests it covers whole blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torchtitan_lite.disk.digest import BLOCK_BYTES

REQUEST_BYTES = 4 * BLOCK_BYTES
"""The largest read; a whole number of blocks."""
GAP_BYTES = 256 << 10
"""Without digests, a gap of up to this size between two pieces is read, not skipped."""
PORTION_BYTES = BLOCK_BYTES // 2
"""Bytes read and hashed at a time: source and destination fit together into a core's cache."""
_MANY_PIECES = 32
"""Pieces of one block above which one read and copies are faster than many small reads."""


class Piece(NamedTuple):
    """Some bytes of a file and their destination."""

    at: int
    """Offset of the first byte in the file."""
    into: memoryview
    """Writable destination; its length is the number of bytes to read."""


class Segment(NamedTuple):
    """One request: bytes [begin, end) of the file, which contain `pieces`."""

    begin: int
    end: int
    pieces: list[Piece]


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


def segments(pieces: Sequence[Piece], size: int, whole_blocks: bool) -> Iterator[Segment]:
    """Yield the requests that cover `pieces`, in the order of the file; with `whole_blocks`, whole blocks only."""
    gap = 0 if whole_blocks else GAP_BYTES
    first = last = 0
    together: list[Piece] = []
    for piece in sorted(pieces, key=_at):
        for part in _split(piece, REQUEST_BYTES):
            begin = part.at
            end = begin + len(part.into)
            if whole_blocks:
                begin -= begin % BLOCK_BYTES
                # A piece past the end of the file stays so: reading it must fail.
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


def by_block(segment: Segment) -> Iterator[Segment]:
    """Yield `segment` cut at the block boundaries of the file."""
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
    """Return the pieces of `part` if it pays to read straight into them: few, and without overlap. Else None."""
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
