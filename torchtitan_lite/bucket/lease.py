"""One job at a time writes a folder in an object store.

The folder is held by the job that its head names, with an epoch that no earlier holder had. Taking it is a swap of the
head, and so is everything that a holder makes visible; so a holder that was fenced off cannot, however long it was
stopped. That it lives is shown by an object of its epoch which it writes again and again. Another start watches by its
own clock whether that changes: no two clocks are ever compared, and time in which the store did not answer does not
count.
"""

from __future__ import annotations

import functools
import itertools
import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple

from torchtitan_lite import faults
from torchtitan_lite.bucket import naming
from torchtitan_lite.bucket.garbage import delete_attempt
from torchtitan_lite.bucket.head import Entry, Head
from torchtitan_lite.bucket.head_file import BucketClock, FoundHead, HeadFile
from torchtitan_lite.bucket.identity import make_id
from torchtitan_lite.bucket.objects import Condition, ConditionFailed, Objects, StoreUnavailable
from torchtitan_lite.bucket.probe import probe
from torchtitan_lite.bucket.recovery import highest_beat, rebuilt
from torchtitan_lite.errors import CheckpointError, FolderInUse, LeaseLost
from torchtitan_lite.log import logger
from torchtitan_lite.store.holder import Holder

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


class Sign(NamedTuple):
    """What changes while a holder lives. Pins are not in it: any process may change those."""

    epoch: int
    token: str
    beat: Condition | None
    entries: tuple[Entry, ...]


@dataclass(frozen=True)
class Standing:
    """How it stands with a folder that another start wants."""

    found: FoundHead
    sign: Sign

    @property
    def holder(self) -> Holder | None:
        """Return the job that holds it, as far as known."""
        return None if self.found.head is None else self.found.head.holder

    @property
    def holder_name(self) -> str:
        """Return the job that may hold it, in words."""
        return "an unknown job" if self.found.head is None else self.found.head.holder_name

    def is_free_for(self, mine: Holder) -> bool:
        """Return whether no job writes the folder, for certain."""
        if self.found.head is None:
            return self.sign.beat is None
        # The older store of this very process was dropped without close(), as in notebooks; its claim is outdated then.
        holder = self.holder
        return holder is None or holder.has_ended() or holder.is_same_process_as(mine)

    def patience_seconds(self, timeout_seconds: float) -> float:
        """Return how long the holder must be silent, by its own beats or by ours, whichever is slower."""
        beat_seconds = 0.0 if self.found.head is None else self.found.head.beat_seconds
        return max(timeout_seconds, BEATS_OF_SILENCE * beat_seconds)


class BucketLease:
    """The right to write the folder of `objects`. **Coordinator only**.

    `timeout_seconds`: how long a holder must be silent before another job takes over, if nothing else is known of it.
    """

    def __init__(
        self,
        objects: Objects,
        file: HeadFile,
        *,
        run_id: str,
        timeout_seconds: float = BEATS_OF_SILENCE * BEAT_SECONDS,
        clock: BucketClock | None = None,
        probe: Callable[[Objects], None] = probe,
    ) -> None:
        self._objects = objects
        self._file = file
        self._run_id = run_id
        self._timeout_seconds = timeout_seconds
        self._beat_seconds = min(BEAT_SECONDS, timeout_seconds / BEATS_OF_SILENCE)
        self._clock = clock or BucketClock()
        self._probe = probe
        self._heart: _BucketHeart | None = None

    def take(self) -> None:
        """Take the folder and show that this job lives until `release`; do nothing if this lease has it already.

        Takes over at once from a process that is known to have ended, and from this very process; from any other holder
        after its silence. Blocks for that long. A head that is lost or damaged is made again from the manifests, after
        the same silence. Raises FolderInUse as soon as the holder shows that it lives, FolderUnusable where the store
        ignores conditions, and OSError.
        """
        if self._heart is not None:
            return
        make_id(self._objects, self._probe)
        mine = Holder.this_process(self._run_id, self._clock.now())
        epoch = self._contend(mine)
        self._heart = _BucketHeart(self._objects, mine, epoch, self._beat_seconds, self._clock)
        self._heart.start()

    @property
    def claim(self) -> Claim | None:
        """What the holder shows with each change; None unless between `take` and `release`."""
        heart = self._heart
        return None if heart is None else Claim(heart.epoch, heart.holder.token)

    @property
    def token(self) -> str:
        """The random token in the head. Between `take` and `release`."""
        assert self._heart is not None, "token before take()"
        return self._heart.holder.token

    @property
    def timeout_seconds(self) -> float:
        """How long a holder must be silent before another job takes over."""
        return self._timeout_seconds

    def is_visible(self, token: str) -> bool:
        """Return whether this host reads a head with `token`. **Any rank**; changes nothing.

        Raises OSError where the store does not let this host read: it is no other folder then.
        """
        try:
            holder = self._file.read()[0].holder
        except (FileNotFoundError, CheckpointError):
            return False
        return holder is not None and holder.token == token

    def check(self) -> None:
        """Raise LeaseLost unless the folder is still ours, OSError if that could not be read. Any thread.

        Between `take` and `release`. No commit relies on it: it finds out early.
        """
        assert self.claim is not None, "check() before take()"
        try:
            refuse_others(self._file.read()[0], self.claim, self._objects.address)
        except FileNotFoundError:
            raise head_is_gone(self._objects.address) from None

    def release(self) -> None:
        """Give the folder up, if it is still ours; a head that stays is a warning. Idempotent."""
        heart, self._heart = self._heart, None
        # A forked child has this object, too, but holds nothing.
        if heart is None or heart.holder.pid != os.getpid():
            return
        heart.stop()
        claim = Claim(heart.epoch, heart.holder.token)
        try:
            self._file.change(lambda head: head.released() if head.is_held_by(*claim) else head)
        except (OSError, CheckpointError) as error:
            logger.warning("Could not give %s up: %s; the next job sees that this one ended", self._file.path, error)

    def _contend(self, mine: Holder) -> int:
        """Make the folder ours; return its epoch. Raises FolderInUse."""
        watched: Sign | None = None
        waited, lost = 0.0, 0
        while True:
            standing = self._look()
            is_free = standing.is_free_for(mine)
            if is_free or (standing.sign == watched and waited >= standing.patience_seconds(self._timeout_seconds)):
                if (epoch := self._succeed(standing, mine)) is not None:
                    self._log_succession(standing, mine, waited)
                    return epoch
                lost += 1
                watched = watched or standing.sign
                if lost < _MOST_SWAPS:
                    continue
            if watched is None:
                watched = standing.sign
                self._log_waiting(standing)
            elif standing.sign != watched or lost >= _MOST_SWAPS:
                raise FolderInUse(self._objects.address, standing.holder_name)
            self._clock.sleep(self._beat_seconds / 2)
            # Not the time that a look took: where the store hung, it hung for the holder, too.
            waited += self._beat_seconds / 2

    def _look(self) -> Standing:
        found = self._file.look()
        if found.head is None:
            epoch, beat = highest_beat(self._objects)
            return Standing(found, Sign(epoch, "", beat, ()))
        head, holder = found.head, found.head.holder
        return Standing(found, Sign(head.epoch, holder.token if holder else "", self._beat_of(head), head.entries))

    def _beat_of(self, head: Head) -> Condition | None:
        if head.holder is None:
            return None
        try:
            return self._objects.head(naming.beat_key(head.epoch)).condition
        except FileNotFoundError:
            return None

    def _succeed(self, standing: Standing, mine: Holder) -> int | None:
        """Return our epoch after the head was swapped for one that names us; None if another version is there."""
        found = standing.found
        head = (found.head or self._made_again(found)).taken_by(mine, self._beat_seconds)
        try:
            self._file.write(head, found.condition)
        except (ConditionFailed, FileNotFoundError, StoreUnavailable):
            # It may be ours for all that: the answer was lost, or the client tried again after it was.
            there = self._file.look().head
            if there is None or not there.is_held_by(head.epoch, mine.token):
                return None
        return head.epoch

    def _made_again(self, found: FoundHead) -> Head:
        head = rebuilt(self._objects)
        if found.condition is not None or head != Head():
            state = "lost" if found.condition is None else "damaged"
            logger.warning(
                "%s is %s and is made again from %d manifests; steps that were pinned are not any more",
                self._file.path,
                state,
                len(head.entries),
            )
        return head

    def _log_succession(self, standing: Standing, mine: Holder, waited: float) -> None:
        holder, address = standing.holder, self._objects.address
        if holder is not None and standing.is_free_for(mine):
            how = "which has ended" if holder.has_ended() else "of this very process"
            logger.info("Taking over %s from %s, %s", address, holder, how)
        elif waited:
            logger.warning("Taking over %s from %s: no sign of life for %g s", address, standing.holder_name, waited)

    def _log_waiting(self, standing: Standing) -> None:
        logger.info(
            "%s is in use by %s. Waiting up to %g s to see whether it lives",
            self._objects.address,
            standing.holder_name,
            standing.patience_seconds(self._timeout_seconds),
        )


def refuse_others(head: Head, claim: Claim, address: str) -> None:
    """Raise LeaseLost unless `head` is held with `claim`."""
    if not head.is_held_by(*claim):
        raise LeaseLost(address, head.holder_name)


def head_is_gone(address: str) -> LeaseLost:
    """Return the error of a holder whose head is not there any more."""
    return LeaseLost(address, _GONE)


class _BucketHeart:
    """Writes the beat of `epoch` at once and then every `seconds`, from a thread."""

    def __init__(self, objects: Objects, holder: Holder, epoch: int, seconds: float, clock: BucketClock) -> None:
        self.holder = holder
        self.epoch = epoch
        self._objects = objects
        self._seconds = seconds
        self._clock = clock
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"heartbeat of {objects.address}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop the beats. One that hangs in the store is not waited for: it can do no harm."""
        self._stopped.set()
        self._thread.join(self._seconds)

    def _run(self) -> None:
        is_failing = False
        for number in itertools.count(1):
            try:
                self._beat(number)
                is_failing = False
            except OSError as error:
                # One failed beat does not lose the folder: another start waits for several, and a swap decides.
                if not is_failing:
                    logger.warning("Could not show in %s that this job lives: %s", self._objects.address, error)
                is_failing = True
            if self._clock.wait(self._stopped, self._seconds):
                return

    def _beat(self, number: int) -> None:
        faults.point("heartbeat")
        # Each one differs from the last, or the store would give it the same version.
        text = f"{self.holder.token} {number} {int(self._clock.now())}\n"
        self._objects.put(naming.beat_key(self.epoch), text.encode())


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
