"""Parts of an object are read like parts of a file: the same bytes, the same checks."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.bucket import proxy as proxies
from tests.bucket.proxy import Proxy, where
from tests.disk.pieces import SIZE, Room, dense, far, pieces_of, ranges
from torchtitan_lite.bucket.object_reader import GAP_BYTES, ObjectReader
from torchtitan_lite.bucket.objects import ObjectPath, Objects, connect
from torchtitan_lite.config.address import parse_address
from torchtitan_lite.disk.block_reader import DamagedRange
from torchtitan_lite.disk.digest import BLOCK_BYTES, FileRecord
from torchtitan_lite.disk.read_requests import REQUEST_BYTES
from torchtitan_lite.errors import CheckpointUnreadable

DATA = os.urandom(SIZE)
RECORD = FileRecord.of(DATA)
NAME = "step-5.0123456789abcdef"


@pytest.fixture
def objects(folder: str) -> Objects:
    objects = connect(parse_address(folder))
    objects.put(f"{NAME}/file", DATA)
    return objects


@pytest.fixture
def file(folder: str) -> Path:
    return ObjectPath(f"{folder}/{NAME}/file")


@pytest.fixture
def proxied(objects: Objects, proxy: Proxy, folder: str) -> Objects:
    """The same objects through the proxy."""
    return Objects(parse_address(folder), most_tries=3)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(ranges(), far(), st.integers(1, 4), st.booleans(), st.sampled_from([0, 10, 300]))
def test_every_piece_gets_its_bytes(
    objects: Objects,
    file: Path,
    ranges: list[tuple[int, int]],
    elsewhere: set[int],
    threads: int,
    digests: bool,
    many: int,
) -> None:
    pieces, room = pieces_of(ranges, elsewhere), Room(dense(BLOCK_BYTES - 7, many))
    record = RECORD if digests else FileRecord(SIZE)
    ObjectReader(objects, NAME, threads=threads).read(file, record, pieces, room.table)
    assert all(piece.into == DATA[piece.at : piece.at + len(piece.into)] for piece in pieces)
    assert room.memory == room.expected(DATA)


def test_a_file_without_a_record_is_read(objects: Objects, file: Path) -> None:
    pieces = pieces_of([(0, 10), (SIZE - 10, 10)])
    ObjectReader(objects, NAME).read(file, None, pieces)
    assert [bytes(piece.into) for piece in pieces] == [DATA[:10], DATA[-10:]]


@pytest.mark.parametrize("at", [0, BLOCK_BYTES - 1, BLOCK_BYTES, SIZE - 1])
def test_a_changed_byte_is_found_in_its_block(objects: Objects, file: Path, at: int) -> None:
    objects.put(f"{NAME}/file", DATA[:at] + bytes([DATA[at] ^ 1]) + DATA[at + 1 :])
    reader, begin = ObjectReader(objects, NAME), at // BLOCK_BYTES * BLOCK_BYTES
    for wanted in [(0, SIZE)], [(at, 1)], [(begin + i * 20, 10) for i in range(100)]:
        with pytest.raises(DamagedRange, match=r"expected a block with the digest .* twice") as caught:
            reader.read(file, RECORD, pieces_of([each for each in wanted if sum(each) <= SIZE]))
        assert (caught.value.begin, caught.value.end) == (begin, min(begin + BLOCK_BYTES, SIZE))
        assert str(file) in str(caught.value)
    with pytest.raises(DamagedRange):
        reader.verify(file, RECORD, [at // BLOCK_BYTES])
    reader.verify(file, RECORD, [block for block in range(-(-SIZE // BLOCK_BYTES)) if block != at // BLOCK_BYTES])


def test_a_block_that_is_wrong_once_is_read_again(
    objects: Objects, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class WrongOnce:
        def __init__(self) -> None:
            self.head = objects.head
            self.asked: list[tuple[int, int]] = []

        def get_range(self, key: str, begin: int, end: int) -> memoryview:
            self.asked.append((begin, end))
            data = bytearray(objects.get_range(key, begin, end))
            data[3] ^= len(self.asked) == 1
            return memoryview(data)

    wrong = WrongOnce()
    pieces = pieces_of([(0, 2 * BLOCK_BYTES)])
    ObjectReader(wrong, NAME).read(file, RECORD, pieces)  # type: ignore[arg-type]  # only what a reader needs
    assert pieces[0].into == DATA[: 2 * BLOCK_BYTES]
    assert wrong.asked == [(0, 2 * BLOCK_BYTES), (0, BLOCK_BYTES)]
    assert (
        f"{file}: bytes 0 to {BLOCK_BYTES} matched their digest only when read again: check the disk and the "
        "memory of this host" in caplog.text
    )


@pytest.mark.parametrize("found", [SIZE - 1, SIZE + 1, 0])
def test_an_object_of_another_size_is_damage(objects: Objects, file: Path, found: int) -> None:
    objects.put(f"{NAME}/file", (DATA + b"x")[:found])
    with pytest.raises(DamagedRange, match=f"it has {found} bytes"):
        ObjectReader(objects, NAME).read(file, RECORD, pieces_of([(0, 1)]))


def test_a_piece_past_the_end_of_the_object_is_damage(objects: Objects, file: Path) -> None:
    for record in (RECORD, None):
        with pytest.raises(DamagedRange, match=f"the object ends after {SIZE} bytes"):
            ObjectReader(objects, NAME).read(file, record, pieces_of([(SIZE - 1, 2)]))


def test_an_object_that_shrinks_meanwhile_is_damage(objects: Objects, file: Path) -> None:
    reader = ObjectReader(objects, NAME)
    reader.read(file, RECORD, [])
    objects.put(f"{NAME}/file", DATA[:BLOCK_BYTES])
    with pytest.raises(DamagedRange, match="the object ends before them"):
        reader.read(file, RECORD, pieces_of([(0, SIZE)]))


def test_a_missing_object_and_one_that_the_store_does_not_give_are_unreadable(
    proxied: Objects, proxy: Proxy, file: Path
) -> None:
    with pytest.raises(CheckpointUnreadable, match=r"step-5.*/missing could not be read: .*no such object"):
        ObjectReader(proxied, NAME).read(file.with_name("missing"), RECORD, [])
    reader = ObjectReader(proxied, NAME)
    reader.read(file, RECORD, [])
    for action, words in [
        (proxies.answers(403, "AccessDenied"), "PermissionError: the store refuses it"),
        (proxies.answers(400, "InvalidRequest"), "OSError: the store does not accept the request"),
    ]:
        proxy.again(where(action, "GET"))
        with pytest.raises(CheckpointUnreadable, match=words) as caught:
            reader.read(file, RECORD, pieces_of([(0, SIZE)]))
        assert caught.value.path == str(file)


def test_an_unreadable_part_outweighs_damage(objects: Objects, file: Path) -> None:
    class WrongAndRefused:
        def __init__(self) -> None:
            self.head = objects.head
            self.both_asked = threading.Barrier(2)

        def get_range(self, key: str, begin: int, end: int) -> memoryview:
            if end - begin > BLOCK_BYTES:
                self.both_asked.wait(60)
            if begin > 0:
                raise PermissionError(errno.EACCES, "the store refuses it", "a")
            return memoryview(bytes(end))

    with pytest.raises(CheckpointUnreadable, match="the store refuses it"):
        ObjectReader(WrongAndRefused(), NAME, threads=2).read(file, RECORD, pieces_of([(0, SIZE)]))  # type: ignore[arg-type]


def test_cut_answers_are_read_again(proxied: Objects, proxy: Proxy, file: Path) -> None:
    proxy.rules += [where(proxies.cuts(1000), "GET", times=2), where(proxies.resets, "GET", times=1)]
    pieces = pieces_of([(0, SIZE)])
    ObjectReader(proxied, NAME).read(file, RECORD, pieces)
    assert pieces[0].into == DATA


def test_neighbours_are_fetched_together_and_wide_gaps_are_not(proxied: Objects, proxy: Proxy, file: Path) -> None:
    def asked(*ranges: tuple[int, int]) -> list[str]:
        proxy.again()
        found: list[str] = []
        proxy.rules.append(lambda request: found.append(request.headers.get("range", request.method)))
        ObjectReader(proxied, NAME, threads=1).read(file, RECORD, pieces_of(list(ranges)))
        return found

    block = BLOCK_BYTES
    assert asked((0, SIZE)) == ["HEAD", f"bytes=0-{2 * REQUEST_BYTES - 1}", f"bytes={2 * REQUEST_BYTES}-{SIZE - 1}"]
    assert asked((5, 5), (GAP_BYTES + block, 5)) == ["HEAD", f"bytes=0-{3 * block - 1}"]
    assert asked((5, 5), (5 * block, 5)) == ["HEAD", f"bytes=0-{block - 1}", f"bytes={5 * block}-{6 * block - 1}"]
