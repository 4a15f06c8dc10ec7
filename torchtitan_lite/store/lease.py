"""One job at a time writes a folder: `Lease`, and that of a folder on a disk.

A job holds the folder while the folder's lock names it, and shows that it lives by a beat, again and again, from a
thread. Another start watches by its own clock whether the lock changes: no two clocks are ever compared, and time in
which the lock did not answer does not count. What a lock is, how it changes hands and how a beat gets into it is the
part of the subclasses: `FolderLease` here, `BucketLease` for an object store.

On a disk the lock is a file. Of all jobs that flock reaches exactly one can take it (`disk/lock_file.py`). Where flock
does not reach other hosts, a job that took the file of a silent holder looks again after a heartbeat, and a job that
lost finds out in `check`. Not covered: a process that is stopped for all of the time-out between `check` and the rename
that follows it.
"""

from __future__ import annotations

import functools
import itertools
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torchtitan_lite import faults
from torchtitan_lite.disk.durable import DISK, Durable
from torchtitan_lite.disk.lock_file import LockFile
from torchtitan_lite.disk.threads import daemon
from torchtitan_lite.errors import CheckpointError, FolderInUse, LeaseLost
from torchtitan_lite.log import logger
from torchtitan_lite.store import layout
from torchtitan_lite.store.holder import Holder

HEARTBEAT_SECONDS = 2.0
"""Several in the shortest sensible time-out, and rare enough to cost a network file system nothing."""


class LeaseClock(NamedTuple):
    """How a lease, or a store with answers that may be lost, waits and reads the time."""

    sleep: Callable[[float], None] = time.sleep
    """Waits between two looks."""
    now: Callable[[], float] = time.time
    """Returns Unix seconds."""
    monotonic: Callable[[], float] = time.monotonic
    wait: Callable[[threading.Event, float], bool] = threading.Event.wait
    """Waits between two beats of a holder; returns whether it shall stop."""


@dataclass(frozen=True)
class LockSeen:
    """What a lock says to a job that wants its folder."""

    found: Any
    """What was read, for the swap."""
    holder: Holder | None
    """The job that holds it, as far as known."""
    holder_name: str
    """The job that may hold it, in words."""
    sign: object
    """What changes while a holder lives."""
    is_free: bool
    """Whether no job holds it, for certain."""
    silence_seconds: float = 0.0
    """How long the holder must be silent, at least, by its own beats."""

    def is_free_for(self, mine: Holder) -> bool:
        """Return whether no job writes the folder, for certain."""
        # No wait: the process has ended, or it is this one, whose older manager was dropped without close(), as in
        # notebooks. The fence stops that manager if it is used again.
        holder = self.holder
        return self.is_free or (holder is not None and (holder.has_ended() or holder.is_same_process_as(mine)))


class _Heart(NamedTuple):
    """The thread that shows that `holder` lives."""

    holder: Holder
    thread: threading.Thread
    stopped: threading.Event


class Lease(ABC):
    """The right of one job to write the folder `address`. **Coordinator only**, where nothing else is said.

    `timeout_seconds`: how long a holder must be silent before another job takes over, if nothing else is known of it;
    several times `beat_seconds`.
    """

    def __init__(
        self, address: str, run_id: str, timeout_seconds: float, beat_seconds: float, clock: LeaseClock | None
    ) -> None:
        self.timeout_seconds = timeout_seconds
        self._address = address
        self._run_id = run_id
        self._beat_seconds = beat_seconds
        self._clock = clock or LeaseClock()
        self._heart: _Heart | None = None

    def take(self) -> None:
        """Take the folder and show that this job lives until `release`; do nothing if this lease has it already.

        Takes over at once from a process that is known to have ended, and from this very process, whose old lease
        nothing will close any more; from any other holder after its silence. Blocks for that long, and for twice that
        long where other jobs keep taking it. Raises FolderInUse as soon as the holder shows that it lives, and OSError;
        FolderUnusable where an object store ignores conditions.
        """
        if self._heart is not None and self._heart.holder.pid == os.getpid():  # Not in a forked child.
            return
        self._prepare()
        mine = Holder.this_process(self._run_id, self._clock.now())
        self._contend(mine)
        stopped = threading.Event()
        try:
            thread = daemon(f"heartbeat of {self._address}", self._show_life, mine, stopped)
        except OSError:
            self._free(mine)
            raise
        self._heart = _Heart(mine, thread, stopped)

    @property
    def token(self) -> str:
        """What no other holder has. Between `take` and `release`."""
        assert self._heart is not None, "token before take()"
        return self._heart.holder.token

    @abstractmethod
    def is_visible(self, token: str) -> bool:
        """Return whether this host sees that the folder is held with `token`. **Any rank**; changes nothing.

        Raises OSError where an object store does not let this host read: it is no other folder then.
        """

    @abstractmethod
    def check(self) -> None:
        """Raise LeaseLost unless the folder is still ours, OSError if that could not be read.

        Any thread, between `take` and `release`. Call it right before what only the holder may do.
        """

    def release(self) -> None:
        """Give the folder up, if it is still ours; a lock that stays is a warning. Idempotent."""
        heart, self._heart = self._heart, None
        # A forked child has this object, too, but holds nothing.
        if heart is None or heart.holder.pid != os.getpid():
            return
        heart.stopped.set()
        # A beat that hangs is not waited for: it can do no harm.
        heart.thread.join(self._beat_seconds)
        self._free(heart.holder)

    def _free(self, holder: Holder) -> None:
        try:
            self._give_up(holder)
        except (OSError, CheckpointError) as error:
            logger.warning("Could not give %s up: %s; the next job sees that this one ended", self._address, error)

    def _contend(self, mine: Holder) -> None:
        """Make the lock ours. Raises FolderInUse."""
        watched: LockSeen | None = None
        for look in itertools.count():
            # Not the time that a look took: where the lock hung, it hung for the holder, too.
            waited = look * self._beat_seconds / 2
            seen = self._look()
            patience = max(self.timeout_seconds, seen.silence_seconds)
            if seen.is_free_for(mine):
                if self._swap(seen, mine):
                    if (holder := seen.holder) is not None:
                        how = "which has ended" if holder.has_ended() else "of this very process"
                        logger.info("Taking over %s from %s, %s", self._address, holder, how)
                    return
            elif watched is None:
                watched = seen
                waits = "%s is in use by %s. Waiting up to %g s to see whether it lives"
                logger.info(waits, self._address, seen.holder_name, patience)
            elif seen.sign != watched.sign:
                raise FolderInUse(self._address, seen.holder_name)
            elif waited >= patience and self._swap(seen, mine):
                silent = "Taking over %s from %s: no sign of life for %g s"
                logger.warning(silent, self._address, seen.holder_name, waited)
                self._make_sure(mine)
                return
            if waited >= 2 * patience:
                latest = self._look()
                raise FolderInUse(self._address, (seen if latest.holder is None else latest).holder_name)
            self._clock.sleep(self._beat_seconds / 2)

    def _show_life(self, holder: Holder, stopped: threading.Event) -> None:
        is_failing = False
        for number in itertools.count():
            try:
                if not self._beat(holder, number):
                    return
                is_failing = False
            except OSError as error:
                # One failed beat does not lose the folder: another start waits for several, and `check` or a swap
                # decides.
                if not is_failing:
                    logger.warning("Could not show that this job has %s: %s; trying again", self._address, error)
                is_failing = True
            if self._clock.wait(stopped, self._beat_seconds):
                return

    @abstractmethod
    def _prepare(self) -> None:
        """Make the folder fit for a lock."""

    @abstractmethod
    def _look(self) -> LockSeen: ...

    @abstractmethod
    def _swap(self, seen: LockSeen, mine: Holder) -> bool:
        """Return whether the lock was still as `seen`, and is now ours."""

    @abstractmethod
    def _make_sure(self, mine: Holder) -> None:
        """Raise FolderInUse if a job that cannot see this one's lock took over from the same silent holder."""

    @abstractmethod
    def _beat(self, holder: Holder, number: int) -> bool:
        """Show that `holder` lives, for the time `number`, from 0 on; return False if the lock is another job's."""

    @abstractmethod
    def _give_up(self, holder: Holder) -> None:
        """Make the lock free if it names `holder`."""


class FolderLease(Lease):
    """The lease of the folder `root` on a disk, which need not exist yet.

    `make_room` removes what cut saves left in the folder and returns whether there was anything; it is called only if
    the disk is too full for a lock file, and when no other job can take the folder.
    """

    def __init__(
        self,
        root: Path,
        *,
        run_id: str,
        timeout_seconds: float = 30.0,
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
        durable: Durable = DISK,
        clock: LeaseClock | None = None,
        make_room: Callable[[], bool] = bool,
    ) -> None:
        super().__init__(str(root), run_id, timeout_seconds, heartbeat_seconds, clock)
        self._path = Path(root) / layout.LOCK
        self._durable = durable
        # A file, not a kernel lock: that ends with its process, but other hosts of a network file system may not see
        # it. A file works everywhere and needs no common clock, because a job only watches whether it changes.
        self._file = LockFile(self._path, durable, make_room)

    def is_visible(self, token: str) -> bool:
        try:
            # A network file system asks the server again for a folder that is opened, not for a name in it.
            os.scandir(self._path.parent).close()
            holder = self._look().holder
        except OSError:
            return False
        return holder is not None and holder.token == token

    def check(self) -> None:
        assert self._heart is not None, "check() before take()"
        found = self._file.read()
        if not _is_of(self._heart.holder, found):
            raise LeaseLost(self._address, "" if found is None else _name_of(found))

    def _prepare(self) -> None:
        self._durable.make_dir(self._path.parent)

    def _look(self) -> LockSeen:
        found = self._file.read()
        return LockSeen(found, Holder.parse(found or b""), _name_of(found), found, is_free=found is None)

    def _swap(self, seen: LockSeen, mine: Holder) -> bool:
        data = mine.to_bytes(0, self._clock.now())
        if seen.found is None:
            is_ours = self._file.create(data, mine.token)
        else:
            is_ours = self._file.replace(seen.found, data, mine.token)
        # A network file system may report an error for a request that it has carried out.
        if not is_ours and not _is_of(mine, self._file.read()):
            return False
        self._file.remove_temporaries()
        return True

    def _make_sure(self, mine: Holder) -> None:
        # A job on a host whose locks are invisible here may have taken over after us.
        self._clock.sleep(self._beat_seconds)
        found = self._file.read()
        if not _is_of(mine, found):
            raise FolderInUse(self._address, _name_of(found))

    def _beat(self, holder: Holder, number: int) -> bool:
        if number == 0:
            return True  # It was written with the lock file.
        faults.point("heartbeat", path=self._path)
        data = holder.to_bytes(number, self._clock.now())
        if self._file.renew(lambda found: _is_of(holder, found), data):
            return True
        logger.warning("%s is no longer this job's; it names %s", self._path, _name_of(self._file.read()))
        return False

    def _give_up(self, holder: Holder) -> None:
        self._file.remove(lambda found: _is_of(holder, found))


def _is_of(holder: Holder, data: bytes | None) -> bool:
    found = Holder.parse(data or b"")
    return found is not None and found.token == holder.token


def _name_of(data: bytes | None) -> str:
    """Return the holder that the contents `data` of the lock file name, in words."""
    if data is None:
        return "no job (the lock file is gone)"
    return str(Holder.parse(data) or "an unknown job (its lock file is damaged)")


@functools.cache
def process_lock(address: str) -> AbstractContextManager[bool]:
    """Return the lock that all stores of this process share for the folder `address`."""
    # Reentrant: housekeeping holds it while it calls `discard`, which takes it, too.
    return threading.RLock()
