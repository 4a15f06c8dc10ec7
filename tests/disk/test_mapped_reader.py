"""Files in memory are read like files on disk: the same bytes, the same checks."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.disk.pieces import SIZE, Room, dense, far, pieces_of, ranges
from torchtitan_lite.disk.block_reader import DamagedRange
from torchtitan_lite.disk.digest import BLOCK_BYTES, FileRecord
from torchtitan_lite.disk.read_requests import Piece, PieceTable
from torchtitan_lite.memory.images.mapped_reader import MappedReader

FILE = Path("/a/folder/__0_0.distcp")


@pytest.fixture(scope="module")
def data() -> bytes:
    return os.urandom(SIZE)


@pytest.fixture
def image(data: bytes) -> Iterator[int]:
    """A memfd that is longer than the file in it, as an arena is."""
    fd = os.memfd_create("image")
    os.truncate(fd, SIZE + BLOCK_BYTES)
    os.pwrite(fd, data, 0)
    yield fd
    os.close(fd)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(ranges(), far(), st.integers(1, 4), st.booleans(), st.sampled_from([0, 10, 300]))
def test_every_piece_gets_its_bytes(
    image: int, data: bytes, ranges: list[tuple[int, int]], elsewhere: set[int], threads: int, digests: bool, many: int
) -> None:
    pieces, room = pieces_of(ranges, elsewhere), Room(dense(BLOCK_BYTES - 7, many))
    record = FileRecord.of(data) if digests else FileRecord(SIZE)
    MappedReader({FILE.name: image}, threads).read(FILE, record, pieces, room.table)
    assert all(piece.into == data[piece.at : piece.at + len(piece.into)] for piece in pieces)
    assert room.memory == room.expected(data)


@pytest.mark.parametrize("at", [0, BLOCK_BYTES - 1, BLOCK_BYTES, SIZE - 1])
def test_a_changed_byte_is_found_in_its_block(image: int, data: bytes, at: int) -> None:
    os.pwrite(image, bytes([data[at] ^ 1]), at)
    reader, record = MappedReader({FILE.name: image}), FileRecord.of(data)
    begin = at // BLOCK_BYTES * BLOCK_BYTES
    for wanted in [(0, SIZE)], [(at, 1)], [(begin, 10)], [(begin + i * 20, 10) for i in range(100)]:
        with pytest.raises(DamagedRange, match="expected a block with the digest") as caught:
            reader.read(FILE, record, pieces_of([each for each in wanted if sum(each) <= SIZE]))
        assert (caught.value.begin, caught.value.end) == (begin, min(begin + BLOCK_BYTES, SIZE))
    with pytest.raises(DamagedRange):
        reader.verify(FILE, record, [at // BLOCK_BYTES])
    others = [number for number in range(-(-SIZE // BLOCK_BYTES)) if number != at // BLOCK_BYTES]
    reader.verify(FILE, record, others)


def test_memory_that_is_shorter_than_the_file_is_damage(image: int, data: bytes) -> None:
    os.truncate(image, SIZE - 1)
    with pytest.raises(DamagedRange, match=f"its memory has {SIZE - 1} bytes"):
        MappedReader({FILE.name: image}).read(FILE, FileRecord.of(data), pieces_of([(0, 1)]))


def test_a_piece_past_the_end_of_the_file_is_damage_though_there_is_memory(image: int, data: bytes) -> None:
    with pytest.raises(DamagedRange, match="the file ends after"):
        MappedReader({FILE.name: image}).read(FILE, FileRecord.of(data), pieces_of([(SIZE - 1, 2)]))


def test_a_file_that_is_not_in_this_hosts_memory_is_named(image: int, data: bytes) -> None:
    with pytest.raises(DamagedRange, match=r"__1_0\.distcp.*another host"):
        MappedReader({FILE.name: image}).read(FILE.with_name("__1_0.distcp"), FileRecord.of(data), [])


def test_what_was_written_after_a_close_is_read_and_nothing_stays_mapped(image: int, data: bytes) -> None:
    reader, room = MappedReader({FILE.name: image}), bytearray(4)
    reader.read(FILE, FileRecord.of(data), [Piece(0, memoryview(room))])
    reader.close()
    reader.close()
    mapped = [line.split()[4] for line in Path("/proc/self/maps").read_text().splitlines()]
    assert str(os.fstat(image).st_ino) not in mapped
    other = b"next" + data[4:]
    os.pwrite(image, b"next", 0)
    reader.read(FILE, FileRecord.of(other), [Piece(0, memoryview(room))])
    assert room == b"next"


def test_an_empty_file_has_nothing_to_read() -> None:
    fd = os.memfd_create("empty")
    MappedReader({FILE.name: fd}).read(FILE, FileRecord.of(b""), [])
    os.close(fd)


def test_parts_of_a_file_on_another_host_are_read_from_what_was_borrowed(data: bytes) -> None:
    reader = MappedReader({})
    reader.borrowed = {FILE.name: {100: data[100:200], 300: data[300:340]}}
    into, small = bytearray(30), bytearray(8)
    table = PieceTable()
    table.add([332], [ctypes.addressof(ctypes.c_char.from_buffer(small))], 8)
    reader.read(FILE, FileRecord.of(data), [Piece(150, memoryview(into)), Piece(9000, memoryview(b""))], table)
    assert (bytes(into), bytes(small)) == (data[150:180], data[332:340])


@pytest.mark.parametrize(("at", "count"), [(50, 10), (95, 10), (195, 10), (250, 1), (335, 10), (900, 1)])
def test_what_was_not_borrowed_is_on_another_host(data: bytes, at: int, count: int) -> None:
    reader = MappedReader({})
    reader.borrowed = {FILE.name: {100: data[100:200], 300: data[300:340]}}
    with pytest.raises(DamagedRange, match="another host"):
        reader.read(FILE, FileRecord.of(data), [Piece(at, memoryview(bytearray(count)))])
