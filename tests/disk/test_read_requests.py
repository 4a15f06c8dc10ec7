"""Requests of a read to the system: number, size, direct or through the page cache."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.descriptors import num_open, wait_for_open
from tests.disk.pieces import forget
from torchtitan_lite import faults
from torchtitan_lite.disk import block_reader
from torchtitan_lite.disk.block_reader import BlockReader, DamagedRange, look_into_cache
from torchtitan_lite.disk.digest import BLOCK_BYTES, FileRecord
from torchtitan_lite.disk.read_requests import PORTION_BYTES, Piece, portions
from torchtitan_lite.errors import CheckpointUnreadable

SIZE = 6 * BLOCK_BYTES + 777
PREADV = os.preadv


class Request(NamedTuple):
    at: int
    sizes: list[int]
    """In the buffers."""
    direct: bool


class Requests:
    """Replaces os.preadv: does the same, and records the requests."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[Request] = []
        monkeypatch.setattr(os, "preadv", self._read)

    def _read(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        direct = bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
        self.made.append(Request(offset, [len(buffer) for buffer in buffers], direct))
        return PREADV(fd, buffers, offset)


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Requests:
    return Requests(monkeypatch)


@pytest.fixture(scope="module")
def data() -> bytes:
    return os.urandom(SIZE)


@pytest.fixture
def path(data: bytes, tmp_path: Path) -> Path:
    (tmp_path / "file").write_bytes(data)
    return tmp_path / "file"


def read(path: Path, ranges: list[tuple[int, int]], record: FileRecord | None = None, *, direct: bool = False) -> None:
    """Read `ranges`, each an offset and a length, and compare them with the file."""
    pieces = [Piece(at, memoryview(bytearray(count))) for at, count in ranges]
    BlockReader(1, direct, pause=lambda seconds: None).read(path, record, pieces)
    data = path.read_bytes()
    assert all(piece.into == data[piece.at : piece.at + len(piece.into)] for piece in pieces)


@pytest.mark.parametrize(("gap", "num_requests"), [(262144, 1), (262145, 2)])
def test_without_digests_a_gap_of_up_to_256_kib_is_read_and_a_larger_one_skipped(
    path: Path, requests: Requests, gap: int, num_requests: int
) -> None:
    read(path, [(100, 10), (110 + gap, 10)])
    assert len(requests.made) == num_requests
    assert sum(map(sum, (request.sizes for request in requests.made))) == (20 + gap if num_requests == 1 else 20)


def test_pieces_that_follow_each_other_are_read_at_once(path: Path, data: bytes, requests: Requests) -> None:
    read(path, [(0, BLOCK_BYTES), (BLOCK_BYTES, 3 * BLOCK_BYTES)], FileRecord.of(data))
    assert [request.at for request in requests.made] == [i * BLOCK_BYTES // 2 for i in range(8)], (
        "half a block at a time: it is hashed while it lies in the processor's cache"
    )
    requests.made.clear()
    read(path, [(0, BLOCK_BYTES), (BLOCK_BYTES, 3 * BLOCK_BYTES)])
    assert [request.sizes for request in requests.made] == [[BLOCK_BYTES]] * 4


@pytest.mark.parametrize(("count", "straight"), [(32, True), (33, False)])
def test_up_to_32_pieces_of_a_block_are_read_straight_into_their_places(
    path: Path, requests: Requests, count: int, straight: bool
) -> None:
    read(path, [(i * 100, 10) for i in range(count)])
    assert len(requests.made) == 1
    # One request through the bounce buffer; read straight, one for each piece and each gap.
    assert len(requests.made[0].sizes) == (2 * count - 1 if straight else 1)


def test_buffers_go_to_the_system_in_portions_of_half_a_block_at_most() -> None:
    sizes = [PORTION_BYTES // 2 + 1, PORTION_BYTES // 2, 3 * PORTION_BYTES, 5, PORTION_BYTES, 7]
    found = [[len(place) for place in each] for each in portions([memoryview(bytes(size)) for size in sizes])]
    assert max(map(sum, found)) == PORTION_BYTES
    assert sum(map(sum, found)) == sum(sizes)


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="this system takes no advice")
def test_without_direct_io_the_kernel_learns_what_is_read_next(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    advised: list[tuple[int, int]] = []

    def advise(fd: int, at: int, num_bytes: int, advice: int) -> None:
        advised.extend([(at, num_bytes)] * (advice == os.POSIX_FADV_WILLNEED))

    monkeypatch.setattr(os, "posix_fadvise", advise)
    read(path, [(4096, 10_000), (3 * BLOCK_BYTES, 5)])
    assert advised == [(4096, 10_000), (3 * BLOCK_BYTES, 5)]


def test_a_direct_request_covers_the_wanted_pages_and_no_more(path: Path, requests: Requests) -> None:
    forget(path)
    read(path, [(2 * BLOCK_BYTES + 5000, 10_000)], direct=True)
    if not requests.made[0].direct:
        pytest.skip("the file system of the temporary folder has no direct I/O, or keeps all files in memory")
    assert requests.made == [Request(2 * BLOCK_BYTES + 4096, [12288], True)]


class NoMaps:
    """A C library on a file system without mappings; no other function of it is called."""

    def mmap(self, *arguments: object) -> int | None:
        return ctypes.c_void_p(-1).value


def test_without_a_look_into_the_page_cache_everything_is_read_through_it(
    path: Path, requests: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget(path)
    monkeypatch.setattr(block_reader, "libc", NoMaps)
    read(path, [(0, SIZE)], direct=True)
    assert requests.made
    assert not any(request.direct for request in requests.made)


def test_a_block_that_is_right_at_once_is_neither_read_twice_nor_reported(
    path: Path, data: bytes, requests: Requests, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "torchtitan_lite"):
        for ranges in [(0, SIZE)], [(BLOCK_BYTES - 5, 10)], [(i * 100, 200) for i in range(50)]:
            for direct in False, True:
                forget(path)
                requests.made.clear()
                read(path, ranges, FileRecord.of(data), direct=direct)
                starts = [request.at for request in requests.made]
                assert starts == sorted(set(starts))
    assert not [message for message in caplog.messages if "again" in message]


def test_a_refused_open_is_retried_and_then_raised(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def refuse(*arguments: object) -> int:
        tried.append(arguments)
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(CheckpointUnreadable, match="EINVAL"):
        BlockReader(1, pause=lambda seconds: None).read(path, None, [])
    assert len(tried) == len(block_reader.PAUSES_SECONDS) + 1


def test_each_attempt_waits_longer_than_the_one_before(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_reader, "PAUSES_SECONDS", (0.1, 1.0, 4.0))
    waited: list[float] = []
    faults.install("EIO@read:times=always", rank=0)
    with pytest.raises(CheckpointUnreadable):
        BlockReader(1, direct=False, pause=waited.append).read(path, None, [Piece(0, memoryview(bytearray(1)))])
    assert waited == [0.1, 1.0, 4.0]


@pytest.mark.parametrize("cold", [False, True])
def test_a_file_whose_server_was_away_is_opened_again(
    path: Path, data: bytes, cold: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if cold:
        forget(path)
    stale: set[int] = set()

    def read_stale(fd: int, buffers: list[memoryview], offset: int) -> int:
        if not stale:
            stale.update(int(name) for name in os.listdir("/proc/self/fd"))  # noqa: PTH208  # no paths
        if fd in stale:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return PREADV(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", read_stale)
    into = bytearray(SIZE)
    before = num_open()
    BlockReader(3).read(path, FileRecord.of(data), [Piece(0, memoryview(into))])
    assert into == data
    wait_for_open(before)


def test_a_fault_of_one_file_s_reads_leaves_others_alone(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(b"other")
    faults.install(f"EIO@read:path={other.name},times=always", rank=0)
    read(path, [(0, 10)])
    with pytest.raises(CheckpointUnreadable):
        read(other, [(0, 5)])


def test_damage_names_its_bytes(path: Path, data: bytes) -> None:
    record = FileRecord.of(data)
    path.write_bytes(data[:BLOCK_BYTES] + b"other bytes" + data[BLOCK_BYTES + 11 :])
    with pytest.raises(DamagedRange) as caught:
        read(path, [(0, SIZE)], record)
    place = f"{path}, bytes {BLOCK_BYTES} to {2 * BLOCK_BYTES}: "
    assert str(caught.value) == place + caught.value.finding
    expected = record.blocks[8:16].hex()
    assert caught.value.finding.startswith(f"expected a block with the digest {expected}, found ")


def test_several_threads_each_have_their_own_buffers(path: Path, data: bytes) -> None:
    one = BlockReader(3, direct=False)
    one.read(path, FileRecord.of(data), [Piece(0, memoryview(bytearray(SIZE)))])
    assert len(one._buffers) == 2, "of two requests, each thread takes one"
    one.read(path, FileRecord.of(data), [Piece(0, memoryview(bytearray(10)))])
    assert len(one._buffers) == 2, "they are kept"


def test_a_file_truncated_during_a_read_is_damaged_up_to_the_end_of_the_request(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut_and_read(fd: int, buffers: list[memoryview], offset: int) -> int:
        os.truncate(path, BLOCK_BYTES + 100)
        return PREADV(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", cut_and_read)
    with pytest.raises(DamagedRange) as caught:
        read(path, [(BLOCK_BYTES + 50, 1000)])
    assert (caught.value.begin, caught.value.end) == (BLOCK_BYTES + 100, BLOCK_BYTES + 1050)


PAGES = 17
"""Of a file; the checks look at every second page."""


@pytest.fixture
def paged(tmp_path: Path) -> Iterator[int]:
    """A descriptor of `PAGES` pages, none of which is in the page cache."""
    (tmp_path / "pages").write_bytes(os.urandom(PAGES * mmap.PAGESIZE))
    forget(tmp_path / "pages")
    fd = os.open(tmp_path / "pages", os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # No read-ahead.
    if is_cached(fd, 0, 1):
        pytest.skip("the file system of the temporary folder keeps all files in memory")
    yield fd
    os.close(fd)


def is_cached(fd: int, begin: int, end: int) -> bool:
    with look_into_cache(fd, PAGES * mmap.PAGESIZE) as has:
        if has is None:
            pytest.skip("the system does not say")
        return has(begin, end)


@pytest.mark.parametrize("missing", range(0, PAGES, 2))
def test_a_range_counts_as_cached_only_if_its_first_its_last_and_seven_pages_between_are(
    paged: int, missing: int
) -> None:
    for page in range(PAGES):
        if page != missing:
            os.pread(paged, 1, page * mmap.PAGESIZE)
    assert not is_cached(paged, 0, PAGES * mmap.PAGESIZE)


def test_pages_outside_a_range_are_not_checked(paged: int) -> None:
    begin, end = 3 * mmap.PAGESIZE, 8 * mmap.PAGESIZE
    for at in range(begin, end, mmap.PAGESIZE):
        os.pread(paged, 1, at)
    assert is_cached(paged, begin, end)
    assert is_cached(paged, begin + 9, end - 9)
    assert not is_cached(paged, begin - 1, end)
    assert not is_cached(paged, begin, end + 1)


def test_a_file_that_cannot_be_mapped_is_not_checked(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_reader, "libc", NoMaps)
    with path.open("rb") as file, look_into_cache(file.fileno(), 10) as has:
        assert has is None
