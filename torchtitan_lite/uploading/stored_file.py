"""The files of a committed checkpoint, as the contents of other ones: each block is verified before it is sent."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from torchtitan_lite.disk.block_reader import BlockReader
from torchtitan_lite.disk.block_writer import aligned
from torchtitan_lite.disk.digest import BLOCK_BYTES, DIGEST_BYTES, FileRecord, block_digest
from torchtitan_lite.disk.plain_file import opened, sizes_of
from torchtitan_lite.disk.request_memory import request_memory
from torchtitan_lite.errors import CheckpointDamaged
from torchtitan_lite.store.manifest import Manifest
from torchtitan_lite.store.rank_records import RecordedFiles, RecordsOfRanks


class StoredFile:
    """The contents of the file `path`, whose `record` is known; `wait_for` is called with the bytes of each read.

    Reading raises CheckpointDamaged for a block that has another digest, and for a file that is gone or cannot be read:
    an OSError is one of the folder that it goes to.
    """

    request_bytes = 8 * BLOCK_BYTES
    threads = 1

    def __init__(self, path: Path, record: FileRecord, wait_for: Callable[[int], None]) -> None:
        self.num_bytes = record.size
        self.record: FileRecord | None = record
        self._path, self._blocks, self._wait_for = path, record.blocks, wait_for

    def reader(self) -> Callable[[int, int], memoryview]:
        buffer = request_memory(self.request_bytes)

        def read(begin: int, end: int) -> memoryview:
            self._read(buffer[: end - begin], begin)
            return buffer[: aligned(end - begin)]

        return read

    def kept(self, begin: int, end: int) -> memoryview:
        memory = memoryview(bytearray(end - begin))
        self._read(memory, begin)
        return memory

    def _read(self, into: memoryview, begin: int) -> None:
        self._wait_for(len(into))
        try:
            with opened(self._path) as fd:
                done = 0
                while done < len(into):
                    if not (count := os.preadv(fd, [into[done:]], begin + done)):
                        raise self._damage(f"it ends at byte {begin + done}")
                    done += count
                # Read once, and training has better uses for the memory.
                os.posix_fadvise(fd, begin, len(into), os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise self._damage(error.strerror or str(error)) from None
        for at in range(0, len(into) if self._blocks else 0, BLOCK_BYTES):
            digest = (begin + at) // BLOCK_BYTES * DIGEST_BYTES
            if block_digest(into[at : at + BLOCK_BYTES]) != self._blocks[digest : digest + DIGEST_BYTES]:
                raise self._damage(f"bytes {begin + at} to {begin + at + BLOCK_BYTES} do not have their digest")

    def verify(self) -> None:
        """Read all of it. Raises as reading does."""
        for begin in range(0, self.num_bytes, self.request_bytes):
            self.kept(begin, min(begin + self.request_bytes, self.num_bytes))

    def _damage(self, finding: str) -> CheckpointDamaged:
        return CheckpointDamaged(str(self._path.parent), f"{self._path.name}: {finding}")


def committed_files(folder: Path) -> tuple[Manifest, Mapping[str, FileRecord]]:
    """Return the manifest of the checkpoint in `folder` and the record of each file. Raises FileNotFoundError."""
    if (manifest := Manifest.of_folder(folder)) is None:
        raise FileNotFoundError(str(folder))
    records = RecordsOfRanks(
        manifest, str(folder), BlockReader(), lambda name: folder / name, lambda names: sizes_of(folder, names)
    )
    return manifest, RecordedFiles(manifest, records)
