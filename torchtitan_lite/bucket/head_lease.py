"""One job at a time writes a folder in an object store.

The folder is held by the job that its head names, with an epoch that no earlier holder had. Taking it is a swap of the
head, and so is everything that a holder makes visible; so a holder that was fenced off cannot, however long it was
stopped. That it lives is shown by an object of its epoch which it writes again and again.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from torchtitan_lite import faults
from torchtitan_lite.bucket import naming
from torchtitan_lite.bucket.head import Head
from torchtitan_lite.bucket.head_file import FoundHead, HeadFile
from torchtitan_lite.bucket.identity import folder_id, probe
from torchtitan_lite.bucket.objects import ConditionFailed, Objects, StoreUnavailable
from torchtitan_lite.bucket.recovery import highest_beat, rebuilt
from torchtitan_lite.errors import CheckpointError, FolderInUse, LeaseLost
from torchtitan_lite.log import logger
from torchtitan_lite.store import layout
from torchtitan_lite.store.holder import Holder
from torchtitan_lite.store.lease import Lease, LeaseClock, LockSeen, process_lock

BEAT_SECONDS = 10.0
"""A request each; rare enough to cost nothing, in money either."""
BEATS_OF_SILENCE = 3
"""How many beats a holder must miss before another start takes over."""
_MOST_SWAPS = 20
"""That a start loses to others, whose holders have all ended, before it gives up."""
_GONE = f"no job (its {naming.HEAD} is gone)"


class Claim(NamedTuple):
    """What a holder shows with each change: its epoch and its token."""

    epoch: int
    token: str


class BucketLease(Lease):
    """The lease of the folder of `objects`, in whose head `file` the holder stands."""

    def __init__(
        self,
        objects: Objects,
        file: HeadFile,
        *,
        run_id: str,
        timeout_seconds: float = BEATS_OF_SILENCE * BEAT_SECONDS,
        clock: LeaseClock | None = None,
        probe: Callable[[Objects], None] = probe,
    ) -> None:
        beat_seconds = min(BEAT_SECONDS, timeout_seconds / BEATS_OF_SILENCE)
        super().__init__(objects.address, run_id, timeout_seconds, beat_seconds, clock)
        self._objects = objects
        self._file = file
        self._probe = probe
        self._epoch = 0

    @property
    def claim(self) -> Claim | None:
        """What the holder shows with each change; None unless between `take` and `release`."""
        heart = self._heart
        return None if heart is None else Claim(self._epoch, heart.holder.token)

    def is_visible(self, token: str) -> bool:
        try:
            holder = self._file.read()[0].holder
        except (FileNotFoundError, CheckpointError):
            return False
        return holder is not None and holder.token == token

    def check(self) -> None:
        """Raise LeaseLost unless the folder is still ours. No commit relies on it: it finds out early."""
        assert self.claim is not None, "check() before take()"
        held_head(self._file, self.claim, self._objects.address)

    def _prepare(self) -> None:
        folder_id(self._objects, self._probe, make=True)

    def _look(self) -> LockSeen:
        found = self._file.look()
        if (head := found.head) is None:
            epoch, beat = highest_beat(self._objects)
            return LockSeen(found, None, "an unknown job", (epoch, "", beat, ()), is_free=beat is None)
        holder, beat = head.holder, None
        if holder is not None:
            with suppress(FileNotFoundError):
                beat = self._objects.head(naming.beat_key(head.epoch)).condition
        # Pins are not in it: any process may change those.
        sign = (head.epoch, "" if holder is None else holder.token, beat, head.entries)
        # By its own beats or by ours, whichever is slower: the two jobs may have different settings.
        silence_seconds = BEATS_OF_SILENCE * head.beat_seconds
        return LockSeen(found, holder, head.holder_name, sign, holder is None, silence_seconds)

    def _swap(self, seen: LockSeen, mine: Holder) -> bool:
        """Return True once the head was swapped for one that names us. Raise FolderInUse if another job was faster.

        A head that is lost or damaged is made again from the manifests, after the same silence.
        """
        there = seen
        for _ in range(_MOST_SWAPS):
            if self._swap_once(there.found, mine):
                return True
            there = self._look()
            if there.sign != seen.sign and not there.is_free_for(mine):
                break
        raise FolderInUse(self._objects.address, there.holder_name)

    def _make_sure(self, mine: Holder) -> None:
        """Do nothing: every job sees the same head."""

    def _swap_once(self, found: FoundHead, mine: Holder) -> bool:
        head = (found.head or self._made_again(found)).taken_by(mine, self._beat_seconds)
        self._epoch = head.epoch
        try:
            self._file.write(head, found.condition)
        except (ConditionFailed, FileNotFoundError, StoreUnavailable):
            # It may be ours for all that: the answer was lost, or the client tried again after it was.
            there = self._file.look().head
            return there is not None and there.is_held_by(head.epoch, mine.token)
        return True

    def _made_again(self, found: FoundHead) -> Head:
        head = rebuilt(self._objects)
        if found.condition is not None or head != Head():
            state = "lost" if found.condition is None else "damaged"
            logger.warning(
                "%s is %s and is rebuilt from %d manifests without the pins. Pin steps again with torchtitan-lite pin",
                self._file.path,
                state,
                len(head.entries),
            )
        return head

    def _beat(self, holder: Holder, number: int) -> bool:
        faults.point("heartbeat")
        # Each one differs from the last, or the store would give it the same version.
        text = f"{holder.token} {number + 1} {int(self._clock.now())}\n"
        self._objects.put(naming.beat_key(self._epoch), text.encode())
        return True

    def _give_up(self, holder: Holder) -> None:
        epoch = self._epoch
        self._file.change(lambda head: head.released() if head.is_held_by(epoch, holder.token) else head)


def refuse_others(head: Head, claim: Claim, address: str) -> None:
    """Raise LeaseLost unless `head` is held with `claim`."""
    if not head.is_held_by(*claim):
        raise LeaseLost(address, head.holder_name)


def head_is_gone(address: str) -> LeaseLost:
    """Return the error of a holder whose head is not there any more."""
    return LeaseLost(address, _GONE)


def held_head(file: HeadFile, claim: Claim, address: str) -> Head:
    """Return the head, which is held with `claim`. Raises LeaseLost if it is not, and OSError."""
    try:
        head = file.read()[0]
    except FileNotFoundError:
        raise head_is_gone(address) from None
    refuse_others(head, claim, address)
    return head


class HeldHead:
    """The head `file` of the folder of `objects`, for the holder of the last lease that was made here."""

    def __init__(self, objects: Objects, file: HeadFile) -> None:
        self.file = file
        self.lease: BucketLease | None = None
        self._objects = objects
        self.exclusive = process_lock(objects.address)
        """The lock that orders the swaps of this process here: a background purge and commits."""
        self._gone: set[str] = set()
        """Retired checkpoints whose objects are gone; their entries go with the next swap."""

    def claim(self) -> Claim:
        """Return what the holder shows with each change. Raises CheckpointError if this process holds nothing."""
        claim = None if self.lease is None else self.lease.claim
        if claim is None:
            raise CheckpointError(
                f"{self._objects.address} is not locked by this process, so it changes nothing there."
            )
        return claim

    def read(self) -> Head:
        """Return the head, which is ours. Raises LeaseLost, CheckpointError without a lease, and OSError."""
        return held_head(self.file, self.claim(), self._objects.address)

    def change(self, make: Callable[[Head], Head], commits: str = "") -> Head:
        """Replace the head by what `make` returns for it, if it is ours, and return that; see `HeadFile.change`.

        A head that has the checkpoint `commits` already is returned as it is, whoever holds it. Raises as `read`; after
        an OSError the head may be changed.
        """
        claim, gone = self.claim(), frozenset(self._gone)

        def changed(head: Head) -> Head:
            if commits and head.find(commits) is not None:
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


def delete_attempt(objects: Objects, name: str) -> None:
    """Delete all objects of the checkpoint called `name`. May be cut and repeated."""
    # The manifest first: a checkpoint without some of its objects is never taken for one.
    objects.delete([f"{name}/{layout.MANIFEST}"])
    objects.delete([each.key for each in objects.list(f"{name}/")])
