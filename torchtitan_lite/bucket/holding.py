"""Changes of the head by the job that holds the folder.

Each is one swap, and it is refused if another job took the folder: that swapped the head, too, so the version that a
change was made from is outdated then. Only pins are changed by others; after that a change is made again.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

from torchtitan_lite.bucket.garbage import delete_attempt
from torchtitan_lite.bucket.head import Head
from torchtitan_lite.bucket.head_file import HeadFile
from torchtitan_lite.bucket.lease import BucketLease, Claim, head_is_gone, refuse_others
from torchtitan_lite.bucket.objects import Objects
from torchtitan_lite.errors import CheckpointError


@functools.cache
def _lock_of(address: str) -> AbstractContextManager[bool]:
    """Return the lock that all stores of this process share for the folder `address`."""
    # Reentrant: housekeeping holds it while it calls `discard`, which takes it, too.
    return threading.RLock()


def _is_never_done(head: Head) -> bool:
    return False


class HeldHead:
    """The head `file` of the folder of `objects`, for the holder of the last lease that was made here."""

    def __init__(self, objects: Objects, file: HeadFile) -> None:
        self.file = file
        self.lease: BucketLease | None = None
        self._objects = objects
        self._gone: set[str] = set()
        """Retired checkpoints whose objects are gone; their entries go with the next swap."""

    @property
    def exclusive(self) -> AbstractContextManager[bool]:
        """Return the lock that orders the swaps of this process here: a background purge and commits."""
        return _lock_of(self._objects.address)

    def claim(self) -> Claim:
        """Return what the holder shows with each change. Raises CheckpointError if this process holds nothing."""
        claim = None if self.lease is None else self.lease.claim
        if claim is None:
            raise CheckpointError(f"{self._objects.address} is not held by this process, so it changes nothing there.")
        return claim

    def read(self) -> Head:
        """Return the head, which is ours. Raises LeaseLost, CheckpointError without a lease, and OSError."""
        claim = self.claim()
        try:
            head = self.file.read()[0]
        except FileNotFoundError:
            raise head_is_gone(self._objects.address) from None
        refuse_others(head, claim, self._objects.address)
        return head

    def change(self, make: Callable[[Head], Head], is_done: Callable[[Head], bool] = _is_never_done) -> Head:
        """Replace the head by what `make` returns for it, if it is ours, and return that; see `HeadFile.change`.

        A head for which `is_done` is returned as it is, whoever holds it. Raises as `read`; after an OSError the head
        may be changed.
        """
        claim, gone = self.claim(), frozenset(self._gone)

        def changed(head: Head) -> Head:
            if is_done(head):
                return head
            refuse_others(head, claim, self._objects.address)
            return make(head).without(gone)

        try:
            with self.exclusive:
                head = self.file.change(changed)
        except FileNotFoundError:
            raise head_is_gone(self._objects.address) from None
        self._gone.difference_update(gone)
        return head

    def delete(self, name: str) -> None:
        """Delete the objects of the retired checkpoint `name`; its entry goes with the next swap. Raises OSError."""
        delete_attempt(self._objects, name)
        self._gone.add(name)
