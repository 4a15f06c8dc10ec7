"""Housekeeping of a folder of checkpoints around the saves: room before a save, no leftovers after it.

**Coordinator only**. Removing is not part of a save: what cannot be removed is a warning. Where training continues
during a save, it continues during a removal, too, in a thread; a save waits for removals only to get room. Renames are
ordered with commits, and each follows a look at the lease; the bytes are removed at any time. This module remembers
which checkpoints are known to be good (this run committed or loaded them), because the latest of them is always kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet

from torchtitan_lite import faults
from torchtitan_lite.config.job_config import Checkpoint
from torchtitan_lite.disk.threads import Background
from torchtitan_lite.errors import CheckpointUnreadable, ConfigError, LeaseLost, PinsUnreadable, SaveFailed
from torchtitan_lite.events import Emit, Purged
from torchtitan_lite.log import in_one_line, logger, readable_bytes
from torchtitan_lite.store.manifest import CheckpointInfo, CheckpointKind, without_abandoned
from torchtitan_lite.store.protocol import StoresCheckpoints
from torchtitan_lite.store.retention import KeepAll, RetentionPolicy, Verdict, judge_checkpoints

_LOOKS = 10
"""Checkpoints, the latest ones, whose files every purge looks at; at the others once a start, which takes a while."""


class Housekeeping:
    """Removes the checkpoints that `retention` does not keep, and leftovers.

    `min_free_bytes`: while the disk has less free, more go, as `judge_checkpoints` says. `now` returns Unix seconds.
    `protected` returns steps that stay whatever the rules say, but not where a save lacks the room.
    """

    def __init__(
        self,
        retention: RetentionPolicy,
        emit: Emit,
        *,
        in_background: bool = False,
        timeout_seconds: float = 60.0,
        min_free_bytes: int = 0,
        now: Callable[[], float] = time.time,
        protected: Callable[[], AbstractSet[int]] = frozenset,
    ) -> None:
        self._retention = retention
        self._emit = emit
        self._known_good: set[int] = set()
        self._num_bytes: dict[tuple[str, CheckpointKind], int] = {}
        """Size of the last checkpoint of each folder and kind."""
        self._background = Background("housekeeping") if in_background else None
        self._timeout_seconds = timeout_seconds
        self._min_free_bytes = min_free_bytes
        self._now = now
        self._protected = protected
        self._warned_of = ""
        self._sound: dict[int, CheckpointInfo] = {}
        """By step, what had files of the right sizes at the last look."""

    def note_good(self, step: int) -> None:
        """Remember that this run committed or loaded the full checkpoint of `step`. **Any rank**."""
        self._known_good.add(step)

    def note_committed(self, info: CheckpointInfo, store: StoresCheckpoints) -> None:
        """Remember that this run committed `info` to `store`."""
        self._num_bytes[store.address, info.kind] = info.nbytes
        if info.kind is CheckpointKind.FULL and info.is_good:
            self.note_good(info.step)

    def make_sure_of_room(self, step: int, kind: CheckpointKind, store: StoresCheckpoints) -> None:
        """Raise SaveFailed unless there is room for as much as the last checkpoint of `kind` took, and LeaseLost."""
        faults.point("preflight", step=step)
        if (store.address, kind) not in self._num_bytes:
            before = [info.nbytes for info in store.committed() if info.kind is kind]
            self._num_bytes[store.address, kind] = before[-1] if before else 0
        needed = self._num_bytes[store.address, kind]
        if store.free_bytes() < needed:
            # Removals under way make room, and are no leftovers of a cut save.
            self.wait(self._timeout_seconds)
        if store.root is not None:
            # First: making room, and then staging, remove what another job's save has staged. In an object store a save
            # writes where no other one does, and this would be a request for which training waits.
            store.check_lease()
        if store.free_bytes() >= needed:
            return
        store.recover()
        # Leftovers of cut saves go before checkpoints: no run needs the former.
        self.purge(store, frozenset)
        store.check_lease()  # It removes nothing once the folder is another job's.
        if (free := store.free_bytes()) < needed:
            raise SaveFailed(
                step,
                f"{store.address} has room for {readable_bytes(free)}, and the last save took {readable_bytes(needed)}"
                "; free some space, or keep fewer checkpoints with --checkpoint.keep_latest_k",
            )

    def purge_when_there_is_time(self, store: StoresCheckpoints) -> None:
        """Purge, before returning, or in the background if saves are made there."""
        if self._background is None:
            self.purge(store)
        else:
            self._background.run(store.address, lambda: self.purge(store))

    def wait(self, seconds: float) -> bool:
        """Return whether the background work ended within `seconds`."""
        return self._background is None or self._background.wait(seconds)

    def close(self, seconds: float) -> None:
        """Stop all renames in the background; wait at most `seconds` for removals that have begun."""
        if self._background is not None and not self._background.close(seconds):
            logger.warning("A checkpoint is still being removed after %.0f s; the next start removes the rest", seconds)

    def purge(self, store: StoresCheckpoints, protected: Callable[[], AbstractSet[int]] | None = None) -> None:
        """Remove the checkpoints that are not kept; nothing if disk, rule or companion fails, or another job has it."""
        if self._retention == KeepAll() and not self._missing_bytes(store):
            return
        try:
            going = [verdict.info for verdict in self.verdicts(store, protected) if verdict.goes]
        except OSError as error:
            logger.warning("Could not list %s to remove what is no longer kept: %s", store.address, error)
        except PinsUnreadable as error:
            self._warn_of(str(error))
        except ConfigError as error:  # The text may name the step: that is no other cause.
            self._warn_of(f"{error} No checkpoint is removed while that is so", type(error.__cause__).__name__)
        except Exception as error:  # Of what accompanies the run.
            self._warn_of(f"No checkpoint is removed, because one may be in use: {in_one_line(error)}")
        else:
            self._warned_of = ""
            self.remove(going, store)

    def verdicts(
        self, store: StoresCheckpoints, protected: Callable[[], AbstractSet[int]] | None = None
    ) -> list[Verdict]:
        """Return what happens to each committed checkpoint now. Changes nothing.

        Raises PinsUnreadable, and OSError if the disk fails.
        """
        good, kept = self._known_good, (protected or self._protected)()
        committed = without_abandoned(store.listed())
        latest = committed[-_LOOKS].step if len(committed) >= _LOOKS else 0
        return judge_checkpoints(
            self._retention,
            committed,
            (good & {max(good, default=-1)}) | kept,
            known_good=good,
            pinned=store.pins.read(),
            now=self._now(),
            missing_bytes=self._missing_bytes(store),
            is_sound=lambda info: (
                (info.step < latest and self._sound.get(info.step) is info) or self._is_sound(info, store)
            ),
        )

    def remove(self, infos: Sequence[CheckpointInfo], store: StoresCheckpoints) -> None:
        """Remove `infos`, but none that was pinned meanwhile. What cannot be removed stays, with a warning."""
        for info in infos:
            if self._background is not None and self._background.is_closed:
                return
            try:
                faults.point("purge", step=info.step)
                trash = store.discard(info)
                # Not under its lock: deleting a checkpoint takes seconds, and a commit waits for that.
                store.empty(trash)
            except LeaseLost:
                return  # The next commit ends the run with this error.
            except PinsUnreadable as error:
                self._warn_of(str(error))
                return
            except OSError as error:
                logger.warning("Could not remove %s, which is no longer kept: %s; it stays", info.path, error)
            else:
                self._sound.pop(info.step, None)
                if trash:
                    if info.kind is CheckpointKind.FULL:
                        self._known_good.discard(info.step)
                    logger.info("Deleted step %d", info.step)
                    self._emit(Purged(info.step, bytes=info.nbytes))

    def remove_failed_save(self, step: int, store: StoresCheckpoints, place: str) -> None:
        """Remove what a failed save left at `place`, unless the folder is another job's; a failure is a warning."""
        try:
            store.remove_staging(step, place)
        except LeaseLost:
            return  # That job's start removes it. The next save ends the run with this error.
        except OSError as error:
            logger.warning("Could not remove what the failed save of step %d left: %s", step, error)

    def _is_sound(self, info: CheckpointInfo, store: StoresCheckpoints) -> bool:
        """Return whether the files of `info` have their sizes."""
        self._sound.pop(info.step, None)
        try:
            if store.check_sizes(info):
                return False
        except CheckpointUnreadable as error:
            unread = "%s could not be read, so retention neither counts nor removes it: %s"
            logger.warning(unread, info.path, error.cause)
            return False
        self._sound[info.step] = info
        return True

    def _missing_bytes(self, store: StoresCheckpoints) -> int:
        return max(0, self._min_free_bytes - store.free_bytes()) if self._min_free_bytes else 0

    def _warn_of(self, finding: str, cause: str = "") -> None:
        # One warning while the cause stays the same, not one for each save.
        if self._warned_of != (cause or finding):
            self._warned_of = cause or finding
            logger.warning("%s", finding)


def build_housekeeping(
    config: Checkpoint,
    retention: RetentionPolicy,
    emit: Emit,
    protected: Callable[[], AbstractSet[int]] = frozenset,
) -> Housekeeping:
    """Return the housekeeping of a run, in the background if saves are."""
    in_background = config.async_mode != "disabled"
    return Housekeeping(
        retention,
        emit,
        in_background=in_background,
        timeout_seconds=config.timeout_seconds,
        min_free_bytes=round(config.min_free_disk_gb * 1e9),
        protected=protected,
    )
