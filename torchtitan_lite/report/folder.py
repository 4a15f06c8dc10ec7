"""A folder of checkpoints as a report shows it: on a disk, or in an object store."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torchtitan_lite.checkpoint.examining.inventory import ListedCheckpoint, inventory
from torchtitan_lite.config.address import is_in_object_store
from torchtitan_lite.disk.plain_file import read_plain
from torchtitan_lite.errors import CheckpointUnsafe, TorchtitanLiteError
from torchtitan_lite.log import logger
from torchtitan_lite.report.lines import number
from torchtitan_lite.store import layout
from torchtitan_lite.store.holder import Holder
from torchtitan_lite.store.place import Place

_LOCK_BYTES = 1 << 16


@dataclass(frozen=True)
class HolderSeen:
    """The job in the lock of a folder."""

    holder: Holder | None
    """None if the lock cannot be read."""
    at: float
    """When it last showed that it lives, in Unix seconds."""


@dataclass(frozen=True)
class SeenFolder:
    """What is in a folder of checkpoints; the default is nothing."""

    entries: tuple[ListedCheckpoint, ...] = ()
    lock: HolderSeen | None = None
    place_of: Callable[[str], Place] = Path
    """Returns the place of the entry with a name."""
    was_read: bool = True

    @classmethod
    def of(cls, dump_folder: Path, name: str) -> SeenFolder:
        """Return the folder called `name` in a configuration.

        A store that cannot be read is a warning: what the dump folder has is known without it.
        """
        if not is_in_object_store(name):
            return _on_disk(dump_folder / name)
        try:
            return _in_store(name)
        except (OSError, TorchtitanLiteError) as error:
            logger.warning("The checkpoints in %s are left out: %s", name, error)
            return cls(was_read=False)


def _on_disk(root: Path) -> SeenFolder:
    if not root.is_dir():
        return SeenFolder()
    return SeenFolder(tuple(inventory(root)), _lock(root / layout.LOCK), lambda name: root / name)


def _lock(path: Path) -> HolderSeen | None:
    try:
        lock = read_plain(path, _LOCK_BYTES)
    except (OSError, CheckpointUnsafe):
        return None
    holder = Holder.parse(lock)
    return HolderSeen(holder, 0.0 if holder is None else number(json.loads(lock).get("at")))


def _in_store(address: str) -> SeenFolder:
    # Its client is an extra, and takes its time.
    from torchtitan_lite.bucket.naming import beat_key
    from torchtitan_lite.bucket.store import open_bucket
    from torchtitan_lite.checkpoint.examining.stored_inventory import stored_inventory

    store = open_bucket(address)
    head, entries = stored_inventory(store)
    lock = None
    if head.holder is not None:
        lock = HolderSeen(head.holder, math.inf)
        with suppress(FileNotFoundError):  # It was taken a moment ago.
            lock = HolderSeen(head.holder, store.objects.head(beat_key(head.epoch)).modified)
    return SeenFolder(tuple(entries), lock, store.place_of)
