"""What keeps a folder of checkpoints in order around the saves: room before one, no leavings after it.

Coordinator only, and never at the same time as another save. Removing is no part of a save: what
cannot be removed is a warning. Which checkpoints are known to be good (this run committed or loaded
them) is remembered here, because the newest of these stays whatever the policy says.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from torchtitan_lite import faults
from torchtitan_lite.errors import CheckpointUnreadable
from torchtitan_lite.log import logger
from torchtitan_lite.store.manifest import CheckpointInfo, CheckpointKind
from torchtitan_lite.store.retention import RetentionPolicy, to_purge
from torchtitan_lite.store.store import CheckpointStore


class OnEvent(Protocol):
    """Takes what happened to which step, with its figures; called from any thread."""

    def __call__(self, event: str, step: int, /, **figures: Any) -> None: ...


class Upkeep:
    """Keeps what `retention` says, and what must not go."""

    def __init__(self, retention: RetentionPolicy, on_event: OnEvent) -> None:
        self._retention = retention
        self._on_event = on_event
        self._known_good: set[int] = set()
        self._num_bytes: dict[tuple[Path, CheckpointKind], int] = {}
        """Of the last checkpoint in a folder, of a kind."""

    def note_good(self, step: int) -> None:
        """The full checkpoint of `step` was committed, or loaded, by this run. Any rank."""
        self._known_good.add(step)

    def note_committed(self, info: CheckpointInfo, store: CheckpointStore) -> None:
        """This run committed `info` to `store`."""
        self._num_bytes[store.root, info.kind] = info.nbytes
        if info.kind is CheckpointKind.FULL and not info.has_nan:
            self.note_good(info.step)

    def make_sure_of_room(self, step: int, kind: CheckpointKind, store: CheckpointStore) -> None:
        """There is room for as much as the last checkpoint of `kind` has; raises SaveFailed where there is not."""
        faults.point("preflight", step=step)
        if (store.root, kind) not in self._num_bytes:
            before = [info.nbytes for info in store.committed() if info.kind is kind]
            self._num_bytes[store.root, kind] = before[-1] if before else 0
        store.preflight(step, self._num_bytes[store.root, kind], make_room=lambda: self.purge(store))

    def purge(self, store: CheckpointStore) -> None:
        """Nothing is left that is not kept; nothing is removed where the disk does not answer."""
        try:
            superfluous = self._superfluous(store)
        except OSError as error:
            logger.warning("Could not look through %s for what is no longer kept: %s", store.root, error)
            return
        for info in superfluous:
            faults.point("purge", step=info.step)
            try:
                store.delete(info)
            except OSError as error:
                logger.warning("Could not remove %s, which is no longer kept: %s. It stays.", info.path, error)
            else:
                self._on_event("purged", info.step, bytes=info.nbytes)

    def _superfluous(self, store: CheckpointStore) -> list[CheckpointInfo]:
        good = self._known_good
        return to_purge(
            self._retention,
            store.committed(),
            protected=good & {max(good, default=-1)},
            known_good=good,
            is_sound=lambda info: _is_sound(info, store),
        )

    def abandon(self, step: int, store: CheckpointStore) -> None:
        """Nothing is left of a save that failed."""
        try:
            store.abandon(step)
        except OSError as error:
            logger.warning("Could not remove what the failed save of step %d left: %s", step, error)


def _is_sound(info: CheckpointInfo, store: CheckpointStore) -> bool:
    try:
        return not store.check_sizes(info)
    except CheckpointUnreadable as error:
        logger.warning("%s is not looked at, and neither counted nor removed: %s", info.path, error.cause)
        return False
