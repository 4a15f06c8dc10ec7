"""Parts of a file, read once, checked, and put into their places.

In a file with digests all of every touched block is read, and its digest is computed from the very bytes that were
read: when `read` returns, each piece holds what was committed. What is in the page cache is read from it, straight into
its place; the rest bypasses it through a bounce buffer, which saves a copy in the kernel. Where direct I/O or the look
into the cache is refused, all reads go through the cache. A block with a wrong digest is read once more, past the cache
if possible, and only then reported as damage; an I/O error is never reported as damage. Memory: `THREADS` x 5 MiB.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from torchtitan_lite import faults
from torchtitan_lite.disk.digest import BLOCK_BYTES, DIGEST_BYTES, BlockDigest, FileRecord, block_digest
from torchtitan_lite.disk.durable import ALIGNMENT, NO_DIRECT_IO, log_no_direct_io
from torchtitan_lite.disk.plain_file import opened_plain_file
from torchtitan_lite.disk.read_requests import (
    REQUEST_BYTES,
    Piece,
    PieceTable,
    ReadsBlocks,
    Segment,
    after,
    by_block,
    pieces_in_order,
    portions,
    request_memory,
    scatter,
    segments,
)
from torchtitan_lite.disk.shared_memory import MAP_FAILED, libc
from torchtitan_lite.disk.threads import in_threads
from torchtitan_lite.errors import CheckpointUnreadable
from torchtitan_lite.log import counted, logger

THREADS = 3
"""Requests under way at a time: the disk has two while the third is copied and hashed."""
PAUSES_SECONDS = (0.1, 1.0, 4.0)
"""Before each further try of a request, after which an I/O error is raised: a server may be away for a moment."""

T = TypeVar("T")


class DamagedRange(ValueError):
    """Bytes [begin, end) of the file `path` are not what was committed: `finding`."""

    def __init__(self, path: Path, begin: int, end: int, finding: str) -> None:
        self.path, self.begin, self.end, self.finding = path, begin, end, finding
        super().__init__(f"{path}, bytes {begin} to {end}: {finding}")


class CheckedFile:
    """The file `path` of `size` bytes, each block of which has the digest in `record`; without digests all is right.

    Raises `DamagedRange` if `record` has another size. Whoever reads the file fetches its bytes, and asks here.
    """

    def __init__(self, path: Path, record: FileRecord | None, size: int) -> None:
        if record is not None and size != record.size:
            raise DamagedRange(path, min(size, record.size), record.size, f"it has {size} bytes")
        self.path, self.size = path, size
        self.blocks = record.blocks if record is not None else b""

    def requests(self, pieces: Sequence[Piece], table: PieceTable | None) -> Iterator[Segment]:
        """Yield the requests for `pieces` and those of `table`: of whole blocks if these have digests."""
        return segments(pieces, self.size, bool(self.blocks), table)

    def expected(self, begin: int) -> bytes:
        """Return the digest of the block that has the byte `begin`; empty without digests."""
        at = begin // BLOCK_BYTES * DIGEST_BYTES
        return self.blocks[at : at + DIGEST_BYTES]

    def wrong(self, begin: int, data: memoryview) -> Iterator[tuple[int, int]]:
        """Yield begin and end of each block of `data`, the file from the block at `begin` on, that is wrong."""
        for block in range(begin, begin + len(data), BLOCK_BYTES) if self.blocks else ():
            end = min(block + BLOCK_BYTES, begin + len(data))
            if block_digest(data[block - begin : end - begin]) != self.expected(block):
                yield block, end

    def check(self, begin: int, end: int, found: bytes, times: str = "") -> None:
        """Raise `DamagedRange` unless `found` is the digest of the block [begin, end); `times` ends the finding."""
        if found != self.expected(begin):
            finding = f"expected a block with the digest {self.expected(begin).hex()}, found {found.hex()}{times}"
            raise DamagedRange(self.path, begin, end, finding)

    def check_again(self, begin: int, data: memoryview) -> None:
        """Raise `DamagedRange` unless `data`, the block at `begin`, is right now that it was read a second time."""
        end = begin + len(data)
        self.check(begin, end, block_digest(data), ", twice")
        logger.warning(
            "%s: bytes %d to %d matched their digest only when read again: check the disk and the memory of this host",
            self.path,
            begin,
            end,
        )


def run(requests: Sequence[T], make_worker: Callable[[], Callable[[T], None]], threads: int) -> None:
    """Give each of `requests` to one of up to `threads` workers; raise the worst of their errors.

    An error of a disk or a store outweighs damage, which may be another symptom of the same failure.
    """
    failures: list[Exception] = []

    def make() -> Callable[[T], None]:
        work = make_worker()

        def attempt(request: T) -> None:
            try:
                if not failures:
                    work(request)
            except Exception as error:
                failures.append(error)

        return attempt

    in_threads(requests, max(1, min(threads, len(requests))), make)
    if failures:
        raise next((error for error in failures if not isinstance(error, DamagedRange)), failures[0])


@dataclass
class BlockReader(ReadsBlocks):
    """Reads files with `threads` threads; `direct` bypasses the page cache where that is faster."""

    threads: int = THREADS
    direct: bool = True
    pause: Callable[[float], None] = time.sleep
    """Sleeps for that many seconds."""
    _buffers: list[_Buffers] = field(default_factory=list, init=False, repr=False)

    def read(
        self, path: Path, record: FileRecord | None, pieces: Sequence[Piece], table: PieceTable | None = None
    ) -> None:
        with self._file(path, record) as file:
            requests = list(file.checked.requests(pieces, table))
            free = self._free_buffers(max(1, min(self.threads, len(requests))))
            run(requests, lambda: partial(file.read, free.pop()), self.threads)

    @contextmanager
    def _file(self, path: Path, record: FileRecord | None) -> Iterator[_OpenFile]:
        with ExitStack() as stack:

            def reopened() -> int:
                return stack.enter_context(opened_plain_file(path))

            fd = _with_retries(path, reopened, self.pause)
            size = os.fstat(fd).st_size
            checked = CheckedFile(path, record, size)
            # Also where it reads through the page cache: what is wrong there is read again past it.
            again = self._open_direct(path, stack)
            direct = again if self.direct else None
            cached = stack.enter_context(look_into_cache(fd, size)) if direct is not None else None
            if not self.direct:
                # The kernel's guess of what comes next, from the requests of several threads, made a read take 1.5
                # times as long. So each part is advised instead.
                _advise(fd, 0, 0, os.POSIX_FADV_RANDOM)
            direct = direct if cached is not None else None
            yield _OpenFile(checked, fd, direct, again, cached, not self.direct, reopened, self.pause)

    def _open_direct(self, path: Path, stack: ExitStack) -> int | None:
        try:
            return stack.enter_context(opened_plain_file(path, os.O_DIRECT))
        except OSError as error:
            _log_refusal(path, error)
            return None

    def _free_buffers(self, count: int) -> list[_Buffers]:
        # Not in a forked child.
        self._buffers = [each for each in self._buffers if each.process == os.getpid()]
        while len(self._buffers) < count:
            self._buffers.append(_Buffers())
        return self._buffers[:count]


class _Buffers:
    """The memory of one thread."""

    def __init__(self) -> None:
        self.bounce = request_memory(REQUEST_BYTES + 2 * ALIGNMENT)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.bounce))
        self.scratch = request_memory(BLOCK_BYTES)
        self.scratch_address = ctypes.addressof(ctypes.c_char.from_buffer(self.scratch))
        self.process = os.getpid()


@dataclass
class _OpenFile:
    """An open file; `direct` becomes None when the system refuses direct I/O, or after an I/O error."""

    checked: CheckedFile
    fd: int
    direct: int | None
    again: int | None
    """For a second read, past the page cache; None where the system refuses that."""
    cached: Callable[[int, int], bool] | None
    fetches: bool
    """Whether the kernel is to fetch what is read next through the page cache."""
    reopened: Callable[[], int]
    """Returns another descriptor of the file, which is closed with this one."""
    pause: Callable[[float], None]
    is_reopened: bool = False

    def read(self, buffers: _Buffers, segment: Segment) -> None:
        """Fill the pieces of `segment`."""
        size = self.checked.size
        if segment.end > size:
            raise DamagedRange(self.checked.path, size, segment.end, f"the file ends after {size} bytes")
        # Through a buffer: a direct read into the tensor itself was tried and is not faster. A tensor lies on small
        # pages, which makes the request slow, and its bytes are then hashed from memory, not from the cache.
        if self.direct is not None and self.cached is not None and not self.cached(segment.begin, segment.end):
            self._read_through_bounce(segment, buffers, self.direct)
            return
        if self.fetches:
            _advise(self.fd, segment.begin, segment.end - segment.begin, os.POSIX_FADV_WILLNEED)
        for part in by_block(segment):
            pieces = pieces_in_order(part)
            if pieces is None:
                self._read_through_bounce(part, buffers, None)
            else:
                self._read_straight(part, pieces, buffers)

    def _read_straight(self, part: Segment, pieces: list[tuple[int, memoryview]], buffers: _Buffers) -> None:
        """Read `part`, within one block, straight into `pieces`; bytes between them go into scratch memory."""
        places: list[memoryview] = []
        at, unused = part.begin, 0
        for begin, into in [*pieces, (part.end, memoryview(b""))]:
            if begin > at:
                # Each gap needs memory of its own: all of them are digested after all of them are read.
                places.append(buffers.scratch[unused : unused + begin - at])
                unused += begin - at
            places.append(into)
            at = begin + len(into)
        places = [place for place in places if place]
        if not self.checked.blocks:
            self._fill(places, part.begin)
        elif self._filled_and_digested(places, part.begin) != self.checked.expected(part.begin):
            self._read_again(part.begin, part.end, buffers)
            scatter(part, part.begin, buffers.scratch, buffers.scratch_address)

    def _filled_and_digested(self, places: list[memoryview], at: int) -> bytes:
        """Fill `places` from offset `at` and return the digest of the bytes.

        Each portion is hashed while it is still in the processor's cache.
        """
        digest = BlockDigest()
        for portion in portions(places):
            self._fill(portion, at)
            for place in portion:
                digest.update(place)
                at += len(place)
        return digest.digest()

    def _read_through_bounce(self, segment: Segment, buffers: _Buffers, direct: int | None) -> None:
        begin = segment.begin - segment.begin % ALIGNMENT
        self._fill_aligned(buffers.bounce, begin, segment.end, direct)
        # Before anything is in its place: what is wrong never goes to a GPU.
        data = buffers.bounce[segment.begin - begin : segment.end - begin]
        for block, end in self.checked.wrong(segment.begin, data):
            self._read_again(block, end, buffers)
            buffers.bounce[block - begin : end - begin] = buffers.scratch[: end - block]
        scatter(segment, begin, buffers.bounce, buffers.address)

    def _read_again(self, begin: int, end: int, buffers: _Buffers) -> None:
        """Read a block again, into the scratch memory. Raises `DamagedRange` if its digest is wrong again."""
        self._fill_aligned(buffers.scratch, begin, end, self.again)
        self.checked.check_again(begin, buffers.scratch[: end - begin])

    def _fill_aligned(self, memory: memoryview, begin: int, end: int, direct: int | None) -> None:
        """Read bytes [begin, end) of the file to the start of `memory`; both begin at a multiple of `ALIGNMENT`."""
        if direct is not None:
            aligned = -(-(end - begin) // ALIGNMENT) * ALIGNMENT
            try:
                if self._fill([memory[:aligned]], begin, direct, at_least=end - begin):
                    return
            except OSError as error:
                # A refusal; any other error was raised as CheckpointUnreadable.
                self.direct = self.again = None
                _log_refusal(self.checked.path, error)
        self._fill([memory[: end - begin]], begin)

    def _fill(self, places: list[memoryview], at: int, fd: int | None = None, at_least: int | None = None) -> bool:
        """Read the bytes of the file from `at` on into `places`, at least `at_least` of them.

        Returns False if a direct read was short within the file. Raises `DamagedRange` if the file ends too early.
        """
        wanted = sum(map(len, places)) if at_least is None else at_least
        done = 0
        while done < wanted:
            rest = after(places, done) if done else places

            def read(rest: list[memoryview] = rest, done: int = done) -> int:
                faults.point("read", path=self.checked.path)
                return os.preadv(self.fd if fd is None or self.is_reopened else fd, rest, at + done)

            count = _with_retries(self.checked.path, read, self.pause, direct=fd is not None, again=self._open_again)
            if count == 0:
                raise DamagedRange(self.checked.path, at + done, at + wanted, "the file ends before them")
            done += count
            if fd is not None and done < wanted and done % ALIGNMENT:
                return False
        return True

    def _open_again(self) -> None:
        """Read through another descriptor from now on: one of a server that was away may never work again."""
        self.fd, self.is_reopened = self.reopened(), True
        self.direct = self.again = None


def _advise(fd: int, begin: int, num_bytes: int, advice: int) -> None:
    with suppress(OSError):  # Some file systems take no advice.
        os.posix_fadvise(fd, begin, num_bytes, advice)


def _with_retries(
    path: Path,
    operation: Callable[[], int],
    pause: Callable[[float], None],
    *,
    direct: bool = False,
    again: Callable[[], object] = bool,
) -> int:
    """Return the result of `operation`, with retries, before each of which `again` is called.

    Raises `CheckpointUnreadable` after the last one.
    """
    for attempt, seconds in enumerate((*PAUSES_SECONDS, 0.0), 1):
        try:
            if attempt > 1:
                again()
            return operation()
        except OSError as error:
            if direct and error.errno in NO_DIRECT_IO:
                raise
            # A file that is missing stays missing; any other error may be a moment of the network.
            if attempt > len(PAUSES_SECONDS) or error.errno == errno.ENOENT:
                name = errno.errorcode.get(error.errno or 0, "error")
                cause = f"{name} ({error.strerror}), {counted(attempt, 'time')}"
                raise CheckpointUnreadable(str(path), cause) from error
            logger.warning("%s: %s; reading again", path, error.strerror)
            pause(seconds)
    raise AssertionError("unreachable")


def _log_refusal(path: Path, refusal: OSError) -> None:
    log_no_direct_io(str(path.parent), refusal.strerror, "reading")


# Which parts of a file are in the page cache.


_LOOKS = 9
"""Pages of a range to check, spread evenly from the first to the last."""


@contextmanager
def look_into_cache(fd: int, size: int) -> Iterator[Callable[[int, int], bool] | None]:
    """Yield a function that returns whether the page cache has bytes [begin, end) of the file `fd`.

    It checks a sample of the pages, because to check all of them takes as long as to read some: neighbouring pages
    come and go together, and a wrong answer costs only time. Yields None where the system cannot say.
    """
    # Not Python's `mmap`: ctypes gives no address of a mapping that is read-only.
    address = libc().mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0) if size else MAP_FAILED
    if address in (None, MAP_FAILED):
        yield None
        return

    def has(begin: int, end: int) -> bool:
        state = ctypes.c_ubyte()
        first, last = begin // mmap.PAGESIZE, (end - 1) // mmap.PAGESIZE
        for number in range(_LOOKS):
            page = first + (last - first) * number // (_LOOKS - 1)
            if libc().mincore(address + page * mmap.PAGESIZE, 1, ctypes.byref(state)) == 0 and not state.value & 1:
                return False
        return True

    try:
        yield has
    finally:
        libc().munmap(address, size)
