"""A head made from the manifests, where `head.json` is lost or damaged.

A checkpoint counts if its manifest has its own digest and its files have their sizes; what has a manifest and does not
count is corrupt, so it stays, and replaces nothing that counts. The commits are repeated in their order, by epoch and
time, so what was replaced or abandoned is so again; but weights stay aside where there is a full checkpoint of their
step, because their commit may have failed, and the full one has the weights. Pins are not in manifests: they are lost.
Reads no data and changes nothing; what cannot be read ends it, because it may be what was committed last.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from torchtitan_lite.bucket import naming
from torchtitan_lite.bucket.head import Entry, Head, Status
from torchtitan_lite.bucket.manifests import read_manifest, size_findings
from torchtitan_lite.bucket.objects import Condition, Objects
from torchtitan_lite.errors import CheckpointDamaged, CheckpointUnreadable, FolderUnusable
from torchtitan_lite.store import layout
from torchtitan_lite.store.files_of_ranks import recorded_sizes
from torchtitan_lite.store.lineage import Lineage
from torchtitan_lite.store.manifest import UNKNOWN, CheckpointKind
from torchtitan_lite.store.place import ObjectPlace

ATTEMPT = "attempt"
"""Field of a manifest's `extra`: the attempt that wrote it."""
EPOCH = "epoch"
"""Field of a manifest's `extra`: the epoch of the job that wrote it."""


@dataclass(frozen=True)
class FoundCommit:
    """A checkpoint as its objects describe it."""

    entry: Entry
    epoch: int = 0
    created_at: float = 0.0
    lineage: Lineage = UNKNOWN

    def onto(self, head: Head) -> Head:
        """Return `head` after this commit."""
        findings, before = self.entry.findings, head.kept_of(self.entry.step)
        # The commit of its branch that listed them may have been removed since.
        abandons = {(e.step, e.run_id) for e in head.kept if self.lineage.leaves(e.step, e.run_id)}
        replaced = None if before is None or (before.step, before.run_id) in abandons else before
        if not self.entry.digest or (findings and replaced):
            # It may never have been committed, and must not replace what is intact.
            return head.with_entry(self.entry.damaged(findings))
        if replaced and (replaced.kind, self.entry.kind) == (CheckpointKind.FULL, CheckpointKind.WEIGHTS_ONLY):
            return head.with_entry(dataclasses.replace(self.entry, status=Status.WEIGHTS))
        after = head.with_commit(self.entry, abandons)
        return after.with_corrupt(self.entry.name, findings) if findings else after


def rebuilt(objects: Objects) -> Head:
    """Return the head that the manifests in the folder amount to, with the highest epoch that they or beats name.

    Raises FormatTooNew, FolderUnusable for a manifest that cannot be read, and OSError.
    """
    try:
        found = naming.attempts_in(objects.list(naming.CHECKPOINTS))
        attempts = sorted((name, each.sizes) for name, each in found.items() if layout.MANIFEST in each.sizes)
        commits = [_found_commit(objects, name, sizes) for name, sizes in attempts]
    except CheckpointUnreadable as error:
        path = f"{objects.address}/{naming.HEAD}"
        raise FolderUnusable(path, f"it is lost or damaged, and {error.path} cannot be read: {error.cause}") from error
    head = Head(epoch=max([highest_beat(objects)[0], *(each.epoch for each in commits)]))
    for each in sorted(commits, key=lambda each: (each.epoch, each.created_at)):
        head = each.onto(head)
    return head


def highest_beat(objects: Objects) -> tuple[int, Condition | None]:
    """Return the highest epoch with a beat, and the version of that; (0, None) if there is none."""
    beats = [(epoch, found) for found in objects.list(naming.BEATS) if (epoch := naming.parse_beat(found.key))]
    if not beats:
        return 0, None
    epoch, latest = max(beats, key=lambda beat: beat[0])
    return epoch, latest.condition


def _found_commit(objects: Objects, name: str, sizes: Mapping[str, int]) -> FoundCommit:
    step, attempt = naming.parse_attempt(name) or (0, "")
    try:
        manifest, digest = read_manifest(objects, ObjectPlace(objects.address, name), step)
    except CheckpointDamaged as error:
        entry = Entry(step, attempt, CheckpointKind.FULL, UNKNOWN.run_id, "").damaged([error.finding])
        return FoundCommit(entry)
    findings = size_findings(recorded_sizes(manifest.files), sizes)
    if layout.FINDINGS in sizes:
        findings = [f"it was set aside; {layout.FINDINGS} says why"]
    entry = Entry(step, attempt, manifest.kind, manifest.lineage.run_id, digest, findings=tuple(findings))
    epoch = manifest.extra.get(EPOCH)
    epoch = epoch if type(epoch) is int and epoch >= 0 else 0
    return FoundCommit(entry, epoch, manifest.created_at, manifest.lineage)
