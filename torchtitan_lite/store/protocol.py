"""What a run asks of its folder of checkpoints, on a disk or in an object store.

For every reader and after any crash a step is a complete checkpoint or absent, and one job writes at a time: the
promises of docs/commit_protocol.md hold for each implementation. It gives out handles, never paths: a `Place` names a
checkpoint, a `NewFile` is written by whoever has its bytes. A marker file in place of the rename would not do: DCP's
tools do not know it, and would read half a checkpoint. Errors of the machine are raised as OSError.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torchtitan_lite.disk.block_writer import FileSource, NewFile
from torchtitan_lite.errors import CheckpointDamaged, CheckpointUnreadable
from torchtitan_lite.log import logger
from torchtitan_lite.store.holder import HolderSeen
from torchtitan_lite.store.lease import Lease
from torchtitan_lite.store.manifest import CheckpointInfo, CheckpointKind, Manifest, without_abandoned
from torchtitan_lite.store.place import Place
from torchtitan_lite.store.rollbacks import RollbackRecord


class KeepsPins(Protocol):
    """The steps of a folder that no rule removes. Every method raises `PinsUnreadable` if they cannot be known."""

    def read(self) -> frozenset[int]:
        """Return the pinned steps."""
        ...

    def changing(self) -> AbstractContextManager[set[int]]:
        """Return a context with the pinned steps, to be changed in the block, durably. Needs no lease."""
        ...


CORRUPT, ABANDONED = "corrupt", "abandoned"


@dataclass(frozen=True)
class SetAside:
    """A checkpoint that was set aside, with its manifest."""

    folder: Place
    step: int
    why: str
    """`CORRUPT` or `ABANDONED`."""
    manifest: Manifest

    @property
    def run_id(self) -> str:
        """Return the id of its run."""
        return self.manifest.lineage.run_id


class Shelf(Protocol):
    """What was set aside in one folder of checkpoints. **The caller holds the lease**."""

    def find(self, name: str) -> SetAside:
        """Return what is called `name`. Raises CheckpointNotFound, and CheckpointDamaged without its manifest."""
        ...

    def in_the_way(self, aside: SetAside) -> Place | None:
        """Return what has the place of the step of `aside` now; None if nothing has."""
        ...

    def bring_back(self, aside: SetAside) -> Sequence[Place]:
        """Make `aside` the checkpoint of its step, durably; return what was set aside of the branch that abandons it.

        After `check_set_aside` and `refuse_harm`. Raises LeaseLost.
        """
        ...


class StoresCheckpoints(Protocol):
    """One folder of checkpoints. What changes it is **coordinator only**, where nothing else is said."""

    root: Path | None
    """The folder, if it is one on a disk, where other programs and hosts may see it differently; else None.

    There a file of a save that is cut is there in part; an object appears complete or not at all.
    """
    address: str
    """The folder as people write it."""

    @property
    def identity(self) -> str:
        """The same for every spelling of this folder, in this process."""
        return self.address if self.root is None else str(self.root.resolve())

    def place_of(self, name: str) -> Place:
        """Return the place of the checkpoint, or of the save, that is called `name` here. Any rank."""
        ...

    @property
    def pins(self) -> KeepsPins: ...

    @property
    def rollbacks(self) -> RollbackRecord: ...

    @property
    def shelf(self) -> Shelf: ...

    def lease(self, run_id: str, timeout_seconds: float) -> Lease:
        """Return the lease of this folder, not yet taken. Any rank. In an object store each change needs it.

        From now on what only its holder may do asks it first, and on a disk again right before each rename.
        """
        ...

    def check_lease(self) -> None:
        """Raise LeaseLost if the lease that was made here last is another job's by now, OSError if that is not known.

        Where none was made, do nothing on a disk, and raise CheckpointError in an object store. Any thread.
        """
        ...

    def seen_holder(self) -> HolderSeen | None:
        """Return the job in the lock of this folder, which may have ended; None if there is none. Changes nothing."""
        ...

    def folder_id(self, *, make: bool) -> str:
        """Return the id of this folder, which `make` gives it if it has none; empty without one. Raises OSError."""
        ...

    def committed(self) -> list[CheckpointInfo]:
        """Return every committed checkpoint that no other one abandons, by ascending step. Raises `FormatTooNew`.

        Where the head of a bucket is lost or damaged, returns what the next start will find in the manifests.
        """
        return without_abandoned(self.intact())

    def listed(self) -> list[CheckpointInfo]:
        """Return the same as `intact`, for the holder of the lease: without another look at what it knows.

        No other job has renamed anything since.
        """
        return self.intact()

    def intact(self) -> list[CheckpointInfo]:
        """Return the same as `committed`, plus abandoned checkpoints that could not be renamed yet."""
        ...

    def unmanaged(self) -> Sequence[Place]:
        """Return the places of checkpoints that have no manifest of ours, as torchtitan's own, by ascending step."""
        return []

    def latest(self, kind: CheckpointKind = CheckpointKind.FULL) -> CheckpointInfo | None:
        """Return the committed checkpoint of `kind` with the highest step; None if there is none.

        Logs a warning for each damaged one of a higher step.
        """
        latest = next((info for info in reversed(self.committed()) if info.kind is kind), None)
        for step, error in self.errors_by_step(above=-1 if latest is None else latest.step).items():
            logger.warning("Skipped step %d: %s", step, error)
        return latest

    def damaged(self) -> dict[int, CheckpointDamaged]:
        """Return what is wrong with each step whose manifest is damaged, or that of another step."""
        errors = self.errors_by_step()
        return {step: error for step, error in errors.items() if isinstance(error, CheckpointDamaged)}

    def unreadable(self) -> dict[int, CheckpointUnreadable]:
        """Return the error of each step whose manifest could not be read, by step: nothing is known of these."""
        errors = self.errors_by_step()
        return {step: error for step, error in errors.items() if isinstance(error, CheckpointUnreadable)}

    def errors_by_step(self, above: int = -1) -> dict[int, CheckpointDamaged | CheckpointUnreadable]:
        """Return what is wrong with each step higher than `above` that has no intact checkpoint, by step."""
        ...

    def get(self, step: int) -> CheckpointInfo:
        """Return the committed checkpoint of `step`.

        Raises CheckpointNotFound (also where another checkpoint abandons it), CheckpointDamaged, CheckpointUnreadable
        or FormatTooNew.
        """
        ...

    def check_sizes(self, info: CheckpointInfo) -> list[str]:
        """Return what is wrong with the sizes of the files of `info`, one sentence each; empty if nothing is.

        Changes nothing and opens no file but the manifest. Raises FormatTooNew, and CheckpointUnreadable where that
        fails.
        """
        ...

    def free_bytes(self) -> int:
        """Return how many bytes may still be written; a very large number where there is no limit. Raises OSError."""
        ...

    def begin(self, step: int) -> str:
        """Make an empty place for a save of `step`; return its name, for `new_file`."""
        ...

    def resume(self, step: int, place: str) -> Mapping[str, int] | None:
        """Continue a save of `step` that an earlier holder of the lease began at `place`; None if that is not possible.

        Returns the sizes of the files that are there. On a disk one is complete only if the caller knows that it was
        written; what is missing is written with `new_file`.
        """
        ...

    def new_file(self, place: str, name: str) -> NewFile:
        """Return the file `name` of the save that `begin` gave the name `place`. **Any rank**."""
        ...

    def send(self, place: str, name: str, source: FileSource) -> None:
        """Write the file `name` of the save `place` from `source`, durably; continue one that was cut, if possible.

        Raises as `NewFile.write`. No other process writes that file.
        """
        self.new_file(place, name).write(source)

    def remove_cut(self, kept: str) -> None:
        """Remove the parts of files that `send` left outside of any save, but those of the save `kept`; "" for none."""

    def add_metadata(self, place: str, data: bytes) -> None:
        """Write DCP's `.metadata` of the save that `begin` gave the name `place`."""

    def commit(self, step: int, manifest: Manifest, *, place: str) -> CheckpointInfo:
        """Commit the save `place` of `step`, durably, after every rank has written its files.

        Raises SaveFailed if the files are not those of the manifest, OSError if the disk or the store fails, and
        LeaseLost, after which nothing is changed. The checkpoint of `step` is then the old one or the new one,
        complete, and `remove_staging` may follow (not after LeaseLost: the folder is another job's then). A replaced
        checkpoint that cannot be removed after the commit is a warning.
        """
        ...

    def remove_staging(self, step: int, place: str) -> None:
        """Remove what the failed save `place` of `step` left, when no rank writes into it any more.

        What may be committed after all stays. Raises LeaseLost on a disk, and removes nothing then. A bucket asks its
        head in its place, and notes the save, so that a later commit removes it.
        """

    def discard(self, info: CheckpointInfo) -> Sequence[Any]:
        """Make `info` absent for every reader, durably.

        Returns what is left of it, for `empty`: nothing if it is gone, pinned, or replaced by now. Raises LeaseLost,
        and `PinsUnreadable`.
        """
        ...

    def empty(self, trash: Sequence[Any]) -> None:
        """Remove what was discarded; may run alongside anything but `recover`."""

    def quarantine(self, step: int, findings: Sequence[str]) -> Place:
        """Set the damaged checkpoint of `step` aside, durably, with `findings`; return its new place.

        After every rank has agreed. Nothing reads, counts or removes it there. Raises LeaseLost.
        """
        ...

    def recover(self) -> Sequence[Any]:
        """Finish or remove everything that cut saves and removals left. Before the first load.

        Returns what was renamed back, by its new name, and what was removed. Unknown names stay untouched.
        """
        ...
