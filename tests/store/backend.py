"""A folder of checkpoints that may be cut anywhere: what crash tests do to it, and what a reader finds there.

`Backend` has what a disk and an object store have in common, through the protocol that both offer. What is left to each
is how files are written and looked at, what may strike an operation, and what the end of a process leaves.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from tests.store.filled import manifest_of
from torchtitan_lite.disk.digest import FileRecord
from torchtitan_lite.store import layout
from torchtitan_lite.store.lineage import Lineage
from torchtitan_lite.store.manifest import CheckpointInfo, CheckpointKind, Manifest, abandoned_by
from torchtitan_lite.store.place import Place
from torchtitan_lite.store.protocol import StoresCheckpoints

FULL, WEIGHTS = CheckpointKind.FULL, CheckpointKind.WEIGHTS_ONLY
UNSUPPORTED = ("notes", "step-10.bak", "step-007", "step-2.corrupted", "step-abc")
"""Names that nothing may touch."""
Files = dict[str, bytes]
_times = itertools.count(1)


@dataclass(frozen=True)
class Fault:
    """What happens to the operation `at` from now on: the backend's `kind`-th fault. `seed` decides what it loses."""

    at: int
    kind: int
    seed: int = 0


@dataclass(frozen=True)
class Saved:
    """A checkpoint as a reader must find it."""

    run_id: str
    kind: CheckpointKind
    files: Files
    """Its files but the manifest."""
    is_sound: bool = True
    """Whether all files have their digests."""
    has_its_sizes: bool = True


There = dict[int, Saved]


@dataclass(frozen=True)
class Seen:
    """What people and runs see of a folder, all of which changes in one step."""

    steps: There
    rest: object
    """What else a store changes in that step."""

    def in_words(self) -> str:
        """Return the steps, for messages."""
        steps = [
            f"{step} ({'sound' if saved.is_sound else 'DAMAGED'}, {saved.files.get(layout.METADATA, b'')!r})"
            for step, saved in self.steps.items()
        ]
        return f"steps {', '.join(steps)}; {self.rest!r:.200}" if steps else "nothing"


@dataclass(frozen=True)
class Written:
    """A save whose files are written and that is not committed yet."""

    step: int
    place: str
    kind: CheckpointKind
    lineage: Lineage
    records: Mapping[str, FileRecord]


class Backend:
    """One folder; `store` is that of the process that holds it now. A subclass does what has no code here."""

    store: StoresCheckpoints
    crash: type[BaseException]
    """What ends a process."""
    staged: Written | None = None
    """A save that is written already, for the next commit."""

    def open(self) -> StoresCheckpoints:
        """Return a store that knows nothing of the others."""

    def crowd(self) -> None:
        """Put in all names of `UNSUPPORTED`."""

    def seen(self) -> Seen:
        """Return what people and runs see."""

    def next_process(self) -> None:
        """Continue as another process, which has not taken the folder yet."""

    def start(self) -> None:
        """Take the folder and recover, as each start does."""

    def arm(self, fault: Fault | None) -> None:
        """Let `fault` strike from now on; None: let nothing strike."""

    def check_error(self, error: Exception) -> None:
        """Fail if `error`, which a fault has led to, does not say what it concerns."""

    def refuse_changes(self) -> None:
        """Let each change fail the test from now on, until `arm`."""

    def commit_late(self, written: Written) -> None:
        """Commit `written` after another job took the folder over. Raises LeaseLost."""

    def put(self, place: str, name: str, data: bytes) -> FileRecord:
        """Write the file `name` of the save `place`, as a rank does."""

    def remove_failed(self, step: int) -> None:
        """Have all that saves of `step` have begun removed, as the coordinator does after each one that failed."""

    def files(self, place: Place) -> Files:
        """Return the files of a checkpoint."""

    def change(self, place: Place, name: str, data: bytes | None) -> None:
        """Overwrite or remove a file of a checkpoint, as no job does."""

    def foreign(self) -> object:
        """Return all that has names of `UNSUPPORTED`."""

    def aside(self) -> dict[str, Files]:
        """Return the files of each checkpoint that was set aside."""

    def leftovers(self) -> list[str]:
        """Return what no start may leave."""

    def settle(self, fault: Fault) -> None:
        """After the process ended by `fault`: lose what that loses."""

    def deliver(self) -> None:
        """Do what is under way still."""

    def close(self) -> None:
        """Remove it."""

    def write(
        self, step: int, files: Mapping[str, bytes], *, kind: CheckpointKind = FULL, lineage: Lineage | None = None
    ) -> Written:
        """Write `files`, which have `.metadata` among them, as a save of `step`."""
        place = self.store.begin(step)
        ours = {name: data for name, data in files.items() if name != layout.METADATA}
        records = {name: self.put(place, name, data) for name, data in ours.items()}
        self.store.add_metadata(place, files[layout.METADATA])
        return Written(step, place, kind, lineage or Lineage("run0"), records)

    def commit(self, written: Written, fence: Callable[[], None] | None = None) -> CheckpointInfo:
        """Commit `written`, which abandons what its branch does; `fence` is in place of a look at the lease."""
        if fence is not None:
            self.store.check_lease = fence  # type: ignore[method-assign]  # the store is opened again then
        lineage = written.lineage
        abandons = abandoned_by(lineage.run_id, lineage.branch_point, self.store.intact())
        manifest = manifest_of(
            written.step,
            kind=written.kind,
            created_at=float(next(_times)),
            world_size=len(written.records),
            files=dict(written.records),
            lineage=replace(lineage, abandons=abandons),
        )
        return self.store.commit(written.step, manifest, place=written.place)

    def purge(self, info: CheckpointInfo) -> None:
        """Remove `info` as housekeeping does, unless it is pinned."""
        self.store.empty(self.store.discard(info))

    def pin(self, *steps: int, unpin: int | None = None) -> frozenset[int]:
        """Pin `steps` as another process does; return all that is pinned."""
        with self.open().pins.changing() as pinned:
            pinned.update(steps)
            pinned.discard(-1 if unpin is None else unpin)
        return frozenset(pinned)

    def read(self) -> There:
        """Return what a reader finds, every byte checked against the digests in the manifest."""
        return {step: saved for step, (saved, _) in self.read_all().items()}

    def read_all(self) -> dict[int, tuple[Saved, bytes]]:
        """Return the same as `read`, and the bytes of the manifests."""
        found: dict[int, tuple[Saved, bytes]] = {}
        for info in self.open().committed():
            files = self.files(info.path)
            manifest = files.pop(layout.MANIFEST)
            records = _records(manifest)
            sizes = {name: len(data) for name, data in files.items()}
            has_its_sizes = all(sizes.get(name) == record.size for name, record in records.items())
            has_digests = all(record.blocks and FileRecord.of(files.get(name, b"")) == record
                              for name, record in records.items())  # fmt: skip
            is_sound = has_digests and files.keys() == records.keys()
            found[info.step] = Saved(info.run_id, info.kind, files, is_sound, has_its_sizes), manifest
        return found


@functools.lru_cache(maxsize=1000)
def _records(manifest: bytes) -> Mapping[str, FileRecord]:
    return Manifest.parse(manifest).files
