"""The saves that a store has begun: each writes below a name of its own, and becomes visible by one swap of the head.

A save is known by that name, never by its step: one that the loop gave up may end while another save of the same step
is under way, and neither touches the other. The objects of a save are deleted only while it is certain that it was not
committed and will not be: a swap without an answer may be carried out later, and a head that was lost may be made again
from what lies there.
"""

from __future__ import annotations

import dataclasses
import secrets

from torchtitan_lite import faults
from torchtitan_lite.bucket import naming
from torchtitan_lite.bucket.head import Entry, Head, Status
from torchtitan_lite.bucket.head_lease import Claim, HeldHead, delete_attempt
from torchtitan_lite.bucket.manifests import AttemptManifests, size_findings
from torchtitan_lite.bucket.objects import ObjectPath, Objects
from torchtitan_lite.bucket.recovery import ATTEMPT, EPOCH
from torchtitan_lite.disk.digest import FileRecord
from torchtitan_lite.errors import CheckpointError, SaveFailed
from torchtitan_lite.log import logger
from torchtitan_lite.store import layout
from torchtitan_lite.store.files_of_ranks import recorded_sizes
from torchtitan_lite.store.manifest import CheckpointInfo, Manifest, last_digest_of
from torchtitan_lite.store.manifest_fields import DCP_METADATA
from torchtitan_lite.store.place import ObjectPlace


class BucketSaves:
    """The saves under way in the folder of `objects`. **Coordinator only**."""

    def __init__(self, objects: Objects, held: HeldHead, manifests: AttemptManifests) -> None:
        self._objects = objects
        self._held = held
        self._manifests = manifests
        self._begun: dict[str, Claim] = {}
        """The saves that are neither committed nor removed, by name, and what this process held when each began."""
        self._failed: dict[str, None] = {}
        """The names of those that have failed, in order; their objects are to go."""
        self._metadata: dict[str, FileRecord] = {}
        self._unknown: dict[str, int] = {}
        """The names of saves whose swap had no answer, and the number of the head's version that it named."""

    def begin(self, step: int) -> str:
        """Return the name of a new save of `step`. Raises CheckpointError if this process holds nothing."""
        claim = self._held.claim()
        name = naming.attempt_name(step, secrets.token_hex(8))
        self._begun[name] = claim
        return name

    def resume(self, step: int, name: str) -> dict[str, int] | None:
        """Continue the save `name` of `step`; return the sizes of its files that are there. Raises OSError.

        None for one that is over, or none at all.
        """
        claim, attempt = self._held.claim(), naming.parse_attempt(name)
        if attempt is None or attempt[0] != step or self._held.read().find(name) is not None:
            return None
        self._begun[name] = claim
        return {each.key.removeprefix(f"{name}/"): each.size for each in self._objects.list(f"{name}/")}

    def add_metadata(self, name: str, data: bytes) -> None:
        """Write DCP's `.metadata` of the save `name`."""
        self._objects.put(f"{name}/{layout.METADATA}", data)
        self._metadata[name] = FileRecord.of(data)

    def commit(self, name: str, manifest: Manifest) -> CheckpointInfo:
        """Make the save `name` visible in place of what it replaces and abandons.

        Raises SaveFailed, also if it is not known whether it became visible, LeaseLost, and OSError: it did not.
        """
        self._refuse_what_is_over(name, manifest.step)
        step, place = manifest.step, ObjectPlace(self._objects.address, name)
        entry, info = self._sealed(place, manifest)
        faults.point("commit", step=step, path=ObjectPath(str(place)))
        head = self._swapped_in(entry, manifest.lineage.abandons)
        faults.point("committed", step=step, path=ObjectPath(str(place)))
        self._begun.pop(name, None)
        self._clean_after(step, head, manifest.lineage.abandons)
        return info

    def remove(self, name: str) -> None:
        """Delete the objects of the save `name`, which has failed. Raises OSError.

        What may be committed after all stays until a later call, or commit, finds that it will not be.
        """
        if naming.parse_attempt(name) is None:
            return  # No save has such a name.
        self._failed[name] = None
        self._remove_failed()

    def _remove_failed(self) -> None:
        if not self._failed:
            return
        # No swap of this process comes between the look at the head and the note that the save is over.
        with self._held.exclusive:
            try:
                head = self._held.read()
            except CheckpointError:
                # Another job may have made a lost head again, and listed them.
                return
            # A later version of the head refuses a swap that is under way still; until there is one, it may come.
            over = [name for name in self._failed if head.find(name) or head.change > self._unknown.get(name, -1)]
            for name in over:
                for table in (self._begun, self._metadata, self._unknown):
                    table.pop(name, None)
        for name in over:
            if head.find(name) is None:
                delete_attempt(self._objects, name)
            self._failed.pop(name, None)

    def _refuse_what_is_over(self, name: str, step: int) -> None:
        """Raise SaveFailed unless the save `name` is under way, of the time for which this process holds the folder."""
        claim = self._begun.get(name)
        if claim is None or name in self._failed:
            raise SaveFailed(step, "it was not started, or its files were removed")
        if claim != self._held.claim():
            raise SaveFailed(step, f"{self._objects.address} was released after the save began")

    def _sealed(self, place: ObjectPlace, manifest: Manifest) -> tuple[Entry, CheckpointInfo]:
        """Return the entry of the complete checkpoint at `place`, and what it is, after writing its manifest."""
        step, attempt = naming.parse_attempt(place.name) or (0, "")
        if manifest.step != step:
            raise SaveFailed(step, f"its manifest is of step {manifest.step}, not {step}")
        sealed = dataclasses.replace(
            manifest,
            files=manifest.files | self._described(place, manifest),
            extra=manifest.extra | {ATTEMPT: attempt, EPOCH: self._held.claim().epoch},
        )
        self._make_sure_of_files(place, sealed)
        path = f"{place.name}/{layout.MANIFEST}"
        faults.point("manifest", step=step, path=ObjectPath(f"{place}/{layout.MANIFEST}"))
        data = sealed.to_readable_json()
        # The manifest comes last: what has one is complete.
        self._objects.put(path, data)
        entry = Entry(step, attempt, sealed.kind, sealed.lineage.run_id, last_digest_of(data))
        return entry, self._manifests.remember(entry, sealed)

    def _described(self, place: ObjectPlace, manifest: Manifest) -> dict[str, FileRecord]:
        """Return the record of DCP's `.metadata`, of what was written where the manifest has no digest of it."""
        if DCP_METADATA in manifest.extra:
            return {}
        record = manifest.files.get(layout.METADATA)
        if record is None or not record.blocks:
            record = self._metadata.pop(place.name, None)
        if record is None:
            raise SaveFailed(manifest.step, f"{place}/{layout.METADATA} is missing")
        return {layout.METADATA: record}

    def _make_sure_of_files(self, place: ObjectPlace, sealed: Manifest) -> None:
        """Leave the files of `sealed`, and no others, at `place`. Raises SaveFailed."""
        there = {each.key.removeprefix(f"{place.name}/"): each.size for each in self._objects.list(f"{place.name}/")}
        sizes = recorded_sizes(sealed.files)
        if findings := size_findings(sizes, there):
            raise SaveFailed(sealed.step, f"{place}/{findings[0]}")
        if others := sorted(there.keys() - sizes.keys()):
            self._objects.delete([f"{place.name}/{name}" for name in others])

    def _swapped_in(self, entry: Entry, abandons: tuple[tuple[int, str], ...]) -> Head:
        def with_commit(head: Head) -> Head:
            self._refuse_what_is_over(entry.name, entry.step)
            self._unknown[entry.name] = head.change
            return head.with_commit(entry, abandons)

        try:
            # Whoever holds it: a job that took the folder since then found this commit in it.
            head = self._held.change(with_commit, commits=entry.name)
        except OSError as error:
            if entry.name not in self._unknown:
                raise
            path = f"{self._objects.address}/{entry.name}"
            finding = f"it is not known whether {path} was committed; the next start finds out"
            raise SaveFailed(entry.step, f"{error}; {finding}") from error
        self._unknown.pop(entry.name, None)
        return head

    def _clean_after(self, step: int, head: Head, abandons: tuple[tuple[int, str], ...]) -> None:
        """Delete what the commit of `step` replaced, and what failed saves left; log a warning if that fails."""
        for entry in head.entries:
            if entry.status is Status.ABANDONED and (entry.step, entry.run_id) in abandons:
                logger.info("Step %d is of an abandoned branch and is set aside: %s", entry.step, entry.name)
        try:
            for entry in head.entries:
                if entry.step == step and entry.status is Status.RETIRED:
                    self._held.delete(entry.name)
            self._remove_failed()
        except (OSError, CheckpointError) as error:
            logger.warning("Step %d is saved, but what it replaced could not be removed: %s", step, error)
