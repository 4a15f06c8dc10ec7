"""Ranges of files that are read piece by piece, each block of a file once.

A block with a digest can only be verified as a whole, but the slices of a tensor begin and end within blocks: without
memory, a block would be read for each slice that touches it. So the blocks in which pieces begin and end are
kept, a few for each chunk that is being read, and up to `KEPT_BLOCKS`. All others are read straight into their place.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

from torchtitan_lite.checkpoint.reading.files import files_of
from torchtitan_lite.disk.digest import BLOCK_BYTES, FileRecord
from torchtitan_lite.disk.read_requests import Piece, Segment, scatter
from torchtitan_lite.store.place import Place

KEPT_BLOCKS = 32
"""Blocks in memory at a time, and so the number of chunks side by side in a tensor's rows that are read only once."""


class EachBlockOnce:
    """Reads files of `folder`, verified where `records` has digests. Not for several threads at a time."""

    def __init__(self, folder: Place, records: Mapping[str, FileRecord]) -> None:
        self.files, self._records = files_of(folder), records
        self.direct = self.files.reader()
        """For other reads meanwhile too: it keeps memory for its requests."""
        self._cached = self.files.reader(cached=True)
        self._kept: OrderedDict[tuple[str, int], bytearray] = OrderedDict()

    def read(self, file: str, pieces: Sequence[Piece], *, chunks: int = 1, again: bool = False) -> None:
        """Fill `pieces` with their bytes of `file`. Raises as `BlockReader.read` does.

        `chunks` is how many are read in turn, piece by piece, in all files. `again` reads through the page cache: for
        bytes that are probably read several times.
        """
        path, record = self.files.path_of(file), self._records.get(file)
        blocks = self._cached if again else self.direct
        if record is None or not record.blocks:
            blocks.read(path, record, pieces)
            return
        straight: list[Piece] = []
        edges: list[tuple[int, Piece]] = []
        for piece in pieces:
            _split(piece, record.size, straight, edges)
        missing = {number for number, _ in edges} - {number for name, number in self._kept if name == file}
        fresh = {number: self._room(number, record.size) for number in sorted(missing)}
        straight += [Piece(number * BLOCK_BYTES, memoryview(room)) for number, room in fresh.items()]
        if straight:
            blocks.read(path, record, straight)
        for number, piece in edges:
            block = fresh.get(number) or self._kept[file, number]
            scatter(Segment.of(piece), number * BLOCK_BYTES, memoryview(block))
        self._keep(file, edges, fresh, min(2 * chunks + 2, KEPT_BLOCKS))

    def _room(self, number: int, size: int) -> bytearray:
        return bytearray(min(BLOCK_BYTES, size - number * BLOCK_BYTES))

    def _keep(self, file: str, edges: Sequence[tuple[int, Piece]], fresh: Mapping[int, bytearray], most: int) -> None:
        for number, _ in edges:
            if number in fresh:
                self._kept[file, number] = fresh[number]
            self._kept.move_to_end((file, number))
        while len(self._kept) > most:
            self._kept.popitem(last=False)


def _split(piece: Piece, size: int, straight: list[Piece], edges: list[tuple[int, Piece]]) -> None:
    """Add the whole blocks of `piece` to `straight`, and the parts of others to `edges`, with the block's number."""
    at, into = piece
    if at + len(into) > size:  # Past the end of the file: reading it must fail.
        straight.append(piece)
        return
    while into:
        number, within = divmod(at, BLOCK_BYTES)
        block_bytes = min(BLOCK_BYTES, size - number * BLOCK_BYTES)
        if within == 0 and len(into) >= block_bytes:
            count = len(into) if at + len(into) == size else len(into) // BLOCK_BYTES * BLOCK_BYTES
            straight.append(Piece(at, into[:count]))
        else:
            count = min(block_bytes - within, len(into))
            edges.append((number, Piece(at, into[:count])))
        at, into = at + count, into[count:]
