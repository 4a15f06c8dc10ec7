"""The files of one checkpoint on disk, sent to another folder. Which ones, and when, is decided elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from torchtitan_lite.bucket.s3_parts import parts_of
from torchtitan_lite.bucket.store import BucketStore
from torchtitan_lite.bucket.upload import PART_BYTES, ObjectToUpload
from torchtitan_lite.disk.block_reader import BlockReader
from torchtitan_lite.disk.digest import FileRecord
from torchtitan_lite.disk.plain_file import sizes_of
from torchtitan_lite.store.manifest import Manifest
from torchtitan_lite.store.protocol import StoresCheckpoints
from torchtitan_lite.store.rank_records import RecordedFiles, RecordsOfRanks
from torchtitan_lite.uploading.stored_file import StoredFile


class Sending:
    """Sends files to `target`; `wait_for` is called with the bytes of each read."""

    def __init__(self, target: StoresCheckpoints, wait_for: Callable[[int], None]) -> None:
        self._target, self._wait_for = target, wait_for
        self._parts = parts_of(target.address) if isinstance(target, BucketStore) else None

    def send(self, file: Path, record: FileRecord, place: str) -> None:
        """Send `file` to the upload `place`, durably. Continues what was cut, where the store can."""
        new, source = self._target.new_file(place, file.name), StoredFile(file, record, self._wait_for)
        if self._parts is not None and isinstance(new, ObjectToUpload) and record.size > PART_BYTES:
            self._parts.upload(new.key, source)
        else:
            new.write(source)

    def remove_all_but(self, place: str) -> None:
        """Remove what the store has of files that were cut, except those of the upload `place`; "" for none."""
        if self._parts is not None:
            self._parts.remove_all_but(place)


def committed_files(folder: Path) -> tuple[Manifest, Mapping[str, FileRecord]]:
    """Return the manifest of the checkpoint in `folder` and the record of each file. Raises FileNotFoundError."""
    if (manifest := Manifest.of_folder(folder)) is None:
        raise FileNotFoundError(str(folder))
    records = RecordsOfRanks(
        manifest, str(folder), BlockReader(), lambda name: folder / name, lambda names: sizes_of(folder, names)
    )
    return manifest, RecordedFiles(manifest, records)
