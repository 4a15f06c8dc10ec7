"""One job writes a folder at a time.

Two operations alone give a folder's lock file to a new holder: a link, which fails where there is a
file, and a rename over the old holder's, under flock on it and after a last look at it. So of all
whom flock reaches exactly one wins; where it does not reach other hosts, who succeeds a silent
holder looks again after a heartbeat, and whoever lost finds out in `check`. A beat is written into
the very file whose token was read, never into another's. Not covered: a process that stands still
for the whole time-out after `check` and before the rename that follows it.
"""

from __future__ import annotations

import errno
import fcntl
import io
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from torchtitan_lite import faults
from torchtitan_lite.disk.durable import DISK, Durable, temporary_name
from torchtitan_lite.errors import FolderInUse, LeaseLost
from torchtitan_lite.log import logger
from torchtitan_lite.store import layout
from torchtitan_lite.store.holder import Holder

HEARTBEAT_SECONDS = 2.0
"""Several in the shortest time-out that makes sense, and rare enough to cost a network filesystem nothing."""

_NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK)
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_LIMIT_BYTES = 1 << 16


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
        self._sleep = sleep
        self._now = now
        self._make_room = make_room
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
        self._clear_temporaries()
        self._heart = _Heart(self._path, mine, self._heartbeat_seconds, self._now)
        self._heart.start()

    def check(self) -> None:
        """The folder was still ours a moment ago. Raises LeaseLost, or OSError where that could not be read.

        Any thread; between `take` and `release`. Call it right before what only the holder may do.
        """
        assert self._heart is not None, "check() before take()"
        found = _read(self._path)
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
            with _alone_with(self._path) as found:
                if _is_of(heart.holder, found):
                    self._durable.remove_file(self._path)
        except OSError as error:
            logger.warning("%s could not be removed: %s. The next job sees that this one ended.", self._path, error)

    def _contend(self, mine: Holder) -> None:
        """The lock file is of `mine`."""
        watched: bytes | None = None
        found: bytes | None = None
        for waited in self._looks():
            found = _read(self._path)
            holder = Holder.parse(found or b"")
            if found is None:
                if self._put_first(mine):
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
        raise FolderInUse(str(self._path.parent), _told(_read(self._path) or found))

    def _looks(self) -> Iterator[float]:
        """Seconds waited so far, at each look. A disk that hangs during a look does not make the holder silent."""
        interval = self._heartbeat_seconds / 2
        for look in itertools.count():
            yield look * interval
            if look * interval >= 2 * self._timeout_seconds:
                return
            self._sleep(interval)

    def _put_first(self, mine: Holder) -> bool:
        """Whether there was no lock file, and it is now of `mine`."""
        try:
            return self._link_first(mine)
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
        return self._put_first_without_links(mine)

    def _link_first(self, mine: Holder) -> bool:
        with self._temporary(mine) as temporary:
            try:
                self._path.hardlink_to(temporary)
            except (FileExistsError, FileNotFoundError):
                return False  # Somebody has taken the folder, and perhaps cleared the temporary file away.
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                return self._put_first_without_links(mine)
            return True

    def _put_first_without_links(self, mine: Holder) -> bool:
        # Also where there is no room for a second file: an empty lock file keeps others away for the time-out, as that
        # of a silent holder does, and who takes longer than that to write into it finds out in `check`.
        try:
            with self._path.open("xb", buffering=0) as file:
                self._write_in_place(file, mine)
        except FileExistsError:
            return False
        except OSError:
            with suppress(FileNotFoundError):
                self._durable.remove_file(self._path)
            raise
        return True

    def _succeed(self, seen: bytes, mine: Holder) -> bool:
        """Whether the lock file was still as `seen`, and is now of `mine`."""
        try:
            with self._temporary(mine) as temporary, _alone_with(self._path) as found:
                if found != seen:
                    return False
                try:
                    self._durable.replace(temporary, self._path)
                except FileNotFoundError:
                    return False  # As in `_put_first`.
                return True
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
        return self._succeed_in_place(seen, mine)

    def _succeed_in_place(self, seen: bytes, mine: Holder) -> bool:
        """As `_succeed`, without a second file: the disk is full, and the old holder's file has its room already."""
        with _alone_with(self._path) as found:
            if found != seen:
                return False
            with self._path.open("r+b", buffering=0) as file:
                self._write_in_place(file, mine)
            return True

    def _write_in_place(self, file: io.FileIO, mine: Holder) -> None:
        data = mine.to_bytes(0, self._now())
        try:
            _write_whole(file, data)
        except OSError as error:
            if error.errno not in _NO_ROOM or not self._make_room():
                raise
            _write_whole(file, data)

    def _make_sure(self, mine: Holder) -> None:
        """No other, from a host whose locks are not seen here, has succeeded the same holder after us."""
        self._sleep(self._heartbeat_seconds)
        found = _read(self._path)
        if not _is_of(mine, found):
            raise FolderInUse(str(self._path.parent), _told(found))

    def _tell_of_waiting(self, found: bytes) -> None:
        logger.info(
            "%s is in use by %s. Waiting up to %g s to see whether it lives.",
            self._path.parent,
            _told(found),
            self._timeout_seconds,
        )

    @contextmanager
    def _temporary(self, mine: Holder) -> Iterator[Path]:
        """The lock file of `mine`, whole, under a name that nobody else uses."""
        path = self._path.with_name(temporary_name(f"{layout.LOCK}.{mine.token}"))
        try:
            self._durable.write_file(path, mine.to_bytes(0, self._now()))
            yield path
        finally:
            with suppress(FileNotFoundError):
                self._durable.remove_file(path)

    def _clear_temporaries(self) -> None:
        """Nothing is left of those that were killed while they took it; those that are at it now notice."""
        for path in self._path.parent.glob(temporary_name(f"{layout.LOCK}.*")):
            with suppress(FileNotFoundError):
                self._durable.remove_file(path)


class _Heart:
    """Gives a sign of life of `holder` in the lock file `path` every `seconds`, from a thread of its own."""

    def __init__(self, path: Path, holder: Holder, seconds: float, now: Callable[[], float]) -> None:
        self.holder = holder
        self._path = path
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
                    logger.warning("%s is no longer this job's: %s", self._path, _told(_read(self._path)))
                    return
                failing = False
            except OSError as error:
                if not failing:
                    logger.warning("%s could not be renewed, which is tried again: %s", self._path, error)
                failing = True

    def _beat(self, number: int) -> bool:
        """Whether the lock file is ours; it then tells of beat `number`."""
        faults.point("heartbeat", path=self._path)
        # One open file: what is written goes where the token was read, though the name may pass to another's meanwhile.
        # Closing it is what shows it to the other hosts of a network filesystem.
        with self._path.open("r+b", buffering=0) as file:
            if not _is_of(self.holder, file.read(_LIMIT_BYTES)):
                return False
            data = self.holder.to_bytes(number, self._now())
            file.seek(0)
            file.write(data)
        return True


def _write_whole(file: io.FileIO, data: bytes) -> None:
    """`file` holds `data` and nothing else."""
    file.seek(0)
    if file.write(data) < len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file.name))
    file.truncate()


@contextmanager
def _alone_with(path: Path) -> Iterator[bytes | None]:
    """What `path` holds, while no other process that flock reaches replaces or removes it; None if that cannot be."""
    try:
        file = _open(path)
    except FileNotFoundError:
        yield None
        return
    with file:
        yield file.read(_LIMIT_BYTES) if _lock(file) and _is_called(path, file) else None


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("r+b", buffering=0)  # flock over NFS wants a file that is open for writing.
    except PermissionError:
        return path.open("rb", buffering=0)  # Another user's; the folder may let us replace it all the same.


def _lock(file: BinaryIO) -> bool:
    """Whether no other process is about to replace or remove `file`; True where there are no such locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _is_called(path: Path, file: BinaryIO) -> bool:
    """Whether the open `file` is still the one called `path`."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def _read(path: Path) -> bytes | None:
    try:
        with path.open("rb") as file:
            return file.read(_LIMIT_BYTES)
    except FileNotFoundError:
        return None


def _is_of(holder: Holder, data: bytes | None) -> bool:
    found = Holder.parse(data or b"")
    return found is not None and found.token == holder.token


def _told(data: bytes | None) -> str:
    """Whom the lock file names, for a person."""
    if data is None:
        return "nobody (the lock file is gone)"
    return str(Holder.parse(data) or "a job that its lock file, which is damaged, does not name")
