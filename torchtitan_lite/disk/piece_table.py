"""Thousands of small pieces of a file, in columns: no object for each.

A `PieceTable` collects them in any order; its spans are the pieces of one block each, in the order of the file. Their
bytes are read into a buffer and copied from there. The memory of all pieces must outlive the read.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from torchtitan_lite.disk.digest import BLOCK_BYTES

_copy = ctypes.PyDLL(None).memmove
"""Keeps the GIL: to take it back from other threads after each small copy takes longer than the copy."""
_copy.argtypes, _copy.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t), ctypes.c_void_p


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
