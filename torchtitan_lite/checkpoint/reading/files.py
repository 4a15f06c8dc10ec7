"""The files of a checkpoint: on disk, or wherever else their bytes are.

A reader asks for a file by its name only, so that a checkpoint need not be a folder. On disk no symbolic link is
followed, and nothing outside the folder is opened.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from torchtitan_lite.disk.block_reader import BlockReader
from torchtitan_lite.disk.digest import FileRecord
from torchtitan_lite.disk.piece_table import PieceTable
from torchtitan_lite.disk.plain_file import opened, sizes_of
from torchtitan_lite.disk.read_requests import Piece
from torchtitan_lite.store.manifest import Manifest


class ReadsBlocks(Protocol):
    """Reads parts of files, as `BlockReader` does."""

    def read(
        self, path: Path, record: FileRecord | None, pieces: Sequence[Piece], table: PieceTable | None = None
    ) -> None: ...

    def verify(self, path: Path, record: FileRecord, blocks: Sequence[int]) -> None: ...


class Files(Protocol):
    """The files of one checkpoint."""

    def manifest(self) -> Manifest | None:
        """Return our manifest; None in a checkpoint of plain DCP. Raises as `Manifest.of_folder`."""
        ...

    def sizes_of(self, names: Iterable[str]) -> dict[str, int]:
        """Return the size in bytes of each file of `names` that exists. Raises as `plain_file.sizes_of`."""
        ...

    def opened(self, name: str) -> AbstractContextManager[int]:
        """Open the file `name` for reading, until the end of the block. Raises OSError."""
        ...

    def reader(self) -> ReadsBlocks:
        """Return what reads the files."""
        ...

    def share(self, names: Sequence[str], number: int, count: int) -> Sequence[str]:
        """Return the part of `names` that rank `number` of `count` looks at; the parts are all of them together."""
        ...


class FilesOnDisk:
    """The files in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def manifest(self) -> Manifest | None:
        return Manifest.of_folder(self._folder)

    def sizes_of(self, names: Iterable[str]) -> dict[str, int]:
        return sizes_of(self._folder, names)

    def opened(self, name: str) -> AbstractContextManager[int]:
        return opened(self._folder / name)

    def reader(self) -> ReadsBlocks:
        return BlockReader()

    def share(self, names: Sequence[str], number: int, count: int) -> Sequence[str]:
        return names[number::count]
