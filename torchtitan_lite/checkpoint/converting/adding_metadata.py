"""DCP's `.metadata` for a checkpoint that was saved without.

A kill leaves what was there, and a file under a temporary name, which the next call replaces.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

from torchtitan_lite.checkpoint.reading.derived_metadata import metadata_of
from torchtitan_lite.checkpoint.reading.folder import CheckpointFolder
from torchtitan_lite.disk.durable import DISK, Durable, naming, temporary_name
from torchtitan_lite.disk.folder_lock import locked
from torchtitan_lite.disk.held_folder import HeldFolder, held
from torchtitan_lite.errors import CheckpointNotFound, ConfigError
from torchtitan_lite.store import layout


def add_metadata(folder: Path, durable: Durable = DISK) -> int:
    """Write `.metadata` into the checkpoint in `folder`, durably; return its bytes. A cut leaves it without.

    Raises as `CheckpointFolder.manifest`, CheckpointNotFound if a job removed or replaced the checkpoint meanwhile,
    ConfigError if another process adds the file, and OSError.
    """
    # A job may put another checkpoint into the place of this one, which must not get its file.
    with held(folder) as same:
        parts = metadata_of(CheckpointFolder(folder, "size"))
        first = next(parts)  # It reads the manifest.
        _refuse_if_gone(same)
        try:
            with locked(same.path, wait_seconds=0):
                num_bytes = _write_metadata(same.path, chain([first], parts), durable)
        except BlockingIOError:
            raise ConfigError(f"{folder} gets its {layout.METADATA} by another process: wait for it") from None
        _refuse_if_gone(same)
        return num_bytes


def _refuse_if_gone(same: HeldFolder) -> None:
    if not same.has_its_name():
        raise CheckpointNotFound(str(same.folder), None, finding="it was removed or replaced meanwhile")


def _write_metadata(folder: Path, parts: Iterable[bytes], durable: Durable) -> int:
    temporary = folder / temporary_name(layout.METADATA)
    if os.path.lexists(temporary):
        # Opening it would follow a link that leads out of the folder.
        durable.remove_file(temporary)
    fd, at = durable.create(temporary), 0
    try:
        with naming(temporary):
            for part in parts:
                left = memoryview(part)
                while left:
                    written = durable.write_at(fd, left, at)
                    left, at = left[written:], at + written
            durable.fsync_file(fd)
    except Exception:
        durable.remove_file(temporary)
        raise
    finally:
        os.close(fd)
    durable.replace(temporary, folder / layout.METADATA)
    durable.fsync_dir(folder)
    return at
