"""One folder of checkpoints.

`step-N` is a complete checkpoint or absent, for every reader, after any crash: `commit` is the only
door to that name, and the rename in it is the commit. Every method may be cut anywhere; `recover`
finishes or drops what was left. Only names that `layout` spells are ever removed, and what is found
damaged is renamed, never removed. One writer at a time is assumed: `commit` asks before it renames.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from torchtitan_lite import faults
from torchtitan_lite.disk.digest import FileRecord
from torchtitan_lite.disk.durable import DISK, Durable, naming
from torchtitan_lite.disk.plain_file import size_finding
from torchtitan_lite.errors import (
    CheckpointDamaged,
    CheckpointNotFound,
    CheckpointUnreadable,
    SaveFailed,
)
from torchtitan_lite.log import logger, readable_bytes
from torchtitan_lite.store import layout
from torchtitan_lite.store.known_manifests import KnownManifests, describe
from torchtitan_lite.store.lineage import without_abandoned
from torchtitan_lite.store.listing import Listing, is_folder, is_unmanaged
from torchtitan_lite.store.manifest import CheckpointInfo, CheckpointKind, Manifest
from torchtitan_lite.store.retired import RetiredCheckpoints


def free_bytes(folder: Path) -> int:
    """Bytes that may still be written where `folder` is or will be."""
    return shutil.disk_usage(next(place for place in (folder, *folder.absolute().parents) if place.is_dir())).free


@functools.cache
def _lock_of(root: Path) -> AbstractContextManager[bool]:
    """The lock of all stores of this process in one folder."""
    return threading.RLock()


def nothing() -> None:
    """Does nothing."""


class CheckpointStore:
    """The checkpoints in the folder `root`, which need not exist yet. What the disk refuses is raised as OSError."""

    def __init__(
        self,
        root: Path,
        *,
        durable: Durable = DISK,
        free_bytes: Callable[[Path], int] = free_bytes,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.root = Path(root).absolute()  # A save in a thread outlasts a change of the working directory.
        self._durable = durable
        self._free_bytes = free_bytes
        self._manifests = KnownManifests(self.root, now_ns)
        self._retired = RetiredCheckpoints(self.root, durable, self._manifests)

    @property
    def exclusive(self) -> AbstractContextManager[bool]:
        """Held by what renames here: a purge in the background is ordered with commits by it."""
        return _lock_of(self.root)

    @property
    def durable(self) -> Durable:
        """What its files are written with."""
        return self._durable

    def is_in_the_same_place_as(self, other: CheckpointStore) -> bool:
        """Whether both are one folder, however it is spelt."""
        return self.root.resolve() == other.root.resolve()

    def committed(self) -> list[CheckpointInfo]:
        """Every committed checkpoint that none abandons, by ascending step. Raises FormatTooNew for a newer format."""
        return without_abandoned(self.intact())

    def intact(self) -> list[CheckpointInfo]:
        """As `committed`, with those that are abandoned and could not be set aside yet."""
        return self._manifests.intact()

    def unmanaged(self) -> list[Path]:
        """Folders named step-N with a checkpoint's files and no manifest, such as torchtitan's, by ascending step."""
        return [folder for step in Listing(self.root).places() if is_unmanaged(folder := self._final(step))]

    def latest(self, kind: CheckpointKind = CheckpointKind.FULL) -> CheckpointInfo | None:
        """The committed checkpoint of `kind` with the highest step; warns of each damaged one that is passed over."""
        latest = next((info for info in reversed(self.committed()) if info.kind is kind), None)
        for step, places in Listing(self.root).places().items():
            if latest is None or step > latest.step:
                self._warn_of_damage(step, places)
        return latest

    def damaged(self) -> dict[int, CheckpointDamaged]:
        """What is wrong with each step-N whose manifest is damaged, and of which there is no other one, by step."""
        return {step: error for step, error in self._manifests.faults().items() if isinstance(error, CheckpointDamaged)}

    def unreadable(self) -> dict[int, CheckpointUnreadable]:
        """What the system says of each step-N whose manifest it does not give, by step: nothing is known of these."""
        return {
            step: error for step, error in self._manifests.faults().items() if isinstance(error, CheckpointUnreadable)
        }

    def get(self, step: int) -> CheckpointInfo:
        """The committed checkpoint of `step`, unless one abandons it.

        Raises CheckpointNotFound, CheckpointDamaged, CheckpointUnreadable or FormatTooNew.
        """
        info = self._manifests.find(step, Listing(self.root).places().get(step, []))
        committed = self.committed()
        if info is None or info not in committed:
            raise CheckpointNotFound(str(self.root), step, [info.step for info in committed])
        return info

    def check_sizes(self, info: CheckpointInfo) -> list[str]:
        """What is wrong with the sizes of the files of `info`, one sentence each; empty if all are as committed.

        Changes nothing, opens no file but the manifest. Raises FormatTooNew, and CheckpointUnreadable where the machine
        does not answer.
        """
        try:
            sizes = self._manifests.sizes(info)
            findings = [size_finding(info.path / name, size) for name, size in sorted(sizes.items())]
        except CheckpointDamaged as error:
            return [error.finding]
        except OSError as error:
            raise CheckpointUnreadable(str(info.path), f"{type(error).__name__}: {error}") from error
        return [finding for finding in findings if finding]

    def preflight(self, step: int, needed_bytes: int, make_room: Callable[[], object] = nothing) -> None:
        """There is room for a save of `step` that takes `needed_bytes`. Coordinator, while no save is under way.

        Where there is too little, what cut saves left is removed and `make_room` is called. Raises SaveFailed where
        there is too little even so: nothing of the save was begun.
        """
        if self._free_bytes(self.root) < needed_bytes:
            self.recover()
            make_room()
            if (free := self._free_bytes(self.root)) < needed_bytes:
                raise SaveFailed(
                    step,
                    f"{self.root} has room for {readable_bytes(free)}, the last save took "
                    f"{readable_bytes(needed_bytes)}; remove something, or keep fewer with --checkpoint.keep_latest_k",
                )

    def has_room(self, needed_bytes: int) -> bool:
        """Return whether `needed_bytes` may still be written."""
        return self._free_bytes(self.root) >= needed_bytes

    def stage(self, step: int) -> Path:
        """The folder that a save of `step` writes into; it exists, durably. Any rank; idempotent."""
        staging = self._staging(step)
        self._durable.make_dir(staging)
        return staging

    def clear_staging(self, step: int) -> None:
        """The staging folder of `step` holds nothing of an earlier attempt. Coordinator, before any rank writes."""
        with self.exclusive:
            staging = self._superfluous_staging(step)
        if is_folder(staging):
            for path in sorted(staging.iterdir()):
                self._retired.remove(path)
        elif os.path.lexists(staging):
            self._retired.remove(staging)

    def abandon(self, step: int) -> None:
        """The staging folder of `step` is gone. Coordinator, once no rank writes into it."""
        with self.exclusive:
            staging = self._superfluous_staging(step)
        if os.path.lexists(staging):
            self._retired.remove(staging)

    def commit(self, step: int, manifest: Manifest, fence: Callable[[], object] = nothing) -> CheckpointInfo:
        """`step-N` is what was staged, durably. Coordinator only, after every rank has synced its files.

        `fence` raises where the folder is no longer ours to write. It is asked first, and again right before each
        rename that leads to the commit; once it raised, nothing is renamed, and what it raised is raised here.
        Raises SaveFailed where the staged files are not the manifest's, OSError where the disk fails; the checkpoint
        of `step` is then the old one or the new one, whole, and `abandon` may follow (not where `fence` raised: what
        is staged may be another's by then). A replaced checkpoint that cannot be removed after the commit is a warning.
        """
        fence()
        sealed = self._seal(step, manifest)
        self._durable.fsync_dir(self.root)
        faults.point("commit", step=step, path=self._final(step))
        with self.exclusive:
            self._put_in_place(sealed, fence)
            faults.point("committed", step=step, path=self._final(step))
            self._durable.fsync_dir(self.root)
            self._retired.after_commit(step, sealed.lineage.abandons)
        return describe(self._final(step), sealed)

    def delete(self, info: CheckpointInfo) -> None:
        """The checkpoint of `info` is absent for every reader, durably, then its bytes are gone. Coordinator only."""
        with self.exclusive:
            trash = self._retired.discard(info)
        self.empty(trash)

    def discard(self, info: CheckpointInfo) -> list[Path]:
        """Make the checkpoint of `info` absent for every reader, durably. Coordinator only.

        Return what is left of it, for `empty`; nothing if it is another one by now, or gone.
        """
        with self.exclusive:
            if self._manifests.find_intact(info.step, [info.path]) != info:
                return []
            return self._retired.discard(info)

    def empty(self, trash: Sequence[Path]) -> None:
        """Remove the bytes of what was discarded. Coordinator only; beside anything else but `recover`."""
        for path in trash:
            self._retired.remove(path)

    def quarantine(self, step: int, findings: Sequence[str]) -> Path:
        """The damaged checkpoint of `step` has a foreign name, durably, and tells of `findings` if the disk takes it.

        Coordinator only, once every rank has agreed. Returns where it is: nothing reads, counts or removes it there.
        """
        return self._retired.quarantine(step, findings)

    def recover(self) -> list[Path]:
        """Nothing of a cut save or removal is left. Coordinator, before the first load.

        Returns what was put back, by its new name, and what was removed. Unsupported names are untouched.
        """
        return self._retired.recover()

    def _seal(self, step: int, manifest: Manifest) -> Manifest:
        """The staging folder holds the files of the returned manifest, and it, and nothing else, durably."""
        staging = self._staging(step)
        if manifest.step != step:
            raise SaveFailed(step, f"its manifest is of step {manifest.step}")
        if abandoning := [info for info in self.intact() if (step, manifest.lineage.run_id) in info.lineage.abandons]:
            # It would not count from the moment of its commit on.
            raise SaveFailed(step, f"{abandoning[0].path} abandons step {step} of run {manifest.lineage.run_id}")
        for name, record in manifest.files.items():
            if (size := _size(staging / name, step)) != record.size:
                raise SaveFailed(step, f"{staging / name} has {size} bytes, {record.size} were written")
        sealed = dataclasses.replace(manifest, files=manifest.files | self._described(step, manifest))
        for path in sorted(staging.iterdir()):
            if path.name not in sealed.files:
                self._retired.remove(path)
        with naming(staging / layout.METADATA), (staging / layout.METADATA).open("rb") as file:
            self._durable.fsync_file(file.fileno())
        faults.point("manifest", step=step, path=staging / layout.MANIFEST)
        self._durable.write_file(staging / layout.MANIFEST, sealed.to_readable_json())
        faults.point("seal", step=step, path=staging)
        self._durable.fsync_dir(staging)
        return sealed

    def _described(self, step: int, manifest: Manifest) -> dict[str, FileRecord]:
        """The record of DCP's description, from the file where the manifest has no digest of it."""
        if (record := manifest.files.get(layout.METADATA)) is None or not record.blocks:
            path = self._staging(step) / layout.METADATA
            _size(path, step)
            record = FileRecord.of(path.read_bytes())
        return {layout.METADATA: record}

    def _put_in_place(self, sealed: Manifest, fence: Callable[[], object]) -> None:
        """What was staged is called step-N; what was called so is called something else."""
        step = sealed.step
        staging, final = self._staging(step), self._final(step)
        if self._manifests.find_intact(step, [final]) is not None:
            fence()
            # Its manifest goes, and with it the names of what it abandons.
            self._retired.rename_abandoned()
        is_there, there = os.path.lexists(final), self._manifests.find_intact(step, [final])
        keeps_weights = there is not None and _stay_beside(there, sealed)
        fence()
        if there is not None and not keeps_weights and self._durable.exchange(staging, final):
            return
        if is_there:
            if there is not None:
                self._durable.rename(final, Listing(self.root).free_replaced(step))
            else:
                self._retired.move_aside(step)
            # Without this the disk may come to know the second rename and not the first.
            self._durable.fsync_dir(self.root)
            fence()
        self._durable.rename(staging, final)

    def _superfluous_staging(self, step: int) -> Path:
        """The staging folder of `step`; nothing in it, if it is there, is needed."""
        staging = self._staging(step)
        if os.path.lexists(staging):
            # A commit that failed after its exchange left the old checkpoint here: the new one must be durable first,
            # and if it abandons the old one, that is kept.
            self._durable.fsync_dir(self.root)
            self._retired.rename_abandoned()
        return staging

    def _warn_of_damage(self, step: int, places: Sequence[Path]) -> None:
        try:
            self._manifests.find(step, places)
        except (CheckpointDamaged, CheckpointUnreadable) as error:
            logger.warning("passing over step %d: %s", step, error)

    def _final(self, step: int) -> Path:
        return self.root / layout.step_dir(step)

    def _staging(self, step: int) -> Path:
        return self.root / layout.staging_dir(step)


def _stay_beside(there: CheckpointInfo, sealed: Manifest) -> bool:
    """Whether `there` are exported weights in the place of a full checkpoint, and not of a branch that it abandons.

    Not an exchange then: what a crash leaves under the name of a save under way is removed.
    """
    is_abandoned = (there.step, there.run_id) in sealed.lineage.abandons
    return there.kind is CheckpointKind.WEIGHTS_ONLY and sealed.kind is CheckpointKind.FULL and not is_abandoned


def _size(path: Path, step: int) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        raise SaveFailed(step, f"{path} is missing") from None
