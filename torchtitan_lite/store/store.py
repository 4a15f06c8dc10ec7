"""One folder of checkpoints.

For every reader and after any crash, `step-N` is a complete checkpoint or absent: for a new one `commit` is the only
door to that name, and the rename in it is the commit. Every method may be cut anywhere; `recover` finishes or removes
what was left. Only names that `layout` spells are ever removed; a damaged checkpoint is renamed, never removed. There
must be only one writer at a time, so `commit` checks the lease before the renames that decide.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

from torchtitan_lite import faults
from torchtitan_lite.disk.block_writer import LOOK_SECONDS, NewFileOnDisk
from torchtitan_lite.disk.digest import FileRecord
from torchtitan_lite.disk.durable import DISK, Durable, naming
from torchtitan_lite.disk.plain_file import read_plain, sizes_of
from torchtitan_lite.errors import (
    CheckpointDamaged,
    CheckpointNotFound,
    CheckpointUnreadable,
    CheckpointUnsafe,
    SaveFailed,
)
from torchtitan_lite.log import logger
from torchtitan_lite.store import layout
from torchtitan_lite.store.holder import HolderSeen
from torchtitan_lite.store.known_manifests import KnownManifests
from torchtitan_lite.store.layout import Listing, is_folder, is_unmanaged
from torchtitan_lite.store.lease import FolderLease, LeaseClock, process_lock
from torchtitan_lite.store.manifest import CheckpointInfo, CheckpointKind, Manifest
from torchtitan_lite.store.manifest_fields import DCP_METADATA
from torchtitan_lite.store.pins import Pins
from torchtitan_lite.store.place import on_disk
from torchtitan_lite.store.protocol import Shelf, StoresCheckpoints
from torchtitan_lite.store.retired import RetiredCheckpoints
from torchtitan_lite.store.rollbacks import RollbackRecord


def free_disk_bytes(folder: Path) -> int:
    """Return the bytes that may still be written on the disk of `folder`, which need not exist yet.

    A file system that says 0 of 0 does not know its size: what it has room for shows when it is written to.
    """
    usage = shutil.disk_usage(next(place for place in (folder, *folder.absolute().parents) if place.is_dir()))
    return usage.free if usage.total else sys.maxsize


_LOCK_BYTES = 1 << 16
_MOST_LOOKS = 900
"""Sizes of files that a commit asks the file system for: of more ranks only the names are looked at."""


class CheckpointStore(StoresCheckpoints):
    """The checkpoints in the folder `root`, which need not exist yet. Errors of the disk are raised as OSError."""

    def __init__(
        self,
        root: Path,
        *,
        durable: Durable = DISK,
        look_seconds: float = LOOK_SECONDS,
        free_bytes: Callable[[Path], int] = free_disk_bytes,
        now_ns: Callable[[], int] = time.time_ns,
        clock: LeaseClock | None = None,
    ) -> None:
        # A save in a thread must survive a change of the working directory.
        self.root: Path = Path(root).absolute()
        self.address = str(self.root)
        self.durable = durable
        self._look_seconds = look_seconds
        self._exclusive = process_lock(self.address)
        """Orders commits of this process and removals in the background."""
        self._begun = ""
        """The place that this process has made last: it need not wait to see it."""
        self._free_bytes = free_bytes
        self._clock = clock
        self._lease: FolderLease | None = None
        self._manifests = KnownManifests(self.root, now_ns)
        self._retired = RetiredCheckpoints(self.root, durable, self._manifests)

    def place_of(self, name: str) -> Path:
        return self.root / name

    @property
    def pins(self) -> Pins:
        return Pins(self.root)

    @property
    def rollbacks(self) -> RollbackRecord:
        return RollbackRecord.in_folder(self.root, self.durable)

    @property
    def shelf(self) -> Shelf:
        from torchtitan_lite.store.set_aside import ShelfOnDisk  # No run needs it.

        return ShelfOnDisk(self, self.root, self.durable)

    def lease(self, run_id: str, timeout_seconds: float) -> FolderLease:
        self._lease = FolderLease(
            self.root,
            run_id=run_id,
            timeout_seconds=timeout_seconds,
            clock=self._clock,
            make_room=functools.partial(recover_with_log, self),
        )
        return self._lease

    def check_lease(self) -> None:
        if self._lease is not None:
            self._lease.check()

    def seen_holder(self) -> HolderSeen | None:
        try:
            return HolderSeen.parse(read_plain(self.root / layout.LOCK, _LOCK_BYTES))
        except (OSError, CheckpointUnsafe):
            return None

    def folder_id(self, *, make: bool) -> str:
        return folder_id(self.root, self.durable, make=make)

    def listed(self) -> list[CheckpointInfo]:
        with self._exclusive:  # A commit meanwhile would be forgotten.
            return self._manifests.listed()

    def intact(self) -> list[CheckpointInfo]:
        return self._manifests.intact()

    def unmanaged(self) -> list[Path]:
        return [folder for step in Listing(self.root).places() if is_unmanaged(folder := self._final(step))]

    def errors_by_step(self, above: int = -1) -> dict[int, CheckpointDamaged | CheckpointUnreadable]:
        return self._manifests.errors_by_step(above)

    def get(self, step: int) -> CheckpointInfo:
        info = self._manifests.find(step, Listing(self.root).places().get(step, []))
        committed = self.committed()
        if info is None or info not in committed:
            raise CheckpointNotFound(str(self.root), step, [info.step for info in committed])
        return info

    def check_sizes(self, info: CheckpointInfo) -> list[str]:
        return self._manifests.check_sizes(info)

    def free_bytes(self) -> int:
        return self._free_bytes(self.root)

    def begin(self, step: int) -> str:
        # Never a name that was used: the client of a network file system may still lead it to the folder that had it,
        # which is a committed checkpoint by now.
        place = layout.staging_dir(step, secrets.token_hex(4))
        self.durable.make_dir(self.root / place)
        self._begun = place
        return place

    def resume(self, step: int, place: str) -> dict[str, int] | None:
        folder = self.root / place
        if layout.parse_staging(place) != step or not is_folder(folder):
            return None
        return sizes_of(folder, [entry.name for entry in os.scandir(folder)])

    def new_file(self, place: str, name: str) -> NewFileOnDisk:
        look_seconds = 0.0 if place == self._begun else self._look_seconds
        return NewFileOnDisk(self.root / place / name, look_seconds, self.durable)

    def remove_cut(self, kept: str) -> None:
        """Do nothing: what was cut is in the folder of its save."""

    def add_metadata(self, place: str, data: bytes) -> None:
        self.durable.write_file(self.root / place / layout.METADATA, data)

    def remove_staging(self, step: int, place: str) -> None:
        staging = self.root / place
        if layout.parse_staging(place) != step:
            return
        self.check_lease()
        with self._exclusive:
            # A commit that failed after its exchange left the old checkpoint here, or under another name. The new one
            # must be durable before the old one goes; and if the new one abandons it, it is renamed and stays.
            self.durable.fsync_dir(self.root)
            self._retired.rename_abandoned()
            self._retired.remove_superseded(step)
        if os.path.lexists(staging):
            self._retired.remove(staging)

    def commit(self, step: int, manifest: Manifest, *, place: str) -> CheckpointInfo:
        """Turn the save `place` into `step-N`, durably. **Coordinator only**, after every rank has synced its files."""
        # First: the start of the job that has the folder by now removes what is staged here, and sealing would fail
        # with an error that hides this.
        self.check_lease()
        staging = self.root / place
        sealed, text = self._seal(step, manifest, staging)
        self.durable.fsync_dir(self.root)
        faults.point("commit", step=step, path=self._final(step))
        with self._exclusive:
            replaced = self._put_in_place(sealed, staging)
            faults.point("committed", step=step, path=self._final(step))
            self.durable.fsync_dir(self.root)
            info = self._manifests.note_commit(self._final(step), sealed, text)
            # Only now, after the sync: until then a power cut may undo the rename, and what it replaced is all there
            # is.
            self._retired.after_commit(step, replaced, sealed.lineage.abandons)
        return info

    def discard(self, info: CheckpointInfo) -> list[Path]:
        # Lease and pins are read again for each removal, because both may have changed since the decision. Under the
        # lock of the pins no `pin` can come between this look and the rename.
        with self._exclusive:
            self.check_lease()
            with self.pins.unchanged() as pinned:
                if info.step in pinned or self._manifests.find_intact(info.step, [on_disk(info.path)]) != info:
                    return []
                return self._retired.discard(info)

    def empty(self, trash: Sequence[Path]) -> None:
        for path in trash:
            self._retired.remove(path)

    def quarantine(self, step: int, findings: Sequence[str]) -> Path:
        return self._retired.quarantine(step, findings, self.check_lease)

    def recover(self) -> list[Path]:
        return self._retired.recover()

    def _seal(self, step: int, manifest: Manifest, staging: Path) -> tuple[Manifest, bytes]:
        """Leave the files of the returned manifest, and no others, in the folder `staging`, durably.

        Returns what was written of it, too.
        """
        if manifest.step != step:
            raise SaveFailed(step, f"its manifest is of step {manifest.step}, not {step}")
        run_id = manifest.lineage.run_id
        for info in self.intact() if self._manifests.may_be_abandoned(step, run_id) else ():
            # The new checkpoint would be abandoned from the moment of its commit.
            if (step, run_id) in info.lineage.abandons:
                raise SaveFailed(step, f"{info.path} is of a rollback that abandons step {step} of run {run_id}")
        there = {entry.name for entry in os.scandir(staging)} if is_folder(staging) else set()
        for name in sorted({*manifest.files} - there):
            _written_size(staging / name, step)  # A listing may be of a moment ago.
        # Each rank has looked at its own files. This shows what other hosts see of them, as far as it takes no time.
        for name, record in islice(manifest.files.items(), _MOST_LOOKS):
            if (size := _written_size(staging / name, step)) != record.size:
                raise SaveFailed(step, f"{staging / name} has {size} bytes, {record.size} were written")
        sealed = dataclasses.replace(manifest, files=manifest.files | _metadata_record(manifest, staging))
        for name in sorted(there.difference(sealed.files)):
            self._retired.remove(staging / name)
        if layout.METADATA in sealed.files:
            with naming(staging / layout.METADATA), (staging / layout.METADATA).open("rb") as file:
                self.durable.fsync_file(file.fileno())
        faults.point("manifest", step=step, path=staging / layout.MANIFEST)
        # The manifest comes last: a folder that has one holds all files that it lists.
        text = sealed.to_readable_json()
        self.durable.write_file(staging / layout.MANIFEST, text)
        faults.point("seal", step=step, path=staging)
        self.durable.fsync_dir(staging)
        return sealed, text

    def _put_in_place(self, sealed: Manifest, staging: Path) -> list[Path]:
        """Rename `staging` to step-N, after what has that name got another one; return where what it replaced is."""
        step = sealed.step
        final = self._final(step)
        if self._manifests.find_intact(step, [final]) is not None:
            self.check_lease()
            # Its manifest goes, and with it the list of what it abandons.
            self._retired.rename_abandoned()
        is_there, there = os.path.lexists(final), self._manifests.find_intact(step, [final])
        keeps_weights = there is not None and _both_stay(there, sealed)
        self.check_lease()
        # One system call, so `step-N` exists at every moment. Where the system has no such call there are two renames,
        # and `recover` undoes the first one if a crash comes between them.
        if there is not None and not keeps_weights and self.durable.exchange(staging, final):
            return [staging, *Listing(self.root).replaced(step)]
        if is_there:
            if there is not None:
                self.durable.rename(final, Listing(self.root).free_replaced(step))
            else:
                self._retired.move_aside(step)
            # Without this sync a power cut may keep the second rename and lose the first.
            self.durable.fsync_dir(self.root)
            self.check_lease()
        self.durable.rename(staging, final)
        return Listing(self.root).replaced(step) if is_there else []

    def _final(self, step: int) -> Path:
        return self.root / layout.step_dir(step)


def recover_with_log(store: StoresCheckpoints) -> bool:
    """Remove what a crash left in the folder of `store`. Return whether there was anything. **Coordinator only**."""
    recovered = store.recover()
    for place in recovered:
        is_kept = store.root is not None and os.path.lexists(place)
        logger.info("%s what a save that was cut off left: %s", "Kept" if is_kept else "Removed", place)
    return bool(recovered)


def _both_stay(there: CheckpointInfo, sealed: Manifest) -> bool:
    """Return whether `there` are exported weights that a full checkpoint replaces, of no branch that it abandons.

    They must not be exchanged: what a crash leaves under the name of the staging folder is removed.
    """
    is_abandoned = (there.step, there.run_id) in sealed.lineage.abandons
    return there.kind is CheckpointKind.WEIGHTS_ONLY and sealed.kind is CheckpointKind.FULL and not is_abandoned


def _metadata_record(manifest: Manifest, staging: Path) -> dict[str, FileRecord]:
    """Return the record of DCP's `.metadata`, computed from the file where the manifest has no digest of it."""
    if DCP_METADATA in manifest.extra:
        return {}
    if (record := manifest.files.get(layout.METADATA)) is None or not record.blocks:
        path = staging / layout.METADATA
        _written_size(path, manifest.step)
        record = FileRecord.of(path.read_bytes())
    return {layout.METADATA: record}


def _written_size(path: Path, step: int) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        raise SaveFailed(step, f"{path} is missing") from None


_ID = re.compile(rb"([0-9a-f]{32})\n")


def folder_id(root: Path, durable: Durable, *, make: bool) -> str:
    """Return the id of the folder `root`; with `make` give it one if it has none, else return the empty string.

    It is random, in a file there, so that a folder that was made again has another one. A path and an inode come back;
    what remembers a folder outside of it, such as an image in memory, compares this id.

    **Coordinator only**, under the lease if it may make one. Raises OSError.
    """
    path = root / layout.FOLDER_ID
    try:
        found = _ID.fullmatch(read_plain(path, 64))
    except (FileNotFoundError, NotADirectoryError, CheckpointUnsafe):
        found = None
    if found is not None:
        return found[1].decode()
    if not make:
        return ""
    new = secrets.token_hex(16)
    durable.write_atomically(path, f"{new}\n".encode())
    return new
