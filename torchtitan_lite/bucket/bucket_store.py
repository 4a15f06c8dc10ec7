"""One folder of checkpoints in an object store.

For every reader and after any crash a step is a complete checkpoint or absent: it is there while the head lists it, and
one swap of the head is the commit, the removal, the roll-back. Objects of a checkpoint are written once, under a name
that no other save has, before the swap, and deleted after a swap. A swap is refused to a job that was fenced off. What
an interrupted save left is in no head, and `recover` removes it.

A checkpoint that was set aside becomes the one of its step again by one swap, too, which sets the branch aside that
abandons one: a cut leaves the state before it or after. A step is retired only if it is not pinned in the version of
the head that is replaced; so once a pin has been written, no job removes the step, and no lock is needed.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial

from torchtitan_lite.bucket.head import Head, Status
from torchtitan_lite.bucket.head_file import HeadFile
from torchtitan_lite.bucket.head_lease import BucketLease, HeldHead, delete_attempt
from torchtitan_lite.bucket.identity import folder_id, probe
from torchtitan_lite.bucket.manifests import AttemptManifests, read_manifest, size_findings
from torchtitan_lite.bucket.naming import AttemptObjects, attempts_in, beat_key, parse_beat
from torchtitan_lite.bucket.object_upload import PART_BYTES, ObjectToUpload
from torchtitan_lite.bucket.objects import Objects, connect
from torchtitan_lite.bucket.recovery import rebuilt
from torchtitan_lite.bucket.s3_parts import S3Parts, s3_parts_at
from torchtitan_lite.bucket.saves import BucketSaves
from torchtitan_lite.config.address import parse_address
from torchtitan_lite.disk.block_writer import FileSource
from torchtitan_lite.errors import (
    CheckpointDamaged,
    CheckpointNotFound,
    CheckpointUnreadable,
    SaveFailed,
)
from torchtitan_lite.log import logger
from torchtitan_lite.store import layout
from torchtitan_lite.store.holder import HolderSeen
from torchtitan_lite.store.lease import LeaseClock
from torchtitan_lite.store.manifest import CheckpointInfo, Manifest
from torchtitan_lite.store.manifest_fields import json_bytes
from torchtitan_lite.store.place import ObjectPlace, Place
from torchtitan_lite.store.protocol import ABANDONED, CORRUPT, SetAside, StoresCheckpoints
from torchtitan_lite.store.rollbacks import RollbackRecord
from torchtitan_lite.store.set_aside import branch_in_the_way

KEPT_SECONDS = 24 * 3600.0
"""Of objects that no head lists: for people, who look after a failure on the next day."""


def open_bucket(folder: str, clock: LeaseClock | None = None) -> BucketStore:
    """Return the store at the address `folder`. Sends nothing. Raises ConfigError, and `ExtraMissing`."""
    return BucketStore(connect(parse_address(folder)), clock=clock)


class BucketStore(StoresCheckpoints):
    """The checkpoints in the folder of `objects`, which need not exist yet. Errors of the store are raised as OSError.

    What changes something is for the holder of the lease that was made here, and raises CheckpointError without it.
    """

    root = None

    def __init__(
        self,
        objects: Objects,
        *,
        clock: LeaseClock | None = None,
        probe: Callable[[Objects], None] = probe,
    ) -> None:
        self.objects = objects
        self.address = objects.address
        self._clock = clock or LeaseClock()
        self._probe = probe
        self._file = HeadFile(objects, self._clock)
        self._manifests = AttemptManifests(objects)
        self._held = HeldHead(objects, self._file)
        self._saves = BucketSaves(objects, self._held, self._manifests)

    def __copy__(self) -> BucketStore:
        """Return a store of the same folder with a lease of its own."""
        return BucketStore(self.objects, clock=self._clock, probe=self._probe)

    def place_of(self, name: str) -> ObjectPlace:
        return ObjectPlace(self.address, name)

    @property
    def pins(self) -> BucketPins:
        return BucketPins(self._file)

    @property
    def rollbacks(self) -> RollbackRecord:
        name, objects = layout.ROLLBACKS, self.objects
        return RollbackRecord(f"{self.address}/{name}", lambda: objects.get(name)[0], partial(objects.put, name))

    @property
    def shelf(self) -> BucketShelf:
        return BucketShelf(self, self.objects, self._held)

    def lease(self, run_id: str, timeout_seconds: float) -> BucketLease:
        objects, file = self.objects, self._file
        self._held.lease = lease = BucketLease(
            objects, file, run_id=run_id, timeout_seconds=timeout_seconds, clock=self._clock, probe=self._probe
        )
        return lease

    def check_lease(self) -> None:
        self._held.read()

    def seen_holder(self) -> HolderSeen | None:
        if (holder := (head := self.head()).holder) is None:
            return None
        try:
            return HolderSeen(holder, self.objects.head(beat_key(head.epoch)).modified)
        except FileNotFoundError:  # It was taken a moment ago.
            return HolderSeen(holder, math.inf)

    def folder_id(self, *, make: bool) -> str:
        return folder_id(self.objects, self._probe, make=make)

    def head(self) -> Head:
        """Return the head; where it is lost or damaged, what the next start makes of the manifests."""
        return self._file.look().head or rebuilt(self.objects)

    def intact(self) -> list[CheckpointInfo]:
        # What is abandoned loses its place with the commit that abandons it.
        while True:
            kept = self.head().kept
            infos = self._manifests.intact(kept)
            # A manifest that is missing may be that of a checkpoint which was replaced since the head was read.
            if len(infos) == len(kept) or self.head().kept == kept:
                return infos

    def get(self, step: int) -> CheckpointInfo:
        entry = self.head().kept_of(step)
        if entry is None:
            raise CheckpointNotFound(self.address, step, [info.step for info in self.committed()])
        try:
            return self._manifests.find(entry)
        except CheckpointDamaged:
            if self.head().kept_of(step) == entry:
                raise
        # It was replaced or removed since the head was read.
        return self.get(step)

    def check_sizes(self, info: CheckpointInfo) -> list[str]:
        name = info.path.name
        try:
            if (sizes := self._manifests.known_sizes(name)) is None:
                self.get(info.step)
                sizes = self._manifests.known_sizes(name)
            found = {each.key.removeprefix(f"{name}/"): each.size for each in self.objects.list(f"{name}/")}
        except (CheckpointDamaged, CheckpointNotFound) as error:
            return [error.finding or f"{layout.MANIFEST} is missing"]
        except OSError as error:
            raise CheckpointUnreadable(str(info.path), f"{type(error).__name__}: {error}") from error
        return size_findings({layout.MANIFEST: found.get(layout.MANIFEST, 0)} | dict(sizes or {}), found)

    def free_bytes(self) -> int:
        return sys.maxsize  # An object store has room.

    def begin(self, step: int) -> str:
        return self._saves.begin(step)

    def resume(self, step: int, place: str) -> dict[str, int] | None:
        return self._saves.resume(step, place)

    def new_file(self, place: str, name: str) -> ObjectToUpload:
        return ObjectToUpload(self.address, f"{place}/{name}")

    def send(self, place: str, name: str, source: FileSource) -> None:
        # Of a large one the parts that the store has already are not sent again, where `s3_parts` can do that.
        new = self.new_file(place, name)
        if self._parts is not None and source.num_bytes > PART_BYTES:
            self._parts.upload(new.key, source)
        else:
            new.write(source)

    def remove_cut(self, kept: str) -> None:
        if self._parts is not None:
            self._parts.remove_all_but(kept)

    @cached_property
    def _parts(self) -> S3Parts | None:
        return s3_parts_at(self.address)

    def add_metadata(self, place: str, data: bytes) -> None:
        self._saves.add_metadata(place, data)

    def commit(self, step: int, manifest: Manifest, *, place: str) -> CheckpointInfo:
        """Make the save `place` of `step` visible. **Coordinator only**, after every rank has written its files.

        After an OSError the checkpoint of `step` is the old one. Raises SaveFailed if the store does not say what
        became of the commit, too: it is the old one or the new one then, complete.
        """
        self.check_lease()
        run_id = manifest.lineage.run_id
        if abandoning := [info for info in self.intact() if (step, run_id) in info.lineage.abandons]:
            # A head that is made again from the manifests would not have the new checkpoint.
            raise SaveFailed(step, f"{abandoning[0].path} is of a rollback that abandons step {step} of run {run_id}")
        return self._saves.commit(place, manifest)

    def remove_staging(self, step: int, place: str) -> None:
        self._saves.remove(place)

    def discard(self, info: CheckpointInfo) -> list[ObjectPlace]:
        name = info.path.name
        was_kept: list[str] = []

        def retired(head: Head) -> Head:
            if (entry := head.kept_of(info.step)) is not None and entry.name == name:
                was_kept.append(name)
            return head.with_retired(name)

        entry = self._held.change(retired).find(name)
        is_retired = entry is not None and entry.status is Status.RETIRED
        return [self.place_of(name)] if was_kept and is_retired else []

    def empty(self, trash: Sequence[ObjectPlace]) -> None:
        for place in trash:
            self._held.delete(place.name)

    def quarantine(self, step: int, findings: Sequence[str]) -> ObjectPlace:
        if (entry := self._held.read().kept_of(step)) is None:
            raise CheckpointNotFound(self.address, step, [info.step for info in self.committed()])
        place = self.place_of(entry.name)
        self._held.change(lambda head: head.with_corrupt(entry.name, findings))
        logger.warning("Step %d is damaged and is quarantined as %s", step, place)
        text = json_bytes({"step": step, "findings": list(findings)}, indent=2)
        try:
            self.objects.put(f"{place.name}/{layout.FINDINGS}", text)
        except OSError as error:
            logger.warning("Could not write %s/%s: %s", place, layout.FINDINGS, error)
        return place

    def recover(self) -> list[ObjectPlace]:
        head, listed = self._held.read(), list(self.objects.list(""))
        attempts = attempts_in(listed)
        retired = [entry.name for entry in head.entries if entry.status is Status.RETIRED]
        leftovers = [*(name for name in retired if name in attempts), *self._strays(head, attempts)]
        removed = [name for name in leftovers if self._is_removed(name)]
        beats = {each.key: epoch for each in listed if (epoch := parse_beat(each.key)) is not None}
        try:
            self.objects.delete([key for key, epoch in beats.items() if epoch < self._held.claim().epoch])
        except OSError as error:
            logger.warning("Could not remove the heartbeats of earlier jobs in %s: %s", self.address, error)
        # Also what people removed by hand.
        gone = {entry.name for entry in head.entries if entry.name not in attempts}.union(retired)
        gone.difference_update(set(leftovers).difference(removed))
        if head.without(gone) != head:
            self._held.change(lambda head: head.without(gone))
        return [self.place_of(name) for name in removed]

    def errors_by_step(self, above: int = -1) -> dict[int, CheckpointDamaged | CheckpointUnreadable]:
        while True:
            kept = self.head().kept
            errors: dict[int, CheckpointDamaged | CheckpointUnreadable] = {}
            for each in kept:
                try:
                    if each.step > above:
                        self._manifests.find(each)
                except (CheckpointDamaged, CheckpointUnreadable) as error:
                    errors[each.step] = error
            if not errors or self.head().kept == kept:
                return errors

    def _is_removed(self, name: str) -> bool:
        """Return whether the checkpoint `name`, which no reader sees, could be deleted; log a warning if not."""
        try:
            delete_attempt(self.objects, name)
        except OSError as error:  # A few objects more are no reason not to train.
            logger.warning("Could not remove %s/%s, which is no longer kept: %s", self.address, name, error)
            return False
        return True

    def _strays(self, head: Head, attempts: Mapping[str, AttemptObjects]) -> list[str]:
        """Return the checkpoints that are in no head and have not changed for a day, by the times of the store alone.

        A head that was restored from a copy may lack what is needed.
        """
        strays = sorted(attempts.keys() - {entry.name for entry in head.entries})
        if not strays:
            return []
        lease, claim = self._held.lease, self._held.claim()
        kept_seconds = KEPT_SECONDS if lease is None else max(KEPT_SECONDS, lease.timeout_seconds)
        # By the clock of the store: an object that is written now has its time.
        self.objects.put(beat_key(claim.epoch), f"{claim.token} looks at the time\n".encode())
        now = self.objects.head(beat_key(claim.epoch)).modified
        return [name for name in strays if attempts[name].modified < now - kept_seconds]


_WHY = {Status.CORRUPT: CORRUPT, Status.ABANDONED: ABANDONED}


class BucketShelf:
    """What was set aside in `store`, whose head is `held`; see `Shelf`. **The caller holds the lease**."""

    def __init__(self, store: StoresCheckpoints, objects: Objects, held: HeldHead) -> None:
        self._store, self._objects, self._held = store, objects, held

    def find(self, name: str) -> SetAside:
        head = self._held.read()
        entry = head.find(name)
        if entry is None or entry.status not in _WHY:
            there = ", ".join(entry.name for entry in head.entries if entry.status in _WHY)
            finding = (
                f"it is not the name of a damaged or abandoned checkpoint ({self._store.address} has {there or 'none'})"
            )
            raise CheckpointNotFound(f"{self._store.address}/{name}", None, finding=finding)
        place = ObjectPlace(self._objects.address, name)
        manifest, _ = read_manifest(self._objects, place, entry.step, entry.digest)
        return SetAside(place, entry.step, _WHY[entry.status], manifest)

    def in_the_way(self, aside: SetAside) -> Place | None:
        entry = self._held.read().kept_of(aside.step)
        return None if entry is None else self._store.place_of(entry.name)

    def bring_back(self, aside: SetAside) -> Sequence[Place]:
        self._store.rollbacks.bring_back(aside.step, aside.manifest.lineage)
        branch = {info.path.name for info in branch_in_the_way(self._store, aside)}
        self._held.change(lambda head: head.with_brought_back(aside.folder.name, branch))
        try:
            # It is undamaged: these findings are no longer true.
            self._objects.delete([f"{aside.folder.name}/{layout.FINDINGS}"])
        except OSError as error:
            logger.warning("Could not delete %s/%s: %s", aside.folder, layout.FINDINGS, error)
        return [self._store.place_of(name) for name in sorted(branch)]


class BucketPins:
    """The pinned steps in the head `file`. Every method raises OSError if they cannot be known."""

    def __init__(self, file: HeadFile) -> None:
        self._file = file

    def read(self) -> frozenset[int]:
        """Return the pinned steps; none in a new folder."""
        try:
            return self._file.read()[0].pinned
        except FileNotFoundError:
            return frozenset()

    @contextmanager
    def changing(self) -> Iterator[set[int]]:
        """Yield the pinned steps, to be changed in the block; then write them, if they are others.

        Raises FileNotFoundError in a folder without a head, and OSError: then they may be written or not.
        """
        # Without the lease: people pin while a job trains. That job's next swap reads them again.
        before = self._file.read()[0].pinned
        steps = set(before)
        yield steps
        self._file.change(lambda head: head.with_pins(steps - before, before - steps))
