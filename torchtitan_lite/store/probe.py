"""What a file system must do for a folder of checkpoints, and what is worse without it: tried in a folder of its own.

`NEEDS` are what the promises rest on, `WANTS` what is only slower, or known later, without them. A start that has just
taken the lease tries them once for each file system, and so does the command `probe`. One client cannot see what others
see: that the command measures with a second one.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import mmap
import os
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from pathlib import Path

from torchtitan_lite.disk.durable import ALIGNMENT, DISK, NO_DIRECT_IO, Durable
from torchtitan_lite.disk.mounts import mount_of
from torchtitan_lite.disk.threads import in_a_thread
from torchtitan_lite.errors import FolderUnusable
from torchtitan_lite.log import logger
from torchtitan_lite.store import layout

LIMIT_SECONDS = 2.0
"""For how long a start waits for what it tries."""
SYNCED_FOLDERS, EXCLUSIVE, WRITTEN, SIZES, REPLACES, RENAMES = (
    "sync the names in a folder",
    "refuse to make a file that is there",
    "return what was written",
    "cut a file to a size",
    "rename a file over another",
    "rename a folder",
)
NEEDS = {
    SYNCED_FOLDERS: "a step that was saved would be lost in a power cut",
    EXCLUSIVE: "two jobs could have one folder",
    WRITTEN: "no step could be loaded",
    SIZES: "no save could succeed",
    REPLACES: "the records of a folder could not be changed",
    RENAMES: "no save could be committed",
}
"""What there must be, and what would happen without it."""
EXCHANGE, LINKS, LOCKS, DIRECT, ROOM, TIMES, REMOVES = (
    "exchange of two names",
    "hard links",
    "file locks",
    "direct I/O",
    "figure of its room",
    "times below a second",
    "removal of open files",
)
WANTS = {
    EXCHANGE: "a step that is saved again has no name for a moment; after a crash there the next start puts it back",
    LINKS: "the lock file is written after it was made; after a crash between, a start waits for lease_timeout_seconds",
    LOCKS: "of two starts in one moment one knows a heartbeat later",
    DIRECT: "saves and loads go through the page cache",
    ROOM: "a full disk is found at the write",
    TIMES: "a file that something else replaces within a second, by one as long, is taken for the old one",
    REMOVES: "what is removed while it is read stays until the reader ends",
}
"""What there should be, and what follows without it."""
_LACKS = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV, errno.ENOTTY, errno.EEXIST, errno.EPERM)
_LEFT_BY_REMOVAL = (".fuse_hidden", ".nfs", ".panfs")
_BYTES = b"torchtitan_lite" * 10


def probe(root: Path, durable: Durable = DISK) -> list[str]:
    """Return which of `WANTS` the file system of the folder `root` lacks. Blocks; leaves nothing in `root`.

    Raises FolderUnusable if it lacks one of `NEEDS`, and OSError for anything else that is refused.
    """
    folder = root / layout.probe_dir(os.urandom(4).hex())
    try:
        folder.mkdir()
        with _needed(SYNCED_FOLDERS, root):
            durable.fsync_dir(root)
        return [want for want, has in _wanted(folder, durable) if not has]
    finally:
        # What another client still shows in it is removed by the next start.
        with suppress(OSError):
            durable.remove_tree(folder)


def _lacks(need: str, finding: str, root: Path) -> FolderUnusable:
    cause = f"its file system does not {need} ({finding}), so {NEEDS[need]}"
    fix = "The cause is its file system, not a permission: mount one there that can do this"
    return FolderUnusable(f"{root} ({mount_of(root)})", cause, fix=fix)


def _wanted(folder: Path, durable: Durable) -> Iterator[tuple[str, bool]]:
    """Yield each of `WANTS` with whether it is there. Raise FolderUnusable for a need."""
    root, first, second = folder.parent, folder / "first", folder / "second"
    yield DIRECT, _write_first(first, durable)
    with _needed(WRITTEN, root):
        if first.read_bytes() != _BYTES:
            raise _lacks(WRITTEN, "other bytes were read", root)
    try:
        os.close(durable.create(first))
        raise _lacks(EXCLUSIVE, "a second one was made", root)
    except FileExistsError:
        pass
    yield LOCKS, has_locks(first, first)
    yield LINKS, _links(first, folder / "link")
    os.close(durable.create(second))
    with _needed(REPLACES, root):
        durable.replace(first, second)
        if second.read_bytes() != _BYTES or os.path.lexists(first):
            raise _lacks(REPLACES, "the old one was read", root)
    yield REMOVES, _removes(second, durable)
    of_folders = [folder / name for name in ("one", "two", "three")]
    for path in of_folders[:2]:
        path.mkdir()
    with _needed(RENAMES, root):
        durable.rename(of_folders[0], of_folders[2])
    yield EXCHANGE, durable.exchange(of_folders[1], of_folders[2])
    yield TIMES, any(path.stat().st_mtime_ns % 1_000_000_000 for path in (folder, *of_folders[1:]))
    yield ROOM, os.statvfs(folder).f_blocks > 0


def _write_first(path: Path, durable: Durable) -> bool:
    """Write `_BYTES` into the new file `path`, cut to their size; return whether direct writes work.

    Not synced, which takes milliseconds: the lock file of the lease, which the caller has, was.
    """
    root, fd = path.parents[1], durable.create(path)
    try:
        with mmap.mmap(-1, ALIGNMENT) as page:
            page[: len(_BYTES)] = _BYTES[::-1]
            is_direct = _writes_directly(fd, memoryview(page), durable)
        with _needed(WRITTEN, root):
            durable.write_at(fd, memoryview(_BYTES), 0)
        with _needed(SIZES, root):
            durable.set_size(fd, len(_BYTES))
            if (size := os.fstat(fd).st_size) != len(_BYTES):
                raise _lacks(SIZES, f"{size} bytes are left of {ALIGNMENT}", root)
    finally:
        os.close(fd)
    return is_direct


def _writes_directly(fd: int, page: memoryview, durable: Durable) -> bool:
    with page:
        try:
            durable.set_direct(fd, True)
            durable.write_at(fd, page, 0)
            durable.set_direct(fd, False)
        except OSError as error:
            if error.errno not in NO_DIRECT_IO:
                raise
            durable.set_direct(fd, False)
            durable.write_at(fd, page, 0)
            return False
    return True


def has_locks(path: Path, other: Path) -> bool:
    """Return whether a lock on `path` keeps others from `other`: the same file, maybe through another client."""
    try:
        with path.open("r+b") as one, other.open("r+b") as theirs:  # NFS locks only what is open for writing.
            fcntl.flock(one, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(theirs, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # Also a client that does not see the file yet.
        return False
    return False


def _links(path: Path, link: Path) -> bool:
    try:
        link.hardlink_to(path)
    except OSError:
        return False
    return os.path.lexists(link)


def _removes(path: Path, durable: Durable) -> bool:
    with path.open("rb"):
        durable.remove_file(path)
        return not any(name.startswith(_LEFT_BY_REMOVAL) for name in os.listdir(path.parent))  # noqa: PTH208  # names


@contextmanager
def _needed(need: str, root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in _LACKS:
            raise
        raise _lacks(need, error.strerror or str(error), root) from error


# What a start does with it.


def log_lacks(root: Path, limit_seconds: float = LIMIT_SECONDS) -> None:
    """Log in one line what the file system of `root` lacks, once for each file system. **Coordinator only**.

    Waits for `limit_seconds`, and says so of a slower one. Raises FolderUnusable for a lack of one of `NEEDS`.
    """
    device = root.stat().st_dev
    if device not in _TRIED:
        _TRIED[device] = _trial(root)
    found = _TRIED[device]
    if not wait([found], limit_seconds).done:
        logger.warning("%s is slow: its file system was not checked within %g s", root, limit_seconds)
    elif (error := found.exception()) is not None:
        _TRIED.pop(device, None)  # A full disk, for instance: the next start tries again.
        if isinstance(error, FolderUnusable):  # Of the folder that was tried first, maybe.
            raise FolderUnusable(f"{root} ({mount_of(root)})", error.cause, fix=error.fix) from error
        logger.info("%s: what its file system lacks could not be tried: %s", root, error)
    elif found.result():
        text = "; ".join(f"no {want}: {WANTS[want]}" for want in found.result())
        _log_once(f"{root} ({mount_of(root)})", text)


def _trial(root: Path) -> Future[list[str]]:
    """Begin to try the file system of `root`, in a thread: what hangs there must not hang the start, nor its end."""
    found = Future[list[str]]()

    def run() -> None:
        try:
            found.set_result(probe(root))
        except Exception as error:
            found.set_exception(error)

    in_a_thread(f"probe of {root}", run)
    return found


_TRIED: dict[int, Future[list[str]]] = {}
"""By device."""


@functools.cache
def _log_once(folder: str, text: str) -> None:
    logger.info("%s has %s", folder, text)


os.register_at_fork(after_in_child=_TRIED.clear)  # A child has none of these threads.
