"""A folder of checkpoints as a report shows it: on a disk, or in an object store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torchtitan_lite.checkpoint.examining.inventory import ListedCheckpoint, inventory
from torchtitan_lite.config.address import is_in_object_store
from torchtitan_lite.errors import TorchtitanLiteError
from torchtitan_lite.log import logger
from torchtitan_lite.store.holder import HolderSeen
from torchtitan_lite.store.place import Place
from torchtitan_lite.store.store import CheckpointStore


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
    return SeenFolder(tuple(inventory(root)), CheckpointStore(root).seen_holder(), root.joinpath)


def _in_store(address: str) -> SeenFolder:
    # Its client is an extra, and takes its time.
    from torchtitan_lite.bucket.store import open_bucket
    from torchtitan_lite.checkpoint.examining.stored_inventory import stored_inventory

    store = open_bucket(address)
    _, entries = stored_inventory(store)
    return SeenFolder(tuple(entries), store.seen_holder(), store.place_of)
