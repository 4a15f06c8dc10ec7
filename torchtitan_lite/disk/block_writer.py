"""Write the file of one rank: in large requests, past the page cache, with digests computed on the way.

The digest is computed from the memory that goes to the kernel, or is known from when that was filled. So it records
what was meant, whatever memory and disk do.
Requests come from aligned memory: in place where the complete file is in memory already, else through bounce buffers.
Where direct I/O is refused, when opening or at the first write, the same bytes go through the page cache to the same
offsets. When `write_blocks` returns, the contents are durable; the name is durable once the folder is synced.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torchtitan_lite import faults
from torchtitan_lite.disk.digest import BLOCK_BYTES, FileRecord, digest_blocks
from torchtitan_lite.disk.durable import ALIGNMENT, DISK, NO_DIRECT_IO, Durable, log_no_direct_io, naming
from torchtitan_lite.disk.mounts import is_fuse
from torchtitan_lite.disk.read_requests import request_memory
from torchtitan_lite.disk.threads import in_threads

_NOT_SEEN = (errno.ENOENT, errno.ESTALE)
_PAUSE_SECONDS = 0.5
# The kernel lets one write into a file of FUSE at a time, and divides it among requests that are answered together. So
# at 2 ms a request large writes are 1.7 times as fast as small ones; how many wait is no matter.
FUSE_REQUEST_BYTES = 8 * BLOCK_BYTES
FUSE_THREADS = 3


class FileSource(Protocol):
    """The contents of a file to write."""

    num_bytes: int
    request_bytes: int
    """Bytes of one write on a disk; a multiple of BLOCK_BYTES."""
    threads: int
    """Requests under way at a time on a disk."""
    record: FileRecord | None
    """The record of the file, if it is known; None if the writer is to take the digests."""

    def reader(self, request_bytes: int) -> Callable[[int, int], memoryview]:
        """Return a function, for one thread, that returns bytes [begin, end) in aligned memory.

        These are `request_bytes` at most; the memory is padded to ALIGNMENT and valid until the next call.
        """
        ...

    def kept(self, begin: int, end: int) -> memoryview:
        """Return bytes [begin, end), which stay as they are while anything refers to them."""
        ...


class InPlace:
    """Contents that lie in `memory`, which begins and ends at a page boundary.

    Few large requests: nothing is copied before a request, and each one takes time from the training alongside.
    """

    request_bytes = 4 * BLOCK_BYTES
    threads = 3

    def __init__(self, memory: memoryview, num_bytes: int, record: FileRecord | None = None) -> None:
        self.num_bytes = num_bytes
        self.record = record
        self._view = memory

    def reader(self, request_bytes: int) -> Callable[[int, int], memoryview]:
        return lambda begin, end: self._view[begin : aligned(end)]

    def kept(self, begin: int, end: int) -> memoryview:
        return self._view[begin:end]


class Bounced:
    """Contents from `fill(buffer, begin, end)`, which writes bytes [begin, end) to the start of `buffer`.

    Many small requests: some are filled and hashed while the disk has enough of the others. Each thread holds a bounce
    buffer of one request, which is one huge page.
    """

    # A request is filled and hashed before it is written, so some must be in memory while the disk works on others.
    # With the same 12 MiB, six requests of 2 MiB are faster than three of 4 MiB.
    request_bytes = 2 * BLOCK_BYTES
    threads = 6
    record: FileRecord | None = None

    def __init__(self, num_bytes: int, fill: Callable[[memoryview, int, int], None]) -> None:
        self.num_bytes = num_bytes
        self._fill = fill

    def reader(self, request_bytes: int) -> Callable[[int, int], memoryview]:
        buffer = request_memory(request_bytes)

        def read(begin: int, end: int) -> memoryview:
            self._fill(buffer, begin, end)
            return buffer[: aligned(end - begin)]

        return read

    def kept(self, begin: int, end: int) -> memoryview:
        memory = memoryview(bytearray(end - begin))
        for at in range(begin, end, self.request_bytes):
            self._fill(memory[at - begin :], at, min(at + self.request_bytes, end))
        return memory


def in_memory(data: bytes) -> Bounced:
    """Return contents that are `data`."""

    def fill(buffer: memoryview, begin: int, end: int) -> None:
        buffer[: end - begin] = data[begin:end]

    return Bounced(len(data), fill)


def aligned(num_bytes: int) -> int:
    """Return `num_bytes`, rounded up to ALIGNMENT."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def write_blocks(
    path: Path,
    source: FileSource,
    *,
    direct: bool = True,
    threads: int = 0,
    look_seconds: float = 0.0,
    durable: Durable = DISK,
) -> FileRecord:
    """Write the contents of `source` to the new file `path`, synced; return the record of the file.

    `threads` requests are under way at a time; 0: as many as suit the source. A folder that is not there is looked for
    for up to `look_seconds`.
    Any thread. Raises the OSError of the system, with `path` in it; the file is useless then.
    """
    with naming(path), closing(_WrittenFile(path, look_seconds, durable)) as file:
        file.open(direct, source.num_bytes)
        digests = _write_all(file, source, *file.requests(source, threads))
        file.finish(source.num_bytes)
    return source.record or FileRecord(source.num_bytes, b"".join(digests))


def _write_all(file: _WrittenFile, source: FileSource, request_bytes: int, threads: int) -> list[bytes]:
    """Write every request, `threads` at a time; return the block digests of each, nothing if they are known."""
    begins = range(0, source.num_bytes, request_bytes)
    digests = [b""] * len(begins)

    def make_worker() -> Callable[[tuple[int, int]], None]:
        read = source.reader(request_bytes)

        def write(numbered: tuple[int, int]) -> None:
            number, begin = numbered
            end = min(begin + request_bytes, source.num_bytes)
            data = read(begin, end)
            if source.record is None:
                # Taken from the memory that goes to the kernel: a digest of bytes that were read back would only show
                # that the disk agrees with itself.
                digests[number] = digest_blocks(data[: end - begin])
            file.write(data, begin, end - begin)

        return write

    in_threads(enumerate(begins), min(threads, len(begins)), make_worker)
    return digests


class _WrittenFile:
    """The file being written, direct until the system refuses that."""

    def __init__(self, path: Path, look_seconds: float, durable: Durable) -> None:
        self._path, self._durable = path, durable
        self._lock = threading.Lock()
        self._fd = self._created(time.monotonic() + look_seconds)
        self._direct = False

    def open(self, direct: bool, num_bytes: int) -> None:
        """Have requests bypass the page cache if `direct` and the system does not refuse that; allocate `num_bytes`."""
        try:
            faults.point("open", path=self._path)
            if direct:
                self._durable.set_direct(self._fd, True)
                self._direct = True
        except OSError as error:
            if not direct or error.errno not in NO_DIRECT_IO:
                raise
            self._log_refusal(error)
        if num_bytes:
            self._durable.allocate(self._fd, num_bytes)

    def requests(self, source: FileSource, threads: int) -> tuple[int, int]:
        """Return the bytes of a request, and how many are under way: `threads`, or as many as suit if that is 0."""
        if is_fuse(os.fstat(self._fd).st_dev):
            return max(source.request_bytes, FUSE_REQUEST_BYTES), threads or min(source.threads, FUSE_THREADS)
        return source.request_bytes, threads or source.threads

    def write(self, data: memoryview, offset: int, num_bytes: int) -> None:
        """Write the first `num_bytes` of `data`, which is padded, at `offset`."""
        while num_bytes > 0:
            # Read it once: another thread may switch it off during this request.
            direct = self._direct
            try:
                allowed = faults.limit("write", num_bytes, path=self._path)
                request = data[: aligned(allowed) if direct else allowed]
                written = min(self._durable.write_at(self._fd, request, offset), allowed)
            except OSError as error:
                if error.errno not in NO_DIRECT_IO or not direct:
                    raise
                self._use_the_page_cache(error)
                continue
            if written == 0:
                raise OSError(errno.EIO, "the system wrote 0 bytes", str(self._path))
            if written % ALIGNMENT and written < num_bytes:
                # A short write ended between two sectors: the rest cannot be direct.
                self._use_the_page_cache(None)
            data, offset, num_bytes = data[written:], offset + written, num_bytes - written

    def finish(self, num_bytes: int) -> None:
        # A direct write ends at a sector, so the last one wrote padding.
        self._durable.set_size(self._fd, num_bytes)
        faults.point("fsync", path=self._path)
        self._durable.fsync_file(self._fd)
        if (size := os.fstat(self._fd).st_size) != num_bytes:
            raise OSError(errno.EIO, f"it has {size} bytes after {num_bytes} were written", str(self._path))

    def close(self) -> None:
        os.close(self._fd)

    def _created(self, until: float) -> int:
        """Return a descriptor of the new file, as soon as its folder is there, or by the time `until`."""
        while True:
            try:
                return self._durable.create(self._path)
            except OSError as error:
                if error.errno not in _NOT_SEEN or time.monotonic() >= until:
                    raise
            # Another host has made the folder a moment ago, or one above it. A network file system asks its server
            # again, at the latest when what it remembers is too old, for the names in a folder that is opened.
            for folder in reversed(self._path.parent.parents):
                with suppress(OSError):
                    os.scandir(folder).close()
            time.sleep(_PAUSE_SECONDS)

    def _use_the_page_cache(self, refusal: OSError | None) -> None:
        with self._lock:
            if self._direct:
                self._durable.set_direct(self._fd, False)
                self._direct = False
                if refusal is not None:
                    self._log_refusal(refusal)

    def _log_refusal(self, refusal: OSError) -> None:
        # Each save has a folder of its own in this one.
        log_no_direct_io(str(self._path.parent.parent), refusal.strerror, "writing")


# A file that is about to be written: the handle that a store gives to whoever has the bytes.
#
# It is a value, so it travels to the writer process, which writes the file there.


class NewFile(Protocol):
    """One file, not yet written; its string is its address, for messages. Pickled, it is written by another process."""

    def write(self, source: FileSource) -> FileRecord:
        """Write the contents of `source`, durably; return the record of the file. Any thread.

        Raises OSError with the address in it; the file is useless then.
        """
        ...


LOOK_SECONDS = 60.0
"""As long as NFS may remember by default which files a folder has (acdirmax)."""


@dataclass(frozen=True)
class NewFileOnDisk:
    """A new file at `path`, in a folder that exists; its name is durable once the folder is synced.

    Another host may have made the folder: this one looks for it for up to `look_seconds`.
    """

    path: Path
    look_seconds: float = 0.0
    durable: Durable = field(default=DISK, compare=False, repr=False)

    def write(self, source: FileSource) -> FileRecord:
        return write_blocks(self.path, source, look_seconds=self.look_seconds, durable=self.durable)

    def __str__(self) -> str:
        return str(self.path)

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process writes with the disk that it has.
        return NewFileOnDisk, (self.path, self.look_seconds)
