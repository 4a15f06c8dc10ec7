"""One job writes a folder at a time.

Two operations alone give a folder's lock file to a new holder: a link, which fails where there is a
file, and a rename over the old holder's, under flock on it and after a last look at it. So of all
whom flock reaches exactly one wins; where it does not reach other hosts, who succeeds a silent
holder looks again after a heartbeat, and whoever lost finds out in `check`. A beat is written into
the very file whose token was read, never into another's. Not covered: a process that stands still
for the whole time-out after `check` and before the rename that follows it.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from torchtitan_lite import faults
from torchtitan_lite.disk.durable import DISK, Durable
from torchtitan_lite.disk.lock_file import LockFile
from torchtitan_lite.errors import FolderInUse, LeaseLost
from torchtitan_lite.log import logger
from torchtitan_lite.store import layout
from torchtitan_lite.store.holder import Holder

HEARTBEAT_SECONDS = 2.0
"""Several in the shortest time-out that makes sense, and rare enough to cost a network filesystem nothing."""


class Lease:
    """The right to write the folder `root`, which need not exist yet. Coordinator only.

    `timeout_seconds` is for how long a holder of which nothing is known must be silent before it is succeeded: several
    times its `heartbeat_seconds`. `sleep` waits between two looks, `now` is Unix seconds. `make_room` removes what cut
    saves left in the folder and says whether there was any: asked at most once, where the disk is too full for a lock
    file, and when no other job can take the folder.
    """

    def __init__(
        self,
        root: Path,
        *,
        run_id: str,
        timeout_seconds: float = 30.0,
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
        durable: Durable = DISK,
        sleep: Callable[[float], None] = time.sleep,
        now: Callable[[], float] = time.time,
        make_room: Callable[[], bool] = bool,
    ) -> None:
        self._path = Path(root) / layout.LOCK
        self._run_id = run_id
        self._timeout_seconds = timeout_seconds
        self._heartbeat_seconds = heartbeat_seconds
        self._durable = durable
        self._file = LockFile(self._path, durable, make_room)
        self._sleep = sleep
        self._now = now
        self._heart: _Heart | None = None

    def take(self) -> None:
        """The folder is ours, and says so by a heartbeat until `release`; at once where it was before.

        A holder whose process is known to have ended is succeeded at once, and so is one of this process, which nobody
        will close any more; any other once it was silent for
        `timeout_seconds`. Blocks for that long; twice that long where others keep on taking it. Raises FolderInUse as
        soon as the holder gives a sign of life, OSError where the folder cannot be written.
        """
        if self._heart is not None:
            return
        self._durable.make_dir(self._path.parent)
        mine = Holder.this_process(self._run_id, self._now())
        self._contend(mine)
        self._file.remove_temporaries()
        self._heart = _Heart(self._path, self._file, mine, self._heartbeat_seconds, self._now)
        self._heart.start()

    def check(self) -> None:
        """The folder was still ours a moment ago. Raises LeaseLost, or OSError where that could not be read.

        Any thread; between `take` and `release`. Call it right before what only the holder may do.
        """
        assert self._heart is not None, "check() before take()"
        found = self._file.read()
        if not _is_of(self._heart.holder, found):
            raise LeaseLost(str(self._path.parent), _told(found))

    def release(self) -> None:
        """The folder is no longer ours, and free unless another has it; a file that stays is a warning. Idempotent."""
        heart, self._heart = self._heart, None
        # What was forked off has this object too, and nothing to release.
        if heart is None or heart.holder.pid != os.getpid():
            return
        heart.stop()
        try:
            self._file.remove(lambda found: _is_of(heart.holder, found))
        except OSError as error:
            logger.warning("%s could not be removed: %s. The next job sees that this one ended.", self._path, error)

    def _contend(self, mine: Holder) -> None:
        """The lock file is of `mine`."""
        watched: bytes | None = None
        found: bytes | None = None
        for waited in self._looks():
            found = self._file.read()
            holder = Holder.parse(found or b"")
            if found is None:
                if self._file.create(mine.to_bytes(0, self._now()), mine.token):
                    return
            elif _is_of(mine, found):
                return  # A network filesystem said no to a request that it had done already.
            elif holder is not None and (holder.has_ended() or holder.is_same_process_as(mine)):
                if self._succeed(found, mine):
                    how = "which has ended" if holder.has_ended() else "of this very process"
                    logger.info("Taking over %s from %s, %s.", self._path.parent, holder, how)
                    return
            elif watched is None:
                watched = found
                self._tell_of_waiting(found)
            elif found != watched:
                break
            elif waited >= self._timeout_seconds and self._succeed(found, mine):
                logger.warning("Taking over %s from %s: no sign of life.", self._path.parent, _told(found))
                self._make_sure(mine)
                return
        raise FolderInUse(str(self._path.parent), _told(self._file.read() or found))

    def _looks(self) -> Iterator[float]:
        """Seconds waited so far, at each look. A disk that hangs during a look does not make the holder silent."""
        interval = self._heartbeat_seconds / 2
        for look in itertools.count():
            yield look * interval
            if look * interval >= 2 * self._timeout_seconds:
                return
            self._sleep(interval)

    def _succeed(self, seen: bytes, mine: Holder) -> bool:
        """Whether the lock file was still as `seen`, and is now of `mine`."""
        return self._file.replace(seen, mine.to_bytes(0, self._now()), mine.token)

    def _make_sure(self, mine: Holder) -> None:
        """No other, from a host whose locks are not seen here, has succeeded the same holder after us."""
        self._sleep(self._heartbeat_seconds)
        found = self._file.read()
        if not _is_of(mine, found):
            raise FolderInUse(str(self._path.parent), _told(found))

    def _tell_of_waiting(self, found: bytes) -> None:
        logger.info(
            "%s is in use by %s. Waiting up to %g s to see whether it lives.",
            self._path.parent,
            _told(found),
            self._timeout_seconds,
        )


class _Heart:
    """Gives a sign of life of `holder` in the lock file `path` every `seconds`, from a thread of its own."""

    def __init__(self, path: Path, file: LockFile, holder: Holder, seconds: float, now: Callable[[], float]) -> None:
        self.holder = holder
        self._path = path
        self._file = file
        self._seconds = seconds
        self._now = now
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"heartbeat of {path}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """It beats no more. A beat that hangs in the disk is not waited for: it can do no harm."""
        self._stopped.set()
        self._thread.join(self._seconds)

    def _run(self) -> None:
        failing = False
        for number in itertools.count(1):
            if self._stopped.wait(self._seconds):
                return
            try:
                if not self._beat(number):
                    logger.warning("%s is no longer this job's: %s", self._path, _told(self._file.read()))
                    return
                failing = False
            except OSError as error:
                if not failing:
                    logger.warning("%s could not be renewed, which is tried again: %s", self._path, error)
                failing = True

    def _beat(self, number: int) -> bool:
        """Whether the lock file is ours; it then tells of beat `number`."""
        faults.point("heartbeat", path=self._path)
        data = self.holder.to_bytes(number, self._now())
        return self._file.renew(lambda found: _is_of(self.holder, found), data)


def _is_of(holder: Holder, data: bytes | None) -> bool:
    found = Holder.parse(data or b"")
    return found is not None and found.token == holder.token


def _told(data: bytes | None) -> str:
    """Whom the lock file names, for a person."""
    if data is None:
        return "nobody (the lock file is gone)"
    return str(Holder.parse(data) or "a job that its lock file, which is damaged, does not name")
