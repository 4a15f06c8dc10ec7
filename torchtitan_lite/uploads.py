"""The second folder of a run, `upload_folder`: what is uploaded there behind the run, and what a start loads from it.

The coordinator has a process that uploads the files of all ranks, so that no host waits for what another one has to
send; no step and no save waits for it. A start that finds a later step there than on its disk loads it from there.
"""

from __future__ import annotations

import dataclasses
import math
import shlex
import time
import weakref
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path

from torchtitan_lite.checkpoint.context import RunContext
from torchtitan_lite.checkpoint.reading.files import Files
from torchtitan_lite.checkpoint.reading.source import LoadSource, Sources, Wanted
from torchtitan_lite.checkpoint.resume.load_source import choose_source, good_steps, has_full, is_branch_of
from torchtitan_lite.checkpoint.saving.companion import Companion
from torchtitan_lite.errors import (
    AllCheckpointsDamaged,
    CheckpointDamaged,
    CheckpointError,
    CheckpointNotFound,
    CheckpointUnreadable,
    UnknownFormat,
    UploadRefused,
)
from torchtitan_lite.events import Committed, Event, SaveStarted, UploadsEnded
from torchtitan_lite.log import counted, logger, readable_bytes
from torchtitan_lite.store.manifest import CheckpointInfo, CheckpointKind
from torchtitan_lite.store.protocol import StoresCheckpoints
from torchtitan_lite.store.retention import RetentionPolicy
from torchtitan_lite.store.rollbacks import Rollback
from torchtitan_lite.stores import usable
from torchtitan_lite.uploading import record
from torchtitan_lite.uploading.choice import Save, continues, is_of_another_run, missing, not_left, save_of
from torchtitan_lite.uploading.upload_process import UploadProcess
from torchtitan_lite.uploading.uploader import UploadJob

_KEY = "--checkpoint.upload_folder"
_LEAST_STOP_SECONDS = 1.0
"""In which an uploader that answers gives the other folder up."""


class UploadFolder(Companion):
    """The second folder `target`, from which a start loads what its disk lacks."""

    def __init__(self, target: StoresCheckpoints) -> None:
        self._target = target

    def sources(self, others: Sources) -> Sources:
        return UploadedSources(others, self._target)


class Uploads(UploadFolder):
    """Uploads from `source`, the folder `root` of a disk, to `target`."""

    def __init__(
        self,
        source: StoresCheckpoints,
        root: Path,
        target: StoresCheckpoints,
        retention: RetentionPolicy,
        context: RunContext,
    ) -> None:
        super().__init__(target)
        self._source, self._root, self._context = source, root, context
        self._retention = retention
        self._emit = context.emit
        self._process: UploadProcess | None = None

    def protected(self) -> AbstractSet[int]:
        # What is under way. All else that the rules remove here they would remove there, too.
        try:
            begun = record.read(self._root, self._target.address).begun
        except UnknownFormat:  # The uploads have ended for it, and said so.
            return frozenset()
        return frozenset() if begun is None else frozenset({begun.save[0]})

    def hear(self, event: Event) -> None:
        # A save begins in the main thread, where a process that has died is replaced.
        if isinstance(event, Committed | SaveStarted) and self._process is not None:
            self._process.look()

    def start(self, run_id: str) -> None:
        """Start the process that uploads: on the coordinator, unless that is done."""
        if self._process is not None or not self._context.peers.is_coordinator:
            return
        config = self._context.config
        speed, silence = config.upload_max_mb_per_second * 1e6, config.lease_timeout_seconds
        job = UploadJob(self._source.address, self._target.address, run_id, self._retention, speed, silence)
        self._process = UploadProcess(job, self._emit, config.preemption_signals)
        # Of a manager that is dropped without `close`, whose next one could not upload.
        weakref.finalize(self, self._process.close)
        try:
            self._process.start()
        except OSError as error:
            logger.warning("Nothing is uploaded to %s in this start: %s", self._target.address, error)
            self._emit(UploadsEnded(0, path=self._target.address, reason=str(error)))

    def finished(self, run_id: str) -> None:
        self.start(run_id)  # The start before may have left before all was uploaded.

    def leave(self, seconds_left: Callable[[], float]) -> None:
        """Wait for the uploads, while there are `seconds_left` and there is progress, and end what uploads.

        Says what is missing then. Raises `UploadRefused` if nothing can be uploaded any more.
        """
        process, self._process = self._process, None
        if process is None:
            return
        if not process.is_idle and seconds_left() > 0:
            logger.info("Waiting for uploads to %s", self._target.address)
        is_done = process.wait(seconds_left, self._context.config.timeout_seconds)
        state = process.state
        # One that is stopped is not to cost the seconds in which a run leaves for a signal.
        process.close(max(_LEAST_STOP_SECONDS, seconds_left()))
        if is_done and not state.waiting:
            return
        # For a signal the exit code is that of the signal.
        if state.is_refused and seconds_left() == math.inf:
            raise UploadRefused(self._target.address, state.problem)
        self._report_missing(process.stored, state.problem)

    def _report_missing(self, stored: AbstractSet[Save], problem: str) -> None:
        lacking = self._missing(stored)
        size = readable_bytes(sum(info.nbytes for info in lacking))
        logger.warning(
            "Not yet uploaded to %s: %s%s. The next start continues, or run: torchtitan-lite upload %s %s",
            self._target.address,
            f"{counted(len(lacking), 'checkpoint')} ({size})" if lacking else "perhaps the last checkpoints",
            f" ({problem})" if problem else "",
            *map(shlex.quote, (self._source.address, self._target.address)),
        )

    def _missing(self, stored: AbstractSet[Save]) -> list[CheckpointInfo]:
        """Return what the disk has and the target, as far as it was seen, has not; it may not answer any more."""
        try:
            with usable(self._source.address):
                source = self._source.committed()
            known = record.read(self._root, self._target.address).stored.keys() | stored
            pinned = self._source.pins.read()
        except CheckpointError:
            return []
        there = [info for info in source if save_of(info) in known]
        return missing(source, there, self._retention, pinned=pinned, now=time.time())


@dataclass(frozen=True)
class InUploadFolder(LoadSource):
    """A checkpoint that is loaded from the second folder."""

    is_all_there_is: bool = False
    """Whether the disk has no checkpoint of the run."""

    @property
    def origin(self) -> str:
        return "upload_folder"

    @property
    def remark(self) -> str:
        return " The disk of this run has no such step, or a damaged one"


class UploadedSources(Sources):
    """The checkpoints in `target`, and what `inner` offers, which goes first where it is as late."""

    def __init__(self, inner: Sources, target: StoresCheckpoints) -> None:
        self._inner, self._target = inner, target
        self._dropped: set[int] = set()
        self._damaged: dict[int, str] = {}

    def look(self, topology: str) -> None:
        self._inner.look(topology)

    def preferred(self, chosen: LoadSource | None, store: StoresCheckpoints, wanted: Wanted) -> LoadSource | None:
        uploaded = chosen
        if not wanted.is_exact and (wanted.step == -1 or not wanted.config.new_branch):
            uploaded = self._later(chosen, store, wanted)
        in_memory = self._inner.preferred(chosen, store, wanted)
        if uploaded is chosen or in_memory is None or in_memory is chosen or uploaded is None:
            return in_memory if uploaded is chosen else uploaded
        is_of_its_run = in_memory.lineage.run_id == uploaded.lineage.run_id
        if is_of_its_run and in_memory.step >= uploaded.step:
            lineage = dataclasses.replace(in_memory.lineage, rolls_back_to=uploaded.lineage.rolls_back_to)
            return dataclasses.replace(in_memory, lineage=lineage, rollbacks=uploaded.rollbacks)
        return uploaded

    def drop(self, source: LoadSource, error: CheckpointError) -> bool:
        if not isinstance(source, InUploadFolder):
            return self._inner.drop(source, error)
        if source.is_explicit:
            return False  # No other one may take its place.
        # A store that fails to answer makes each of its checkpoints look damaged.
        if isinstance(error, CheckpointUnreadable) and source.is_all_there_is:
            raise error
        logger.warning("Step %d in %s is not used: %s", source.step, self._target.address, error)
        if isinstance(error, CheckpointDamaged):
            self._damaged[source.step] = error.summary
        self._dropped.add(source.step)
        return True

    def opened(self, source: LoadSource, folder: str) -> AbstractContextManager[Files | None]:
        return self._inner.opened(source, folder)

    def close(self) -> None:
        self._inner.close()

    def elsewhere(self, store: StoresCheckpoints, wanted: Wanted) -> LoadSource | None:
        with usable(self._target.address, _KEY):
            if is_of_another_run(store.committed(), self._target.committed()):
                return None
            try:
                source = choose_source(self._target, wanted, self._dropped, store.rollbacks.read())
            except CheckpointNotFound:
                return None
        if source is None or source.initial:
            return None
        return InUploadFolder(**vars(source), is_all_there_is=True)

    def has_checkpoint(self) -> bool:
        with usable(self._target.address, _KEY):
            return has_full(self._target)

    def good_steps(self, rollback: Rollback) -> Sequence[CheckpointInfo]:
        try:
            with usable(self._target.address, _KEY):
                return good_steps(self._target, rollback, self._dropped)
        except CheckpointError as error:
            logger.warning("What is in %s is not known: %s", self._target.address, error)
            return ()

    def _later(self, chosen: LoadSource | None, store: StoresCheckpoints, wanted: Wanted) -> LoadSource | None:
        """Return the latest checkpoint of the target if the run continues from it; else `chosen`.

        Raises `FolderUnusable` where that cannot be known, and `AllCheckpointsDamaged` where there are only damaged
        ones, if the disk has nothing: the run would begin from scratch.
        """
        disk = None if chosen is None or chosen.initial else chosen
        try:
            with usable(self._target.address, _KEY):
                found = self._latest(disk, store, wanted)
        except CheckpointError as error:
            if disk is None:
                raise
            finding = str(error).removesuffix(".")
            logger.warning(
                "What is in %s is not known (%s); continuing with step %d", self._target.address, finding, disk.step
            )
            return chosen
        if found is None and disk is None and self._damaged:
            raise AllCheckpointsDamaged(self._target.address, self._damaged, _KEY)
        return found or chosen

    def _latest(self, disk: LoadSource | None, store: StoresCheckpoints, wanted: Wanted) -> LoadSource | None:
        """Return the latest checkpoint of the target that comes after the choice of the disk; None for none."""
        on_disk, there = store.committed(), self._target.committed()
        if is_of_another_run(on_disk, there):
            return None
        latest = None if disk is None else next((info for info in on_disk if info.step == disk.step), None)
        full = [info for info in not_left(there, [*on_disk, *there]) if info.kind is CheckpointKind.FULL]
        full = [info for info in full if info.step not in self._dropped and not (disk and info.ranks_differ)]
        if wanted.step != -1:
            full = [info for info in full if is_branch_of(info, wanted.step, wanted.config)]
        # Else the disk would begin another branch, or has not all of the one that began there.
        if wanted.step == -1 or disk is None or not disk.is_explicit:
            full = [info for info in full if continues(latest, info)]
        # Where what a rollback has left was brought back on the disk, the branch may still be there.
        rollbacks = store.rollbacks.read()
        left = [each.run_id for each in rollbacks if each.is_left]
        full = [info for info in full if not any(map(info.lineage.is_of, left))]
        kept = {info.step for info in full}
        skipped = self._dropped | {info.step for info in there if info.step not in kept}
        own = dataclasses.replace(wanted, config=dataclasses.replace(wanted.config, initial_load_path=""))
        source = None
        with suppress(CheckpointNotFound):  # What is there is after the step that the run is not to keep.
            source = choose_source(self._target, own, skipped, rollbacks) if full else None
        self._report_damaged(-1 if source is None else source.step, latest)
        return None if source is None else InUploadFolder(**vars(source), is_all_there_is=latest is None)

    def _report_damaged(self, found: int, latest: CheckpointInfo | None) -> None:
        """Warn of damaged checkpoints after step `found`; raise for those of which nothing could be read."""
        begin = max(found, -1 if latest is None else latest.step)
        for step, error in sorted((self._target.damaged() | self._target.unreadable()).items()):
            if step > begin:
                if isinstance(error, CheckpointUnreadable):
                    raise error
                self._damaged[step] = error.summary
                logger.warning("Skipped step %d: %s", step, error)
