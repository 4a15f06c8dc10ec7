"""Ranges of a file, and memory to read them into, for the tests of what reads files in pieces."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Collection, Sequence
from pathlib import Path

from hypothesis import strategies as st

from torchtitan_lite.disk.digest import BLOCK_BYTES
from torchtitan_lite.disk.read_requests import REQUEST_BYTES, Piece, PieceTable

SIZE = 2 * REQUEST_BYTES + BLOCK_BYTES + 12345
"""Of a file, in bytes: three requests, the last one short."""

Ranges = list[tuple[int, int]]
"""Where each begins, and how many bytes it has."""


def forget(path: Path) -> None:
    """Drop `path`, which is synced, from the page cache."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


class Far:
    """Memory that only a ring writes to."""

    def __init__(self, memory: memoryview) -> None:
        self.ring, self.memory = self, memory

    def __len__(self) -> int:
        return len(self.memory)

    def __getitem__(self, part: slice) -> Far:
        return Far(self.memory[part])

    def __eq__(self, other: object) -> bool:
        return self.memory == other

    __hash__ = None  # type: ignore[assignment]  # its bytes change

    @staticmethod
    def copy(parts: Sequence[tuple[Far, memoryview]]) -> None:
        for place, data in parts:
            place.memory[:] = data


def pieces_of(ranges: Ranges, far: Collection[int] = ()) -> list[Piece]:
    """Return pieces of `ranges`, those with numbers in `far` with places that only a ring writes to."""
    rooms = [memoryview(bytearray(count)) for _, count in ranges]
    return [
        Piece(at, Far(room) if n in far else room) for n, ((at, _), room) in enumerate(zip(ranges, rooms, strict=True))
    ]


@st.composite
def ranges(draw: st.DrawFn) -> Ranges:
    """Short and long pieces, adjacent ones, and ones that overlap."""
    found = []
    for _ in range(draw(st.integers(0, 12))):
        near = draw(st.sampled_from([0, BLOCK_BYTES, REQUEST_BYTES, 2 * REQUEST_BYTES, SIZE, SIZE // 2]))
        at = min(max(0, near + draw(st.integers(-5000, 5000))), SIZE)
        count = draw(st.integers(0, 100) | st.integers(0, 3 * BLOCK_BYTES))
        found.append((at, min(count, SIZE - at)))
    if draw(st.booleans()):
        at = draw(st.integers(0, SIZE - 100_000))
        step = draw(st.sampled_from([100, 101, 1000]))
        found += [(at + i * step, 100) for i in range(draw(st.integers(0, 99)))]
    return found


def far() -> st.SearchStrategy[set[int]]:
    """Which ranges are elsewhere: none, some or all."""
    return st.just(set[int]()) | st.sets(st.integers(0, 12)) | st.just(set(range(200)))


class Room:
    """Memory for ranges of a file, one after another, with a byte between them that no read may change."""

    def __init__(self, ranges: Ranges) -> None:
        self.ranges = ranges
        self.memory = bytearray(b"\xee" * sum(count + 1 for _, count in ranges))
        self.table = PieceTable()
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory)) if ranges else 0
        for begin, count in ranges:
            self.table.add([begin], [address], count)
            address += count + 1

    def expected(self, data: bytes) -> bytes:
        return b"".join(data[begin : begin + count] + b"\xee" for begin, count in self.ranges)


def dense(first: int, count: int, step: int = 5000, num_bytes: int = 4096) -> Ranges:
    """Return `count` ranges of `num_bytes`, `step` bytes apart, from `first` on."""
    return [(first + step * number, num_bytes) for number in range(count)]
