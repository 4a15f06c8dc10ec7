"""What is in a folder of checkpoints in an object store, for a person: the same as `inventory` of a folder on disk.

One listing and each manifest once; all of it again if a job committed or removed something meanwhile. Nothing is
changed. What is in no head is a save that is under way or was cut off; unknown names are left out.
"""

from __future__ import annotations

from dataclasses import replace

from torchtitan_lite.bucket import naming
from torchtitan_lite.bucket.bucket_store import BucketStore
from torchtitan_lite.bucket.head import Entry, Head, Status
from torchtitan_lite.bucket.manifests import read_manifest, size_findings
from torchtitan_lite.bucket.naming import AttemptObjects
from torchtitan_lite.disk.threads import in_threads
from torchtitan_lite.errors import CheckpointDamaged, CheckpointUnreadable, UnknownFormat
from torchtitan_lite.examining.inventory import (
    FolderState,
    ListedCheckpoint,
    in_short,
    managed,
    sorted_entries,
    state_of_error,
    with_abandoned,
)
from torchtitan_lite.store import layout
from torchtitan_lite.store.files_of_ranks import recorded_sizes

_AT_A_TIME = 16
"""Manifests, each of which takes tens of milliseconds, whatever its size."""
_STATES = {
    Status.KEPT: FolderState.COMMITTED,
    Status.WEIGHTS: FolderState.SET_ASIDE,
    Status.CORRUPT: FolderState.QUARANTINED,
    Status.ABANDONED: FolderState.ABANDONED,
    Status.RETIRED: FolderState.BEING_REMOVED,
}
_FINDINGS = {
    Status.WEIGHTS: "a full checkpoint of its step replaced it",
    Status.CORRUPT: "it was found damaged",
    Status.RETIRED: "it is being removed, or its removal was cut off",
}
_HALF_WRITTEN = "a save into it is under way or was cut off"


def stored_inventory(store: BucketStore) -> tuple[Head, list[ListedCheckpoint]]:
    """Return the head of `store`, and what is in its folder, by ascending step. Raises OSError."""
    while True:
        head = store.head()
        found = _stored_entries(store, head)
        # Else parts of what was committed or removed since then were not seen.
        if store.head().entries == head.entries:
            return head, sorted_entries(with_abandoned(found))


def _stored_entries(store: BucketStore, head: Head) -> list[ListedCheckpoint]:
    objects = naming.attempts_in(store.objects.list(naming.CHECKPOINTS))
    found: dict[str, ListedCheckpoint] = {}

    def read(entry: Entry) -> None:
        found[entry.name] = _attempt_entry(store, entry, objects.get(entry.name, AttemptObjects()))

    # What is set aside or being removed, and whose objects are gone, was removed.
    entries = [entry for entry in head.entries if entry.status is Status.KEPT or entry.name in objects]
    in_threads(entries, min(_AT_A_TIME, len(entries)), lambda: read)
    known = {entry.name for entry in head.entries}
    for name in objects.keys() - known:
        found[name] = _unusable_attempt(name, objects[name], FolderState.HALF_WRITTEN, _HALF_WRITTEN)
    return list(found.values())


def _attempt_entry(store: BucketStore, entry: Entry, objects: AttemptObjects) -> ListedCheckpoint:
    place, is_kept = store.place_of(entry.name), entry.status is Status.KEPT
    state, finding = _STATES[entry.status], "; ".join(entry.findings) or _FINDINGS.get(entry.status, "")
    try:
        manifest, _ = read_manifest(store.objects, place, entry.step, entry.digest)
    except (CheckpointDamaged, CheckpointUnreadable, UnknownFormat) as error:
        state, finding = state_of_error(error) if is_kept else (state, finding)
    else:
        sizes = recorded_sizes(manifest.files)
        if is_kept and (findings := size_findings(sizes, objects.sizes)):
            state, finding = FolderState.DAMAGED, in_short(findings)
        return replace(managed(place, manifest, state, finding), has_name_of_step=is_kept)
    return replace(_unusable_attempt(entry.name, objects, state, finding), has_name_of_step=is_kept)


def _unusable_attempt(name: str, objects: AttemptObjects, state: FolderState, finding: str) -> ListedCheckpoint:
    step, _ = naming.parse_attempt(name) or (None, "")
    nbytes = sum(size for file, size in objects.sizes.items() if file != layout.MANIFEST)
    return ListedCheckpoint(
        name=name, state=state, step=step, nbytes=nbytes, created_at=objects.modified, finding=finding
    )
