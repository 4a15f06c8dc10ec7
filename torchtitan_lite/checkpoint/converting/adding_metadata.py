"""DCP's `.metadata` for a checkpoint that was saved without."""

from __future__ import annotations

from pathlib import Path

from torchtitan_lite.checkpoint.reading.derived_metadata import metadata_of
from torchtitan_lite.checkpoint.reading.folder import CheckpointFolder
from torchtitan_lite.disk.durable import DISK, temporary_name
from torchtitan_lite.store import layout


def add_metadata(folder: Path) -> int:
    """Write `.metadata` into the checkpoint in `folder`, durably; return its bytes. A cut leaves it without.

    Raises as `CheckpointFolder.manifest`, and OSError.
    """
    path = folder / layout.METADATA
    made = folder / temporary_name(layout.METADATA)
    num_bytes = 0
    with made.open("wb") as file:
        for part in metadata_of(CheckpointFolder(folder, "size")):
            num_bytes += file.write(part)
        file.flush()
        DISK.fsync_file(file.fileno())
    DISK.replace(made, path)
    DISK.fsync_dir(folder)
    return num_bytes
