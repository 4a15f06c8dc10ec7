"""Checkpoints in an object store that were set aside, and become the checkpoint of their step again.

That is one swap of the head, which sets the branch aside that abandons one: a cut leaves the state before it or after.
**The caller holds the lease**.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torchtitan_lite.bucket.head import Head, Status
from torchtitan_lite.bucket.lease import HeldHead
from torchtitan_lite.bucket.manifests import read_manifest
from torchtitan_lite.bucket.objects import Objects
from torchtitan_lite.errors import CheckpointNotFound
from torchtitan_lite.log import logger
from torchtitan_lite.store import layout
from torchtitan_lite.store.place import ObjectPlace, Place
from torchtitan_lite.store.protocol import ABANDONED, CORRUPT, SetAside, StoresCheckpoints, nothing
from torchtitan_lite.store.set_aside import branch_in_the_way

_WHY = {Status.CORRUPT: CORRUPT, Status.ABANDONED: ABANDONED}


class BucketShelf:
    """What was set aside in the folder of `store`, whose head is `held`; see `Shelf`."""

    def __init__(self, store: StoresCheckpoints, objects: Objects, held: HeldHead) -> None:
        self._store, self._objects, self._held = store, objects, held

    def find(self, name: str) -> SetAside:
        head = self._held.read()
        entry = head.find(name)
        if entry is None or entry.status not in _WHY:
            there = ", ".join(entry.name for entry in head.entries if entry.status in _WHY)
            finding = (
                f"it is not set aside as damaged or abandoned ({self._store.address} has {there or 'nothing that is'})"
            )
            raise CheckpointNotFound(f"{self._store.address}/{name}", None, finding=finding)
        place = ObjectPlace(self._objects.address, name)
        manifest, _ = read_manifest(self._objects, place, entry.step, entry.digest)
        return SetAside(place, entry.step, _WHY[entry.status], manifest)

    def in_the_way(self, aside: SetAside) -> Place | None:
        entry = self._held.read().kept_of(aside.step)
        return None if entry is None else self._store.place_of(entry.name)

    def bring_back(self, aside: SetAside, fence: Callable[[], object] = nothing) -> Sequence[Place]:
        fence()
        branch = {info.path.name for info in branch_in_the_way(self._store, aside)}

        def brought_back(head: Head) -> Head:
            return head.with_brought_back(aside.folder.name, branch)

        self._held.change(brought_back)
        try:
            # It is undamaged: these findings are no longer true.
            self._objects.delete([f"{aside.folder.name}/{layout.FINDINGS}"])
        except OSError as error:
            logger.warning("Could not delete %s/%s: %s", aside.folder, layout.FINDINGS, error)
        return [self._store.place_of(name) for name in sorted(branch)]
