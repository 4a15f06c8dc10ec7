"""One job at a time writes a folder.

A job holds the folder while the folder's lock file has its token, and renews the file by a heartbeat from a thread. Of
all jobs that flock reaches exactly one can take the file (`disk/lock_file.py`). Where flock does not reach other hosts,
a job that took the file of a silent holder looks again after a heartbeat, and a job that lost finds out in `check`. Not
covered: a process that is stopped for all of the time-out between `check` and the rename that follows it.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from torchtitan_lite import faults
from torchtitan_lite.disk.durable import DISK, Durable
from torchtitan_lite.disk.lock_file import LockFile
from torchtitan_lite.errors import FolderInUse, LeaseLost
from torchtitan_lite.log import logger
from torchtitan_lite.store import layout
from torchtitan_lite.store.holder import Holder

HEARTBEAT_SECONDS = 2.0
"""Several in the shortest sensible time-out, and rare enough to cost a network file system nothing."""


class LeaseClock(NamedTuple):
    """How a lease waits and reads the time."""

    sleep: Callable[[float], None] = time.sleep
    """Waits between two looks."""
    now: Callable[[], float] = time.time
    """Returns Unix seconds."""


class Lease:
    """The right to write the folder `root`, which need not exist yet. **Coordinator only**.

    `timeout_seconds`: how long a holder must be silent before another job takes over, if nothing else is known of
    it; several times its `heartbeat_seconds`. `make_room` removes what cut saves left in the folder and returns
    whether there was anything; it is called only if the disk is too full for a lock file, and when no other job can
    take the folder.
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
        self._path = Path(root) / layout.LOCK
        self._run_id = run_id
        self._timeout_seconds = timeout_seconds
        self._heartbeat_seconds = heartbeat_seconds
        self._durable = durable
        # A file, not a kernel lock: that ends with its process, but other hosts of a network file system may not see
        # it. A file works everywhere and needs no common clock, because a job only watches whether it changes.
        self._file = LockFile(self._path, durable, make_room)
        self._sleep, self._now = clock or LeaseClock()
        self._heart: _Heart | None = None

    def take(self) -> None:
        """Take the folder and renew the lock file until `release`; do nothing if this lease has it already.

        Takes over at once from a process that is known to have ended, and from this very process, whose old lease
        nothing will close any more; from any other holder after `timeout_seconds` of silence. Blocks for that long, and
        for twice that long where other jobs keep taking it. Raises FolderInUse as soon as the holder renews its lock
        file, OSError if the folder cannot be written.
        """
        if self._heart is not None:
            return
        self._durable.make_dir(self._path.parent)
        mine = Holder.this_process(self._run_id, self._now())
        self._contend(mine)
        self._file.remove_temporaries()
        self._heart = _Heart(self._path, self._file, mine, self._heartbeat_seconds, self._now)
        self._heart.start()

    @property
    def token(self) -> str:
        """The random token in the lock file. Between `take` and `release`."""
        assert self._heart is not None, "token before take()"
        return self._heart.holder.token

    def is_visible(self, token: str) -> bool:
        """Return whether the lock file that this host sees has `token`. **Any rank**; changes nothing."""
        try:
            # A network file system asks the server again for a folder that is opened, not for a name in it.
            os.scandir(self._path.parent).close()
            holder = Holder.parse(self._file.read() or b"")
        except OSError:
            return False
        return holder is not None and holder.token == token

    def check(self) -> None:
        """Raise LeaseLost unless the folder is still ours, OSError if that could not be read.

        Any thread, between `take` and `release`. Call it right before what only the holder may do.
        """
        assert self._heart is not None, "check() before take()"
        found = self._file.read()
        if not _is_of(self._heart.holder, found):
            raise LeaseLost(str(self._path.parent), "" if found is None else _name_of(found))

    def release(self) -> None:
        """Give the folder up, if it is still ours; a lock file that stays is a warning. Idempotent."""
        heart, self._heart = self._heart, None
        # A forked child has this object, too, but holds nothing.
        if heart is None or heart.holder.pid != os.getpid():
            return
        heart.stop()
        try:
            self._file.remove(lambda found: _is_of(heart.holder, found))
        except OSError as error:
            logger.warning("Could not remove %s: %s; the next job sees that this one ended", self._path, error)

    def _contend(self, mine: Holder) -> None:
        """Make the lock file ours. Raises FolderInUse."""
        watched: bytes | None = None
        found: bytes | None = None
        for waited in self._looks():
            found = self._file.read()
            holder = Holder.parse(found or b"")
            if found is None:
                if self._file.create(mine.to_bytes(0, self._now()), mine.token):
                    return
            elif _is_of(mine, found):
                # A network file system reported an error for a request that it had carried out.
                return
            # No wait: the process has ended, or it is this one, whose older manager was dropped without close(), as in
            # notebooks. The fence stops that manager if it is used again.
            elif holder is not None and (holder.has_ended() or holder.is_same_process_as(mine)):
                if self._succeed(found, mine):
                    how = "which has ended" if holder.has_ended() else "of this very process"
                    logger.info("Taking over %s from %s, %s", self._path.parent, holder, how)
                    return
            elif watched is None:
                watched = found
                self._log_waiting(found)
            # The holder lives: each heartbeat changes the contents.
            elif found != watched:
                break
            elif waited >= self._timeout_seconds and self._succeed(found, mine):
                logger.warning(
                    "Taking over %s from %s: no sign of life for %g s",
                    self._path.parent,
                    _name_of(found),
                    waited,
                )
                self._make_sure(mine)
                return
        raise FolderInUse(str(self._path.parent), _name_of(self._file.read() or found))

    def _looks(self) -> Iterator[float]:
        """Yield the seconds waited so far, at each look.

        A disk that hangs during a look does not make the holder silent: that time does not count.
        """
        interval = self._heartbeat_seconds / 2
        for look in itertools.count():
            yield look * interval
            if look * interval >= 2 * self._timeout_seconds:
                return
            self._sleep(interval)

    def _succeed(self, seen: bytes, mine: Holder) -> bool:
        """Return whether the lock file still had the contents `seen`, and is now ours."""
        return self._file.replace(seen, mine.to_bytes(0, self._now()), mine.token)

    def _make_sure(self, mine: Holder) -> None:
        """Raise FolderInUse if a job on a host whose locks are invisible here took over after us."""
        self._sleep(self._heartbeat_seconds)
        found = self._file.read()
        if not _is_of(mine, found):
            raise FolderInUse(str(self._path.parent), _name_of(found))

    def _log_waiting(self, found: bytes) -> None:
        logger.info(
            "%s is in use by %s. Waiting up to %g s to see whether it lives",
            self._path.parent,
            _name_of(found),
            self._timeout_seconds,
        )


class _Heart:
    """Renews the lock file `path` of `holder` every `seconds`, from a thread."""

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
        """Stop the heartbeat. A beat that hangs in the disk is not waited for: it can do no harm."""
        self._stopped.set()
        self._thread.join(self._seconds)

    def _run(self) -> None:
        failing = False
        for number in itertools.count(1):
            if self._stopped.wait(self._seconds):
                return
            try:
                if not self._beat(number):
                    logger.warning("%s is no longer this job's; it names %s", self._path, _name_of(self._file.read()))
                    return
                failing = False
            except OSError as error:
                # One failed beat does not lose the folder: several beats fit into the time-out, and `check` decides.
                if not failing:
                    logger.warning("Could not renew %s; trying again: %s", self._path, error)
                failing = True

    def _beat(self, number: int) -> bool:
        """Return whether the lock file is ours, after writing beat `number` into it."""
        faults.point("heartbeat", path=self._path)
        data = self.holder.to_bytes(number, self._now())
        return self._file.renew(lambda found: _is_of(self.holder, found), data)


def _is_of(holder: Holder, data: bytes | None) -> bool:
    found = Holder.parse(data or b"")
    return found is not None and found.token == holder.token


def _name_of(data: bytes | None) -> str:
    """Return the holder that the contents `data` of the lock file name, in words."""
    if data is None:
        return "no job (the lock file is gone)"
    return str(Holder.parse(data) or "an unknown job (its lock file is damaged)")
