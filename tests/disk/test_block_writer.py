"""A rank's file has the right bytes, or an error names it, whatever the disk does with each request."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import random
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.descriptors import num_open
from tests.disk.sources import bounced, in_place
from tests.disks import FailingDisk, injected
from tests.store.refusals import refusals_logged
from torchtitan_lite.disk import durable
from torchtitan_lite.disk.block_writer import (
    ALIGNMENT,
    FileSource,
    InPlace,
    write_blocks,
)
from torchtitan_lite.disk.digest import BLOCK_BYTES, FileRecord
from torchtitan_lite.disk.durable import DISK, Durable

CLOSE = os.close
REQUEST_BYTES = InPlace.request_bytes
DATA = random.Random(0).randbytes(4 * REQUEST_BYTES + 3)
BORDERS = [0, 1, 511, 512, 4095, 4096, 4097, BLOCK_BYTES, REQUEST_BYTES, REQUEST_BYTES + BLOCK_BYTES]
SEVERAL = 3 * REQUEST_BYTES + 5000
"""Bytes: four requests or more, the last of which ends between two sectors."""
REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP)


SOURCES: dict[str, Callable[[bytes], FileSource]] = {"in place": in_place, "bounced": bounced}


def is_direct(fd: int) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


class Disk(Durable):
    """Writes as many bytes as the next of `cuts` says, and refuses direct I/O on request.

    A file opened for direct I/O has the flag, also if the file system of the folder refuses it.
    """

    def __init__(
        self, *, cuts: Sequence[int] = (), refuses_open: int = 0, refuses_write: int = 0, after: int = 0
    ) -> None:
        self._cuts = iter(cuts)
        self._refuses_open, self._refuses_write, self._after = refuses_open, refuses_write, after
        self._lock = threading.Lock()
        self._num_direct = 0
        self.refused = 0
        self.off_grid = 0
        """Direct requests that a real disk would refuse."""
        self.was_direct: list[bool] = []

    def set_direct(self, fd: int, is_direct: bool) -> None:
        if is_direct and self._refuses_open:
            self.refused += 1
            raise OSError(self._refuses_open, os.strerror(self._refuses_open))
        super().set_direct(fd, is_direct)

    def write_at(self, fd: int, data: memoryview, offset: int) -> int:
        direct = is_direct(fd)
        address = ctypes.addressof(ctypes.c_char.from_buffer(data))
        with self._lock:
            cut = max(1, next(self._cuts, len(data)))
            self.was_direct.append(direct)
            self._num_direct += direct
            self.off_grid += direct and bool(offset % ALIGNMENT or len(data) % ALIGNMENT or address % ALIGNMENT)
            if direct and self._refuses_write and self._num_direct > self._after:
                self.refused += 1
                raise OSError(self._refuses_write, os.strerror(self._refuses_write))
        if cut >= len(data):
            return super().write_at(fd, data, offset)
        # A separate write through the page cache: no disk accepts such a part of a direct one.
        other = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY)
        try:
            return super().write_at(other, data[:cut], offset)
        finally:
            os.close(other)


def new_file(base: Path) -> Path:
    """Return where a file may be made: for a test that writes it many times."""
    (base / "file").unlink(missing_ok=True)
    return base / "file"


@contextmanager
def nothing_left_over() -> Iterator[None]:
    """Check that no thread and no descriptor is left over."""
    before = threading.active_count(), num_open()
    yield
    after = threading.active_count(), num_open()
    assert after == before, "(threads, descriptors)"


def check(path: Path, data: bytes, record: FileRecord) -> None:
    """`path` holds `data`, which is what `record` says."""
    assert record == FileRecord.of(data)
    assert path.stat().st_size == len(data)
    assert path.read_bytes() == data


sizes = (
    st.builds(lambda border, by: max(0, border + by), st.sampled_from(BORDERS), st.integers(-1, 1))
    | st.integers(0, 3 * BLOCK_BYTES)
    | st.sampled_from([2 * REQUEST_BYTES, SEVERAL, 4 * REQUEST_BYTES - 1, len(DATA)])
)
cuts = st.lists(
    st.integers(1, 9000)
    | st.sampled_from([4096, 8192, BLOCK_BYTES, BLOCK_BYTES - 1, REQUEST_BYTES - 4096, REQUEST_BYTES - 1])
    | st.just(1 << 30),
    max_size=12,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(sizes, st.sampled_from([*SOURCES]), st.integers(1, 4), st.booleans())
def test_the_file_and_its_record_are_the_bytes_of_the_source(
    base: Path, size: int, kind: str, threads: int, direct: bool
) -> None:
    data, path, disk = DATA[:size], new_file(base), Disk()
    with refusals_logged() as lines, nothing_left_over():
        source = SOURCES[kind](data)
        record = write_blocks(path, source, direct=direct, threads=threads, durable=disk)
    check(path, data, record)
    assert lines == []
    assert disk.off_grid == 0
    assert disk.was_direct == [direct] * -(-size // source.request_bytes)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(sizes, st.sampled_from([*SOURCES]), st.integers(1, 4), st.booleans(), cuts)
def test_writes_may_be_short_at_any_moment(
    base: Path, size: int, kind: str, threads: int, direct: bool, cuts: list[int]
) -> None:
    data, path, disk = DATA[:size], new_file(base), Disk(cuts=cuts)
    with refusals_logged() as lines, nothing_left_over():
        record = write_blocks(path, SOURCES[kind](data), direct=direct, threads=threads, durable=disk)
    check(path, data, record)
    assert lines == []
    assert disk.off_grid == 0


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(
    sizes.filter(bool),
    st.sampled_from([*SOURCES]),
    st.integers(1, 4),
    st.sampled_from(REFUSALS),
    st.integers(-1, 4),
    cuts | st.just([]),
)
def test_where_direct_io_is_refused_the_file_is_the_same_and_one_line_is_logged(
    base: Path, size: int, kind: str, threads: int, code: int, after: int, cuts: list[int]
) -> None:
    data, path = DATA[:size], new_file(base)
    disk = Disk(cuts=cuts, refuses_open=code) if after < 0 else Disk(cuts=cuts, refuses_write=code, after=after)
    with refusals_logged() as lines, nothing_left_over():
        record = write_blocks(path, SOURCES[kind](data), threads=threads, durable=disk)
    check(path, data, record)
    assert disk.off_grid == 0
    if disk.refused and not cuts:
        assert len(lines) == 1
    # After a write that ended between two sectors nothing is direct any more, and a refusal is not logged.
    assert len(lines) <= bool(disk.refused)
    assert all(str(base.parent) in line and os.strerror(code) in line for line in lines)


@pytest.mark.parametrize("kind", SOURCES)
def test_a_file_system_that_passes_the_flags_of_an_open_on_is_written_to(base: Path, kind: str) -> None:
    class PassesFlagsOn(Durable):
        """Refuses each write to a file that was opened for direct I/O: clearing the flag does not reach the server."""

        opened_direct = False

        def create(self, path: Path) -> int:
            fd = super().create(path)
            self.opened_direct = is_direct(fd)
            return fd

        def write_at(self, fd: int, data: memoryview, offset: int) -> int:
            if self.opened_direct:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return super().write_at(fd, data, offset)

    data = DATA[:SEVERAL]
    check(base / "file", data, write_blocks(base / "file", SOURCES[kind](data), durable=PassesFlagsOn()))


def test_two_threads_whose_direct_io_is_refused_at_once_both_continue(base: Path) -> None:
    class Together(Durable):
        """Refuses two direct writes; the second one returns after the thread of the first has continued."""

        def __init__(self) -> None:
            self.both, self.gone_on, self.lock = threading.Barrier(2, timeout=60), threading.Event(), threading.Lock()
            self.num_refused = 0

        def write_at(self, fd: int, data: memoryview, offset: int) -> int:
            if not is_direct(fd):
                self.gone_on.set()
                return super().write_at(fd, data, offset)
            self.both.wait()
            with self.lock:
                self.num_refused += 1
                is_last = self.num_refused == 2
            if is_last:
                assert self.gone_on.wait(60)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    data = DATA[:SEVERAL]
    with refusals_logged() as lines:
        record = write_blocks(base / "file", bounced(data), threads=2, durable=Together())
    check(base / "file", data, record)
    assert len(lines) == 1


@pytest.mark.parametrize("point", ["open", "write"])
@pytest.mark.parametrize("kind", SOURCES)
def test_an_injected_refusal_of_direct_io_acts_like_one_of_the_system(base: Path, kind: str, point: str) -> None:
    data = DATA[:SEVERAL]
    with injected(f"EINVAL@{point}"), refusals_logged() as lines:
        record = write_blocks(base / "file", SOURCES[kind](data))
    check(base / "file", data, record)
    assert len(lines) == 1


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=12)
@given(kind=st.sampled_from([*SOURCES]), threads=st.integers(1, 4), direct=st.booleans(), at=st.integers(0, 3))
def test_a_failing_write_raises_its_error_with_the_path_and_ends_all_threads(
    base: Path, code: int, kind: str, threads: int, direct: bool, at: int
) -> None:
    source, path, disk = SOURCES[kind](DATA[:SEVERAL]), new_file(base), FailingDisk("write_at", code=code, after=at)
    with nothing_left_over(), refusals_logged() as lines, pytest.raises(OSError) as raised:
        write_blocks(path, source, direct=direct, threads=threads, durable=disk)
    assert (raised.value.errno, raised.value.strerror, raised.value.filename) == (code, os.strerror(code), str(path))
    assert lines == []


def test_no_thread_begins_a_write_after_one_has_failed(base: Path) -> None:
    class FailingInHelper(Durable):
        """Fails in the other thread; the write of this one lasts until that thread has ended."""

        def __init__(self) -> None:
            self.failed = threading.Event()
            self.failing: threading.Thread | None = None
            self.num_written = 0

        def write_at(self, fd: int, data: memoryview, offset: int) -> int:
            if threading.current_thread() is not threading.main_thread():
                self.failing = threading.current_thread()
                self.failed.set()
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            assert self.failed.wait(60) and self.failing is not None
            self.failing.join(60)
            self.num_written += 1
            return super().write_at(fd, data, offset)

    disk = FailingInHelper()
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        write_blocks(base / "file", bounced(DATA), threads=2, durable=disk)
    assert disk.num_written <= 1


@pytest.mark.parametrize("direct", [False, True])
def test_an_error_that_is_no_refusal_of_direct_io_is_raised(base: Path, direct: bool) -> None:
    disk = FailingDisk("write_at", code=errno.EINVAL)
    with refusals_logged() as lines, pytest.raises(OSError) as raised:
        write_blocks(base / "file", bounced(DATA[:SEVERAL]), direct=direct, durable=disk)
    assert (raised.value.errno, raised.value.filename) == (errno.EINVAL, str(base / "file"))
    assert len(lines) == (direct)


@pytest.mark.parametrize("code", [errno.ENOENT, errno.EACCES, errno.ENOSPC])
def test_a_failing_open_is_not_retried(base: Path, code: int) -> None:
    with refusals_logged() as lines, pytest.raises(OSError) as raised:
        write_blocks(base / "file", bounced(DATA[:1]), durable=Disk(refuses_open=code))
    assert raised.value.errno == code
    assert lines == []


def test_a_write_of_zero_bytes_is_an_error(base: Path) -> None:
    class Nothing(Durable):
        def write_at(self, fd: int, data: memoryview, offset: int) -> int:
            return 0

    with nothing_left_over(), pytest.raises(OSError, match="wrote 0 bytes") as raised:
        write_blocks(base / "file", bounced(DATA[:SEVERAL]), durable=Nothing())
    assert (raised.value.errno, raised.value.filename) == (errno.EIO, str(base / "file"))


@pytest.mark.parametrize("operation", ["allocate", "set_size", "fsync_file"])
def test_any_other_failure_names_the_file_too(base: Path, operation: str) -> None:
    disk = FailingDisk(operation)
    with nothing_left_over(), pytest.raises(OSError) as raised:
        write_blocks(base / "file", bounced(DATA[:SEVERAL]), durable=disk)
    assert (raised.value.errno, raised.value.filename) == (errno.ENOSPC, str(base / "file"))


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP])
def test_a_system_without_the_call_that_reserves_room_is_written_to(
    base: Path, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: int) -> int:
        ctypes.set_errno(code)
        return -1

    monkeypatch.setattr(durable, "libc", lambda: SimpleNamespace(fallocate64=refuse))
    check(base / "file", DATA[:9000], write_blocks(base / "file", bounced(DATA[:9000])))


def test_an_error_at_the_close_names_the_file(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(fd: int) -> None:
        CLOSE(fd)
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    with monkeypatch.context() as patch:
        patch.setattr(os, "close", fail)
        with pytest.raises(OSError) as raised:
            write_blocks(base / "file", bounced(DATA[:9000]))
    assert (raised.value.errno, raised.value.filename) == (errno.EDQUOT, str(base / "file"))


def test_without_room_nothing_is_written(base: Path) -> None:
    disk = FailingDisk("allocate")
    with pytest.raises(OSError, match="No space left"):
        write_blocks(base / "file", bounced(DATA[:SEVERAL]), durable=disk)
    assert not (base / "file").exists() or (base / "file").stat().st_size == 0


def test_a_disk_that_cannot_reserve_room_is_written_to(base: Path) -> None:
    class CannotTell(Durable):
        def allocate(self, fd: int, num_bytes: int) -> None:
            with Path("/dev/null").open("wb") as device:
                super().allocate(device.fileno(), num_bytes)

    data = DATA[:SEVERAL]
    check(base / "file", data, write_blocks(base / "file", bounced(data), durable=CannotTell()))


def test_what_the_source_raises_is_raised_and_ends_all_threads(base: Path) -> None:
    class Unreadable:
        num_bytes = SEVERAL
        request_bytes, threads = REQUEST_BYTES, 4

        def reader(self, request_bytes: int) -> None:
            raise MemoryError("no room for a buffer")

    source: FileSource = Unreadable()  # type: ignore[assignment]  # the result is never used
    with nothing_left_over(), pytest.raises(MemoryError, match="no room for a buffer"):
        write_blocks(base / "file", source, threads=4)


def test_the_file_is_synced_after_the_last_byte_and_after_its_size(base: Path) -> None:
    class Noting(Durable):
        def __init__(self) -> None:
            self.done: list[str] = []

        def allocate(self, fd: int, num_bytes: int) -> None:
            super().allocate(fd, num_bytes)
            self.done.append("allocate")

        def write_at(self, fd: int, data: memoryview, offset: int) -> int:
            written = super().write_at(fd, data, offset)
            self.done.append("write")
            return written

        def set_size(self, fd: int, num_bytes: int) -> None:
            super().set_size(fd, num_bytes)
            self.done.append("size")

        def fsync_file(self, fd: int) -> None:
            super().fsync_file(fd)
            self.done.append("sync")

    disk = Noting()
    write_blocks(base / "file", in_place(DATA[:SEVERAL]), durable=disk)
    assert disk.done == ["allocate", *["write"] * 4, "size", "sync"]


def test_on_the_disk_itself_the_file_is_the_same() -> None:
    """Other tests write to memory if possible; this one writes to the folder of temporary files."""
    with tempfile.TemporaryDirectory() as folder:
        for kind, make in SOURCES.items():
            path = Path(folder, kind)
            check(path, DATA, write_blocks(path, make(DATA), durable=DISK))
