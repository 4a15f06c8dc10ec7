"""Verbs that write into a folder of checkpoints: they hold its lease, as a training job does, or refuse.

While they hold it no job writes there, and the job that holds it now is named in the refusal.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torchtitan_lite.cli.named_checkpoint import (
    IN_DUMP_FOLDER,
    folder_of_checkpoints,
    is_one,
    of_other_libraries,
    refuse_step,
)
from torchtitan_lite.cli.screen import Screen
from torchtitan_lite.config.address import is_address, parse_address
from torchtitan_lite.errors import CheckpointNotFound, ConfigError
from torchtitan_lite.examining.inventory import FolderState, inventory
from torchtitan_lite.examining.opened import WrittenBy
from torchtitan_lite.log import listed
from torchtitan_lite.store import layout
from torchtitan_lite.store.layout import Listing, is_checkpoint
from torchtitan_lite.store.lease import Lease, LeaseClock
from torchtitan_lite.store.protocol import StoresCheckpoints
from torchtitan_lite.store.store import CheckpointStore

_LOOKS_OF_A_LIVE_JOB = 4
"""One each second, and a job renews its lock file every two."""
_TIMEOUT_SECONDS = 30.0


def store_to_write(spelling: str, screen: Screen) -> StoresCheckpoints:
    """Return the store of the folder of checkpoints `spelling`, which may be an address. Raise ConfigError for a step.

    While its lease is waited for, `screen` has a note.
    """
    refuse_step(spelling)
    if not is_address(spelling):
        root = folder_of_checkpoints(spelling)
        if is_checkpoint(root) or (is_one(root) and not of_other_libraries(root)):
            raise ConfigError(f"{spelling} is one checkpoint: name the folder of checkpoints that it is in")
        clock = LeaseClock(_sleep(str(root.absolute()), screen, _LOOKS_OF_A_LIVE_JOB))
        return CheckpointStore(root.absolute(), clock=clock)
    from torchtitan_lite.bucket.bucket_store import open_bucket  # Its client is an extra, and takes its time.

    folder = str(parse_address(spelling))
    return open_bucket(folder, LeaseClock(_sleep(folder, screen, looks=1)))


def refuse_without_checkpoints(store: StoresCheckpoints) -> None:
    """Raise CheckpointNotFound if there is none in the folder that this package manages."""
    if store.committed() or store.damaged() or store.unreadable():
        return
    unmanaged = [folder.name for folder in store.unmanaged()]
    finding = "there is no complete checkpoint in it"
    if unmanaged:
        finding = f"no rule removes what has no manifest: {listed(unmanaged)}"
    raise CheckpointNotFound(store.address, None, finding=finding)


def has_only_others(store: StoresCheckpoints) -> bool:
    """Return whether there are checkpoints in the folder, and all of them are of other libraries: on a disk."""
    if store.root is None or store.committed() or store.damaged() or store.unreadable():
        return False
    foreign = [entry for entry in inventory(store.root) if entry.state is FolderState.FOREIGN]
    return any(entry.origin is not WrittenBy.OURS for entry in foreign)


def recover_with_notes(store: StoresCheckpoints, screen: Screen) -> None:
    """Finish or remove what a crash left, as the start of a job does. The caller holds the lease."""
    for path in store.recover():
        screen.note(f"note: {path.name} is recovered or removed: a job was cut off there")


@contextmanager
def holding(store: StoresCheckpoints, verb: str) -> Iterator[Lease]:
    """Hold the lease of `store` in the block. Raises FolderInUse."""
    lease = store.lease(f"torchtitan-lite {verb}", _TIMEOUT_SECONDS)
    lease.take()
    try:
        yield lease
    finally:
        lease.release()


def _sleep(folder: str, screen: Screen, looks: int) -> Callable[[float], None]:
    """Return what sleeps between two looks at the holder of `folder`, and notes the wait when `looks` were in vain."""
    numbers = itertools.count(1)

    def sleep(seconds: float) -> None:
        # A job on a disk that lives shows it sooner.
        if next(numbers) == looks:
            screen.note(f"note: a silent job has {folder}; waiting up to 30 s to see whether it lives")
        time.sleep(seconds)

    return sleep


# Where a verb may make something new: never in place of checkpoints, nor among their files.


def _has_checkpoints(folder: Path) -> bool:
    """Return whether there are any in `folder`, complete or not."""
    return any(is_checkpoint(places[0]) for places in Listing(folder).places().values())


def new_place(spelling: str, *, is_step: bool) -> Path:
    """Return `spelling`, the argument OUT, as a path.

    Raise ConfigError for an address, and if there are checkpoints in it, or it would be part of one. Unless what is
    made there `is_step`, a checkpoint in our layout or DCP's, it must not have the name of one among others either: a
    job would take it for a save that was cut off.
    """
    if is_address(spelling):
        raise ConfigError(f"OUT {spelling}: expected a folder on disk, found an address")
    out = Path(spelling)
    folders = (folder for folder in (out, out / IN_DUMP_FOLDER) if folder.is_dir())
    there = [f"checkpoints in {folder}" for folder in folders if _has_checkpoints(folder)]
    if there or (out.is_dir() and is_checkpoint(out)):
        found = there[0] if there else "a checkpoint"
        raise ConfigError(f"OUT {out}: expected a new folder, found {found}: name a folder that does not exist yet")
    parent = out.absolute().parent
    if parent.is_dir() and is_checkpoint(parent):
        raise ConfigError(f"OUT {out}: expected a place outside of checkpoints, found the checkpoint {out.parent}")
    if not is_step and layout.parse_step(out.name) is not None and parent.is_dir() and _has_checkpoints(parent):
        raise ConfigError(
            f"OUT {out}: {out.parent} has checkpoints, and a job there would take {out.name} for one: name OUT in "
            "another folder"
        )
    return out
