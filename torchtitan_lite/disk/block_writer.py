"""A rank's file on its way to the disk: in large requests, past the page cache, digested as it goes.

What is hashed is the memory that the kernel is handed, so a digest says what was meant, whatever the
disk makes of it. Requests come from aligned memory: in place, where all of the file lies in memory
already, or through bounce buffers. Where direct I/O is refused, at the opening or at the first
write, the same bytes go through the page cache to the same places. When `write_blocks` returns, the
file is on the disk; its name is once the folder is synced.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from torchtitan_lite import faults
from torchtitan_lite.disk.digest import BLOCK_BYTES, FileRecord, digest_blocks
from torchtitan_lite.disk.durable import DISK, O_DIRECT, Durable
from torchtitan_lite.disk.in_threads import in_threads
from torchtitan_lite.disk.request_memory import request_memory
from torchtitan_lite.log import logger

REQUEST_BYTES = 4 * BLOCK_BYTES
"""Of one write. Larger ones are no faster; each thread holds a bounce buffer of this size."""
ALIGNMENT = 4096
"""Bytes. Direct I/O wants memory, offset and length to be multiples of the disk's sector, 512 or 4096."""
THREADS = 3
"""Requests under way at a time: two are on their way to the disk while a third is copied and hashed."""
_REFUSED = (errno.EINVAL, errno.EOPNOTSUPP)


class Source(Protocol):
    """The bytes of a file to be."""

    num_bytes: int

    def reader(self) -> Callable[[int, int], memoryview]:
        """For one thread: gives bytes [begin, end) in aligned memory, padded to ALIGNMENT, until it is called again."""


class InPlace:
    """All bytes lie in `memory`, a mapping that ends on a page's border."""

    def __init__(self, memory: mmap.mmap, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._view = memoryview(memory)

    def reader(self) -> Callable[[int, int], memoryview]:
        return lambda begin, end: self._view[begin : aligned(end)]


class Bounced:
    """Bytes come from `fill(buffer, begin, end)`, which puts bytes [begin, end) at the start of `buffer`."""

    def __init__(self, num_bytes: int, fill: Callable[[memoryview, int, int], None]) -> None:
        self.num_bytes = num_bytes
        self._fill = fill

    def reader(self) -> Callable[[int, int], memoryview]:
        buffer = request_memory(REQUEST_BYTES)

        def read(begin: int, end: int) -> memoryview:
            self._fill(buffer, begin, end)
            return buffer[: aligned(end - begin)]

        return read


def aligned(num_bytes: int) -> int:
    """`num_bytes`, or as many more as direct I/O wants."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def write_blocks(
    path: Path, source: Source, *, direct: bool = True, threads: int = THREADS, durable: Durable = DISK
) -> FileRecord:
    """The new file `path` holds the bytes of `source`, on the disk; returns what is to be known of it.

    Any thread. Raises the OSError that the system gives, with `path` in it; the file is then of no use.
    """
    file = _File(path, direct and O_DIRECT != 0, durable)
    try:
        if source.num_bytes:
            file.allocate(source.num_bytes)
        digests = _write_all(file, source, threads)
        file.finish(source.num_bytes)
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        file.close()
    return FileRecord(source.num_bytes, b"".join(digests))


def _write_all(file: _File, source: Source, threads: int) -> list[bytes]:
    """Writes every request, `threads` at a time; returns the digests of the blocks of each."""
    begins = range(0, source.num_bytes, REQUEST_BYTES)
    digests = [b""] * len(begins)

    def make_worker() -> Callable[[tuple[int, int]], None]:
        read = source.reader()

        def write(numbered: tuple[int, int]) -> None:
            number, begin = numbered
            end = min(begin + REQUEST_BYTES, source.num_bytes)
            data = read(begin, end)
            digests[number] = digest_blocks(data[: end - begin])
            file.write(data, begin, end - begin)

        return write

    in_threads(enumerate(begins), min(threads, len(begins)), make_worker)
    return digests


class _File:
    """The file under way, direct as long as the system takes it."""

    def __init__(self, path: Path, direct: bool, durable: Durable) -> None:
        self._path, self._durable = path, durable
        self._lock = threading.Lock()
        self._fd, self._direct = self._open(direct)

    def allocate(self, num_bytes: int) -> None:
        self._durable.allocate(self._fd, num_bytes)

    def write(self, data: memoryview, offset: int, num_bytes: int) -> None:
        """`num_bytes` of `data`, which is padded, are in the file at `offset`."""
        while num_bytes > 0:
            direct = self._direct  # When the request begins: another thread may be refused before it is over.
            try:
                allowed = faults.limit("write", num_bytes, path=self._path)
                asked = data[: aligned(allowed) if direct else allowed]
                written = min(self._durable.write_at(self._fd, asked, offset), allowed)
            except OSError as error:
                if error.errno not in _REFUSED or not direct:
                    raise
                self._go_through_the_cache(error)
                continue
            if written == 0:
                raise OSError(errno.EIO, "the write came to nothing", str(self._path))
            if written % ALIGNMENT and written < num_bytes:
                # A short write off the disk's grid: the rest cannot be direct.
                self._go_through_the_cache(None)
            data, offset, num_bytes = data[written:], offset + written, num_bytes - written

    def finish(self, num_bytes: int) -> None:
        self._durable.set_size(self._fd, num_bytes)
        faults.point("fsync", path=self._path)
        self._durable.fsync_file(self._fd)

    def close(self) -> None:
        os.close(self._fd)

    def _open(self, direct: bool) -> tuple[int, bool]:
        if direct:
            try:
                faults.point("open", path=self._path)
                return self._durable.create(self._path, direct=True), True
            except OSError as error:
                if error.errno not in _REFUSED:
                    raise
                _tell(self._path, error)
        else:
            faults.point("open", path=self._path)
        return self._durable.create(self._path, direct=False), False

    def _go_through_the_cache(self, refusal: OSError | None) -> None:
        with self._lock:
            if self._direct:
                fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~O_DIRECT)
                self._direct = False
                if refusal is not None:
                    _tell(self._path, refusal)


def _tell(path: Path, refusal: OSError) -> None:
    logger.info("%s: direct I/O is refused here (%s); writing through the page cache.", path.parent, refusal.strerror)
