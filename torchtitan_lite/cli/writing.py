"""Verbs that write into a folder of checkpoints: they hold its lease, as a training job does, or refuse.

While they hold it no job writes there, and the job that holds it now is named in the refusal.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torchtitan_lite.cli.screen import Screen
from torchtitan_lite.cli.target import folder_of_checkpoints, names_step
from torchtitan_lite.errors import CheckpointNotFound, ConfigError
from torchtitan_lite.store.lease import Lease, LeaseClock
from torchtitan_lite.store.listing import is_checkpoint
from torchtitan_lite.store.store import CheckpointStore

_LOOKS_OF_A_LIVE_JOB = 4
"""One each second, and a job renews its lock file every two."""


def folder_to_write(spelling: str) -> Path:
    """Return the folder of checkpoints `spelling`. Raise ConfigError for a single checkpoint."""
    if names_step(spelling):
        raise ConfigError(
            f"{spelling} is one checkpoint: name the folder of checkpoints, {spelling.rpartition(':')[0]}"
        )
    root = folder_of_checkpoints(spelling)
    if is_checkpoint(root):
        raise ConfigError(f"{spelling} is one checkpoint: name the folder of checkpoints that it is in")
    return root


def refuse_without_checkpoints(store: CheckpointStore) -> None:
    """Raise CheckpointNotFound if there is none in the folder that this package manages."""
    if store.committed() or store.damaged() or store.unreadable():
        return
    unmanaged = [folder.name for folder in store.unmanaged()]
    finding = "there is no complete checkpoint in it"
    if unmanaged:
        has = "has" if len(unmanaged) == 1 else "have"
        names = f"{', '.join(unmanaged[:3])}{' ...' * (len(unmanaged) > 3)}"
        finding = f"{names} {has} no manifest, so no rule removes them"
    raise CheckpointNotFound(str(store.root), None, finding=finding)


def recover(store: CheckpointStore, screen: Screen) -> None:
    """Finish or remove what a crash left, as the start of a job does. The caller holds the lease."""
    for path in store.recover():
        screen.note(f"note: {path.name} is recovered or removed: a job was cut off there")


@contextmanager
def holding(store: CheckpointStore, verb: str, screen: Screen) -> Iterator[Lease]:
    """Hold the lease of `store` in the block. Raises FolderInUse."""
    looks = itertools.count(1)

    def sleep(seconds: float) -> None:
        # A job that lives shows it sooner.
        if next(looks) == _LOOKS_OF_A_LIVE_JOB:
            screen.note(f"note: a silent job has {store.root}; waiting up to 30 s to see whether it lives")
        time.sleep(seconds)

    lease = Lease(store.root, run_id=f"torchtitan-lite {verb}", clock=LeaseClock(sleep))
    lease.take()
    try:
        yield lease
    finally:
        lease.release()
