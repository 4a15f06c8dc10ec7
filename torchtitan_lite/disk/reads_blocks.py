"""What reads parts of files, wherever their bytes are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from torchtitan_lite.disk.digest import BLOCK_BYTES, FileRecord
from torchtitan_lite.disk.piece_table import PieceTable
from torchtitan_lite.disk.read_requests import Piece


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
