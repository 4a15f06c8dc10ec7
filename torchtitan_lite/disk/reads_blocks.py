"""What reads parts of files, wherever their bytes are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from torchtitan_lite.disk.digest import FileRecord
from torchtitan_lite.disk.piece_table import PieceTable
from torchtitan_lite.disk.read_requests import Piece


class ReadsBlocks(Protocol):
    """Reads parts of files, as `BlockReader` does."""

    def read(
        self, path: Path, record: FileRecord | None, pieces: Sequence[Piece], table: PieceTable | None = None
    ) -> None: ...

    def verify(self, path: Path, record: FileRecord, blocks: Sequence[int]) -> None: ...
