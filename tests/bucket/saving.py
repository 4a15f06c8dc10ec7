"""Stores of one folder in memory, saves in them, and what a reader finds there."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from tests.bucket.memory_objects import Bucket, MemoryObjects
from tests.clock import Clock
from tests.store import filled
from torchtitan_lite.bucket.bucket_store import BucketStore
from torchtitan_lite.bucket.head import Entry, Status
from torchtitan_lite.bucket.head_lease import BucketLease
from torchtitan_lite.bucket.objects import Objects
from torchtitan_lite.disk.digest import FileRecord
from torchtitan_lite.store import layout
from torchtitan_lite.store.lineage import Lineage
from torchtitan_lite.store.manifest import CheckpointInfo, CheckpointKind, Manifest

FULL, WEIGHTS = CheckpointKind.FULL, CheckpointKind.WEIGHTS_ONLY
FILE = layout.data_file(0, 0)
_times = itertools.count(1_000_000)


def no_probe(objects: Objects) -> None:
    """Take the store for fit."""


def new_store(bucket: Bucket, clock: Clock | None = None) -> tuple[BucketStore, MemoryObjects]:
    """Return a store with a client of its own."""
    objects = MemoryObjects(bucket)
    return BucketStore(objects, clock=(clock or Clock(1e9)).of_a_bucket, probe=no_probe), objects


@dataclass
class Job:
    """A job that has taken the folder."""

    store: BucketStore
    objects: MemoryObjects
    lease: BucketLease


def started(bucket: Bucket, clock: Clock | None = None) -> Job:
    """Return a job that took the folder and removed leftovers, as each start does."""
    job = new_job(bucket, clock)
    job.lease.take()
    job.store.recover()
    return job


def new_job(bucket: Bucket, clock: Clock | None = None) -> Job:
    """Return a job that has not taken the folder yet."""
    store, objects = new_store(bucket, clock)
    return Job(store, objects, store.lease("run0", 30.0))


def manifest_of(
    step: int,
    data: bytes,
    *,
    run_id: str = "run0",
    kind: CheckpointKind = FULL,
    abandons: tuple[tuple[int, str], ...] = (),
) -> Manifest:
    """Return the manifest of a checkpoint of `step` with `data` in its file."""
    lineage, files = Lineage(run_id, abandons=abandons), {FILE: FileRecord.of(data)}
    return filled.manifest_of(step, kind=kind, created_at=float(next(_times)), files=files, lineage=lineage)


def save(store: BucketStore, step: int, data: bytes = b"data", **about: object) -> CheckpointInfo:
    """Save `data` as `step`, as a run does; `about` as for `manifest_of`."""
    place = write(store, step, data)
    return store.commit(step, manifest_of(step, data, **about), place=place)  # type: ignore[arg-type]  # passed on


def remove_failed(job: Job, bucket: Bucket, step: int) -> None:
    """Have all that lies there of saves of `step` removed, but what is committed, as a run does with a failed save."""
    for place in sorted({key.partition("/")[0] for key in bucket.stored if key.startswith(f"step-{step}.")}):
        job.store.remove_staging(step, place)


def write(store: BucketStore, step: int, data: bytes = b"data") -> str:
    """Write the files of a save of `step`; return its name."""
    place = store.begin(step)
    store.objects.put(f"{place}/{FILE}", data)
    store.add_metadata(place, b"metadata")
    return place


def found_in(bucket: Bucket) -> dict[int, bytes]:
    """Return what a reader with a client of its own finds: the data of each step, after checking every file."""
    store, objects = new_store(bucket)
    found = {}
    for info in store.committed():
        assert store.check_sizes(info) == []
        manifest = Manifest.parse(objects.get(f"{info.path.name}/{layout.MANIFEST}")[0])
        for name, record in manifest.files.items():
            assert FileRecord.of(objects.get(f"{info.path.name}/{name}")[0]) == record
        found[info.step] = objects.get(f"{info.path.name}/{FILE}")[0]
    return found


def set_aside_in(store: BucketStore) -> list[Entry]:
    """Return the damaged, the abandoned, and the weights that a full checkpoint replaced, which all stay."""
    aside = (Status.CORRUPT, Status.ABANDONED, Status.WEIGHTS)
    return [entry for entry in store.head().entries if entry.status in aside]


def purge(store: BucketStore, step: int) -> bool:
    """Remove `step` as a policy does; return whether it was removed."""
    trash = store.discard(store.get(step))
    store.empty(trash)
    return bool(trash)


def pin(store: BucketStore, *steps: int) -> None:
    """Pin `steps`, as the tool does."""
    with store.pins.changing() as pinned:
        pinned.update(steps)
