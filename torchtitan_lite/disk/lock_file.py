"""A file that one of several processes holds, also on file systems that several hosts share.

Two operations alone give the file to a new holder: `create` links it, which fails where there is a file, and `replace`
renames over the old one, under flock on it and after a last look at it. So of all processes that flock reaches exactly
one wins. Where flock does not reach other hosts, a process that replaced a file has to look again later. `renew` writes
into the very file whose contents it read, never into another process's. Nothing here knows what a holder is: contents
are bytes, and the caller says which are its own.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from torchtitan_lite.disk.durable import Durable, naming, temporary_name

_NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK)
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_LIMIT_BYTES = 1 << 16


class LockFile:
    """The file `path`, whose folder exists. Methods raise the OSError that the system gives.

    `make_room` removes something from the full disk and returns whether it did; it is called at most once for a write,
    where the disk is too full for the file, and when no other process can take it.
    """

    def __init__(self, path: Path, durable: Durable, make_room: Callable[[], bool]) -> None:
        self._path = path
        self._durable = durable
        self._make_room = make_room

    def read(self) -> bytes | None:
        """Return the contents; None where there is no file."""
        try:
            with naming(self._path), self._path.open("rb") as file:
                return file.read(_LIMIT_BYTES)
        except FileNotFoundError:
            return None

    def create(self, data: bytes, token: str) -> bool:
        """Return whether there was no file, and it now holds `data`; `token` is a name that only the caller uses."""
        try:
            return self._link(data, token)
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
        return self._create_in_place(data)

    def replace(self, seen: bytes, data: bytes, token: str) -> bool:
        """Return whether the file still held `seen`, and now holds `data`; `token` as in `create`."""
        try:
            with self._temporary(data, token) as temporary, self._locked() as found:
                if found != seen:
                    return False
                try:
                    self._durable.replace(temporary, self._path)
                except FileNotFoundError:
                    return False  # As in `_link`.
                return True
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
        return self._replace_in_place(seen, data)

    def renew(self, is_ours: Callable[[bytes], bool], data: bytes) -> bool:
        """Return whether the contents were ours, and are now `data`, which is as long."""
        # One open file: what is written goes where the contents were read, though the name may pass to another file
        # meanwhile. Closing it is what shows it to the other hosts of a network file system.
        with naming(self._path), self._path.open("r+b", buffering=0) as file:
            if not is_ours(file.read(_LIMIT_BYTES)):
                return False
            file.seek(0)
            file.write(data)
        return True

    def remove(self, is_ours: Callable[[bytes], bool]) -> None:
        """Remove the file if its contents are ours and no other process is about to replace it."""
        with self._locked() as found:
            if found is not None and is_ours(found):
                self._durable.remove_file(self._path)

    def remove_temporaries(self) -> None:
        """Remove what processes left that were killed while they took the file; those that are taking it notice."""
        for path in self._path.parent.glob(temporary_name(f"{self._path.name}.*")):
            self._durable.remove_file(path)

    def _link(self, data: bytes, token: str) -> bool:
        with self._temporary(data, token) as temporary:
            try:
                self._path.hardlink_to(temporary)
            except (FileExistsError, FileNotFoundError):
                # Another process took the file, and may have removed the temporary one.
                return False
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                return self._create_in_place(data)
            return True

    def _create_in_place(self, data: bytes) -> bool:
        # Also where there is no room for a second file: an empty lock file keeps others away for the time-out, as that
        # of a silent holder does, and a process that takes longer than that to write into it has lost it.
        try:
            with naming(self._path), self._path.open("xb", buffering=0) as file:
                self._write_in_place(file, data)
        except FileExistsError:
            return False
        except OSError:
            self._durable.remove_file(self._path)
            raise
        return True

    def _replace_in_place(self, seen: bytes, data: bytes) -> bool:
        """Replace as `replace` does, without a second file: the disk is full, and the old file has its room already."""
        with self._locked() as found:
            if found != seen:
                return False
            with naming(self._path), self._path.open("r+b", buffering=0) as file:
                self._write_in_place(file, data)
            return True

    def _write_in_place(self, file: io.FileIO, data: bytes) -> None:
        try:
            _write_whole(file, data)
        except OSError as error:
            if error.errno not in _NO_ROOM or not self._make_room():
                raise
            _write_whole(file, data)

    @contextmanager
    def _temporary(self, data: bytes, token: str) -> Iterator[Path]:
        """Yield a file that holds `data`, complete, under a name that no other process uses."""
        path = self._path.with_name(temporary_name(f"{self._path.name}.{token}"))
        try:
            self._durable.write_file(path, data)
            yield path
        finally:
            self._durable.remove_file(path)

    @contextmanager
    def _locked(self) -> Iterator[bytes | None]:
        """Yield the contents, while no other process that flock reaches replaces or removes the file.

        None where there is no file, or another process has the lock.
        """
        try:
            file = _open_lock_file(self._path)
        except FileNotFoundError:
            yield None
            return
        with file:
            # Compared after the lock is taken: before, another process may have renamed another file to this name.
            yield file.read(_LIMIT_BYTES) if _has_lock(file) and _is_at(self._path, file) else None


def _write_whole(file: io.FileIO, data: bytes) -> None:
    """Write `data` to `file`, and nothing else."""
    file.seek(0)
    if file.write(data) < len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file.name))
    file.truncate()


def _open_lock_file(path: Path) -> BinaryIO:
    try:
        return path.open("r+b", buffering=0)  # flock over NFS wants a file that is open for writing.
    except PermissionError:
        # Another user's; the folder may let us replace it all the same.
        return path.open("rb", buffering=0)


def _has_lock(file: BinaryIO | int) -> bool:
    """Return whether this process has the lock of `file` now, and no other one; True where there are no such locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def _is_at(path: Path, file: BinaryIO) -> bool:
    """Return whether the open `file` is still the one at `path`."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


# A lock on a folder, held for moments, by processes that change one thing in it.
#
# It leaves no file behind, and ends with its process. Where the file system has no such locks (NFS has none on folders)
# every process gets it, so what it protects must also be safe without it.


_POLL_SECONDS = 0.05


@contextmanager
def locked(folder: Path, wait_seconds: float, sleep: Callable[[float], None] = time.sleep) -> Iterator[None]:
    """Hold the lock of `folder` in the block. Raise BlockingIOError if another process has it for `wait_seconds`."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for _ in range(max(1, round(wait_seconds / _POLL_SECONDS))):
            if _has_lock(fd):
                break
            sleep(_POLL_SECONDS)
        else:
            finding = f"another process has locked it for {wait_seconds:g} s"
            raise BlockingIOError(errno.EAGAIN, finding, str(folder))
        yield
    finally:
        # A process that was forked meanwhile has the descriptor, too: closing this one would not end the lock.
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)
