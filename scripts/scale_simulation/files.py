"""The files of a simulated checkpoint: of any number of ranks, with a manifest and records, without tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from torchtitan_lite.disk.digest import DIGEST_BYTES, FileRecord, num_blocks
from torchtitan_lite.disk.read_requests import Piece
from torchtitan_lite.store.manifest import Manifest
from torchtitan_lite.store.rank_records import RankRecord


def record_of_rank(size: int) -> bytes:
    """Return the record of a rank whose file has `size` bytes, with nothing of its own."""
    return RankRecord(bytes(DIGEST_BYTES * num_blocks(size))).to_json()


class SimulatedFiles:
    """The files of the checkpoint with the bytes `manifest`: all that a `CheckpointFolder` asks for."""

    def __init__(self, manifest: bytes, record: bytes, file_bytes: int) -> None:
        self._bytes, self._record, self._file_bytes = manifest, record, file_bytes

    def manifest(self) -> Manifest:
        return Manifest.parse(self._bytes)

    def path_of(self, name: str) -> Path:
        return Path(name)

    def sizes_of(self, names: Iterable[str]) -> dict[str, int]:
        return {name: len(self._record) if name.endswith(".json") else self._file_bytes for name in names}

    def share(self, names: Sequence[str], number: int, count: int) -> Sequence[str]:
        return names[number::count]

    def reader(self) -> SimulatedFiles:
        return self

    def read(self, path: Path, record: FileRecord | None, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            piece.into[:] = self._record
