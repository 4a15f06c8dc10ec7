"""Parts of files, read and checked."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import itertools
import logging
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.descriptors import num_open, wait_for_open
from tests.disk.pieces import SIZE, far, forget, pieces_of, ranges
from torchtitan_lite import faults
from torchtitan_lite.disk import block_reader
from torchtitan_lite.disk.block_reader import BlockReader, DamagedRange
from torchtitan_lite.disk.digest import BLOCK_BYTES, FileRecord
from torchtitan_lite.disk.read_requests import REQUEST_BYTES
from torchtitan_lite.errors import CheckpointUnreadable, CheckpointUnsafe


@pytest.fixture(scope="module")
def data() -> bytes:
    return os.urandom(SIZE)


@pytest.fixture(scope="module")
def path(data: bytes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("files") / "file"
    path.write_bytes(data)
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
    return path


@pytest.fixture
def own(path: Path, data: bytes, tmp_path: Path) -> Path:
    """A file that a test may damage."""
    (tmp_path / "own").write_bytes(data)
    return tmp_path / "own"


def reader(threads: int = 2, *, direct: bool = True) -> BlockReader:
    return BlockReader(threads, direct, pause=lambda seconds: None)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(ranges(), far(), st.integers(1, 4), st.booleans(), st.booleans(), st.booleans())
def test_every_piece_gets_its_bytes(
    path: Path,
    data: bytes,
    ranges: list[tuple[int, int]],
    elsewhere: set[int],
    threads: int,
    digests: bool,
    direct: bool,
    cold: bool,
) -> None:
    if cold:
        forget(path)
    pieces = pieces_of(ranges, elsewhere)
    reader(threads, direct=direct).read(path, FileRecord.of(data) if digests else FileRecord(SIZE), pieces)
    assert all(piece.into == data[piece.at : piece.at + len(piece.into)] for piece in pieces)


@pytest.mark.parametrize("cold", [False, True])
@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("at", [0, BLOCK_BYTES - 1, BLOCK_BYTES, REQUEST_BYTES + 7, SIZE - 1])
def test_a_changed_byte_is_found_in_its_block(own: Path, data: bytes, at: int, direct: bool, cold: bool) -> None:
    with own.open("r+b") as file:
        file.seek(at)
        file.write(bytes([data[at] ^ 1]))
    if cold:
        forget(own)
    begin = at // BLOCK_BYTES * BLOCK_BYTES
    for wanted in [(0, SIZE)], [(at, 1)], [(begin, 10)], [(begin + i * 20, 10) for i in range(100)]:
        with pytest.raises(DamagedRange, match="twice") as caught:
            reader(direct=direct).read(own, FileRecord.of(data), pieces_of([r for r in wanted if sum(r) <= SIZE]))
        assert (caught.value.begin, caught.value.end) == (begin, min(begin + BLOCK_BYTES, SIZE))
    with pytest.raises(DamagedRange):
        reader(direct=direct).verify(own, FileRecord.of(data), [at // BLOCK_BYTES])


@pytest.mark.parametrize("cold", [False, True])
def test_only_touched_blocks_are_read(own: Path, data: bytes, cold: bool) -> None:
    with own.open("r+b") as file:
        file.seek(BLOCK_BYTES)
        file.write(b"other bytes")
    if cold:
        forget(own)
    pieces = pieces_of([(0, BLOCK_BYTES), (2 * BLOCK_BYTES, 5)])
    reader().read(own, FileRecord.of(data), pieces)
    reader().verify(own, FileRecord.of(data), [0, 2, SIZE // BLOCK_BYTES])
    assert pieces[1].into == data[2 * BLOCK_BYTES : 2 * BLOCK_BYTES + 5]


def test_a_file_of_another_size_is_damaged(own: Path, data: bytes) -> None:
    for size in SIZE - 1, SIZE + 1, 0:
        os.truncate(own, size)
        with pytest.raises(DamagedRange, match=f"{size} bytes"):
            reader().read(own, FileRecord(SIZE), pieces_of([(0, 10)]))


@pytest.mark.parametrize("direct", [False, True])
def test_a_piece_beyond_the_end_is_damage(path: Path, direct: bool) -> None:
    with pytest.raises(DamagedRange, match=f"ends after {SIZE} bytes"):
        reader(direct=direct).read(path, None, pieces_of([(SIZE - 10, 11)]))


@pytest.mark.parametrize("cold", [False, True])
def test_a_transient_io_error_is_retried(path: Path, data: bytes, cold: bool) -> None:
    if cold:
        forget(path)
    faults.install("EIO@read:times=2", rank=0)
    pieces = pieces_of([(0, SIZE)])
    reader(1).read(path, FileRecord.of(data), pieces)
    assert pieces[0].into == data


def test_a_lasting_io_error_is_raised_and_is_no_damage(path: Path, data: bytes) -> None:
    faults.install("EIO@read:after=1,times=always", rank=0)
    with pytest.raises(CheckpointUnreadable, match=rf"{path} could not be read: EIO \(.*\), 4 times"):
        reader().read(path, FileRecord.of(data), pieces_of([(0, SIZE)]))


def test_where_direct_io_is_refused_reads_go_through_the_page_cache(path: Path, data: bytes) -> None:
    forget(path)
    faults.install("EINVAL@read:times=1", rank=0)
    pieces = pieces_of([(5, SIZE - 5)])
    reader(1).read(path, FileRecord.of(data), pieces)
    assert pieces[0].into == data[5:]


def test_damage_that_could_not_be_read_twice_is_not_proven(own: Path, data: bytes) -> None:
    with own.open("r+b") as file:
        file.write(b"other bytes")
    faults.install("EIO@read:after=1,times=always", rank=0)
    with pytest.raises(CheckpointUnreadable):
        reader(1).read(own, FileRecord.of(data), pieces_of([(0, 10)]))


@pytest.mark.parametrize("cold", [False, True])
def test_a_block_that_is_right_when_read_again_is_used(
    own: Path, data: bytes, cold: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Repairs the disk during the pause before the second read, which fails once."""

    def write(some: bytes) -> None:
        with own.open("r+b") as file:
            file.seek(BLOCK_BYTES + 10)
            file.write(some)

    write(b"other bytes")
    if cold:
        forget(own)
    faults.install(f"EIO@read:after={1 if cold else 3},times=1", rank=0)
    pieces = pieces_of([(7, 3 * BLOCK_BYTES), (BLOCK_BYTES + 5, 20)])
    repairing = BlockReader(1, pause=lambda seconds: write(data[BLOCK_BYTES + 10 : BLOCK_BYTES + 21]))
    repairing.read(own, FileRecord.of(data), pieces)
    assert all(piece.into == data[piece.at : piece.at + len(piece.into)] for piece in pieces)
    assert (
        f"bytes {BLOCK_BYTES} to {2 * BLOCK_BYTES} matched their digest only when read again: check the disk and "
        "the memory of this host" in caplog.text
    )


def test_a_missing_file_is_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(CheckpointUnreadable, match="ENOENT"):
        reader().read(tmp_path / "none", None, pieces_of([(0, 1)]))


def test_a_link_is_not_followed(path: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(CheckpointUnsafe):
        reader().read(tmp_path / "link", None, pieces_of([(0, 1)]))


def test_an_empty_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    reader().read(tmp_path / "empty", FileRecord.of(b""), pieces_of([(0, 0)]))


def test_buffers_are_bounded(path: Path, data: bytes) -> None:
    """Each thread has one bounce buffer and one scratch buffer, however much it reads."""
    taken = 2 * (REQUEST_BYTES + BLOCK_BYTES + 2 * block_reader.ALIGNMENT)
    assert block_reader.THREADS * taken // 2 <= 32 << 20
    one = reader(2)
    for _ in range(3):
        one.read(path, FileRecord.of(data), pieces_of([(0, SIZE)]))
    assert sum(len(buffers.bounce) + len(buffers.scratch) for buffers in one._buffers) == taken
    assert errno.EINVAL in block_reader.NO_DIRECT_IO


PREADV = os.preadv


class ShortReads:
    """Replaces os.preadv: reads as many bytes as the next of `cuts` says, and writes junk after them."""

    def __init__(self, cuts: Sequence[int]) -> None:
        self._cuts = iter(cuts)
        self._lock = threading.Lock()
        self.off_grid = 0
        """Direct requests that a real disk would refuse."""
        self.was_direct: list[bool] = []

    def __call__(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        direct = bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
        addresses = [ctypes.addressof(ctypes.c_char.from_buffer(buffer)) for buffer in buffers]
        with self._lock:
            self.was_direct.append(direct)
            assert len(self.was_direct) < 1000, "it reads without end"
            self.off_grid += direct and any(number % 4096 for number in (offset, *map(len, buffers), *addresses))
            cut = next(self._cuts, 1 << 30)
        count = left = min(PREADV(fd, buffers, offset), cut)
        for buffer in buffers:
            kept = min(left, len(buffer))
            buffer[kept:] = b"\xee" * (len(buffer) - kept)
            left -= kept
        return count


cuts = st.lists(
    st.integers(1, 9000)
    | st.sampled_from([4096, 8192, BLOCK_BYTES // 2, BLOCK_BYTES, BLOCK_BYTES + 1, REQUEST_BYTES - 4096])
    | st.just(1 << 30),
    max_size=12,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(ranges(), st.integers(1, 4), st.booleans(), st.booleans(), st.booleans(), cuts)
def test_reads_may_be_short_at_any_moment(
    path: Path,
    data: bytes,
    caplog: pytest.LogCaptureFixture,
    ranges: list[tuple[int, int]],
    threads: int,
    digests: bool,
    direct: bool,
    cold: bool,
    cuts: list[int],
) -> None:
    if cold:
        forget(path)
    record, pieces, short = FileRecord.of(data) if digests else FileRecord(SIZE), pieces_of(ranges), ShortReads(cuts)
    caplog.clear()
    with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.INFO, "torchtitan_lite"):
        patch.setattr(os, "preadv", short)
        reader(threads, direct=direct).read(path, record, pieces)
    assert all(piece.into == data[piece.at : piece.at + len(piece.into)] for piece in pieces)
    assert short.off_grid == 0
    assert direct or not any(short.was_direct)
    # Every block was right at the first read: a second read of a wrong block would hide the mistake.
    assert not [message for message in caplog.messages if "again" in message]


@pytest.mark.parametrize("digests", [False, True])
@pytest.mark.parametrize("cut", [4096, REQUEST_BYTES - 4096, 5000])
def test_a_direct_read_stays_direct_while_short_reads_end_at_a_sector(
    path: Path, data: bytes, monkeypatch: pytest.MonkeyPatch, cut: int, digests: bool
) -> None:
    forget(path)
    monkeypatch.setattr(os, "preadv", short := ShortReads([1 << 30, cut]))
    pieces = pieces_of([(0, REQUEST_BYTES)])
    reader(1).read(path, None, pieces_of([(REQUEST_BYTES, REQUEST_BYTES)]))
    if short.was_direct.pop() is False:
        pytest.skip("the file system of the temporary folder has no direct I/O, or keeps all files in memory")
    reader(1).read(path, FileRecord.of(data) if digests else None, pieces)
    assert pieces[0].into == data[:REQUEST_BYTES]
    assert short.was_direct == [True, cut % 4096 == 0]


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP])
def test_where_direct_io_is_refused_when_opening_reads_go_through_the_page_cache(
    own: Path, data: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    real_open = os.open

    def refuse(path: Path, flags: int, *arguments: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(code, os.strerror(code), str(path))
        return real_open(path, flags, *arguments)

    forget(own)
    before = num_open()
    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(os, "preadv", read := ShortReads([]))
    one = reader(2)
    with caplog.at_level(logging.INFO, "torchtitan_lite"):
        for _ in range(2):
            pieces = pieces_of([(5, SIZE - 5)])
            one.read(own, FileRecord.of(data), pieces)
            assert pieces[0].into == data[5:]
    assert not any(read.was_direct)
    refused = f"{own.parent}: direct I/O is refused here ({os.strerror(code)}); reading through the page cache"
    assert caplog.messages == [refused]
    wait_for_open(before)


@pytest.mark.parametrize("cold", [False, True])
@pytest.mark.parametrize("digests", [False, True])
def test_a_file_that_is_truncated_during_a_read_is_damaged_from_its_new_end_on(
    own: Path, data: bytes, monkeypatch: pytest.MonkeyPatch, digests: bool, cold: bool
) -> None:
    if cold:
        forget(own)
    calls = itertools.count()

    def cut_and_read(fd: int, buffers: list[memoryview], offset: int) -> int:
        if next(calls) == 0:
            os.truncate(own, BLOCK_BYTES + 8192)
        return PREADV(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", cut_and_read)
    with pytest.raises(DamagedRange, match="the file ends before") as caught:
        record = FileRecord.of(data) if digests else None
        reader(1).read(own, record, pieces_of([(100, 2 * BLOCK_BYTES), (3 * BLOCK_BYTES, 10)]))
    assert (caught.value.path, caught.value.begin) == (own, BLOCK_BYTES + 8192)
