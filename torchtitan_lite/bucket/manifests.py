"""The manifests of the checkpoints in an object store, each read once.

A manifest is never written again, so what was read stays true. The head names the digest of each: one with another
digest is not what was committed. A manifest that the store does not give is neither intact nor damaged: a caller who
needs it gets the error, all others one warning. Any thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torchtitan_lite import faults
from torchtitan_lite.bucket.head import Entry
from torchtitan_lite.bucket.objects import Objects
from torchtitan_lite.disk.threads import in_threads
from torchtitan_lite.errors import CheckpointDamaged, reading
from torchtitan_lite.store import layout
from torchtitan_lite.store.files_of_ranks import recorded_sizes
from torchtitan_lite.store.known_manifests import Manifests, checkpoint_info
from torchtitan_lite.store.manifest import CheckpointInfo, Manifest, last_digest_of
from torchtitan_lite.store.place import ObjectPlace

_AT_A_TIME = 16
"""Requests: each takes tens of milliseconds, even the smallest."""


class _ReadManifest(NamedTuple):
    info: CheckpointInfo
    sizes: Mapping[str, int]


class AttemptManifests(Manifests):
    """The manifests that were read in the folder of `objects`."""

    def __init__(self, objects: Objects) -> None:
        super().__init__()
        self._objects = objects
        self._known: dict[str, _ReadManifest] = {}

    def find(self, entry: Entry) -> CheckpointInfo:
        """Return the checkpoint of `entry`. Raises CheckpointDamaged, CheckpointUnreadable or FormatTooNew."""
        return self._read(entry).info

    def known_sizes(self, name: str) -> Mapping[str, int] | None:
        """Return the sizes in bytes of the files of the checkpoint `name`; None if its manifest was not read yet."""
        known = self._known.get(name)
        return None if known is None else known.sizes

    def remember(self, entry: Entry, manifest: Manifest) -> CheckpointInfo:
        """Remember `manifest`, which was just written, as that of `entry`; return what it says."""
        known = self._known[entry.name] = _known_manifest(ObjectPlace(self._objects.address, entry.name), manifest)
        return known.info

    def intact(self, entries: Sequence[Entry]) -> list[CheckpointInfo]:
        """Return those of `entries` that are intact, by the same order. Raises FormatTooNew."""
        # Without this, the table would keep an entry for each step that was ever purged.
        for name in set(self._known) - {entry.name for entry in entries}:
            self._known.pop(name, None)
        unread = [entry for entry in entries if entry.name not in self._known]
        in_threads(unread, min(_AT_A_TIME, len(unread)), lambda: self.find_intact)
        found = (self.find_intact(entry) for entry in entries)
        return [info for info in found if info is not None]

    def find_intact(self, entry: Entry) -> CheckpointInfo | None:
        """Return the same as `find`, as `if_intact` does."""
        return self.if_intact(lambda: self.find(entry))

    def _read(self, entry: Entry) -> _ReadManifest:
        if (known := self._known.get(entry.name)) is None:
            place = ObjectPlace(self._objects.address, entry.name)
            faults.point("listing", step=entry.step)
            manifest, _ = read_manifest(self._objects, place, entry.step, entry.digest)
            known = self._known[entry.name] = _known_manifest(place, manifest)
            self._warned.pop(str(place), None)
        return known


def read_manifest(objects: Objects, place: ObjectPlace, step: int, digest: str = "") -> tuple[Manifest, str]:
    """Return the manifest of `step` at `place`, and the digest that it ends with: `digest`, if that is not empty.

    Raises CheckpointDamaged, also where there is none, CheckpointUnreadable and FormatTooNew.
    """
    with reading(place):
        try:
            try:
                return _parsed_manifest(objects, place, step, digest)
            except CheckpointDamaged:
                # Once more, because what was read may have been damaged on its way.
                return _parsed_manifest(objects, place, step, digest)
        except FileNotFoundError:
            raise CheckpointDamaged(str(place), f"{layout.MANIFEST} is missing") from None


def _known_manifest(place: ObjectPlace, manifest: Manifest) -> _ReadManifest:
    return _ReadManifest(checkpoint_info(place, manifest), recorded_sizes(manifest.files))


def size_findings(expected: Mapping[str, int], found: Mapping[str, int]) -> list[str]:
    """Return what is wrong with the sizes `found` of files, by name, one sentence each; empty if nothing is."""
    return [
        f"{name} has {found[name]} bytes, not {size}" if name in found else f"{name} is missing"
        for name, size in sorted(expected.items())
        if found.get(name) != size
    ]


def _parsed_manifest(objects: Objects, place: ObjectPlace, step: int, digest: str) -> tuple[Manifest, str]:
    data, _ = objects.get(f"{place.name}/{layout.MANIFEST}")
    try:
        found = last_digest_of(data)
        manifest = Manifest.parse(data, f"{place}/{layout.MANIFEST}")
        if not found or found != (digest or found):
            raise ValueError(f"expected {digest or 'a digest'} as its last line, found {found or 'none'}")
        if manifest.step != step:
            raise ValueError(f"it is the manifest of step {manifest.step}")
    except ValueError as error:
        raise CheckpointDamaged(str(place), f"{layout.MANIFEST}: {error}") from None
    return manifest, found
