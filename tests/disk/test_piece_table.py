"""Small pieces in columns are read like pieces that are objects: the same bytes, checks, findings and requests."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.disk.pieces import Ranges, Room, dense, forget
from torchtitan_lite.disk.block_reader import BlockReader, DamagedRange
from torchtitan_lite.disk.digest import BLOCK_BYTES, FileRecord
from torchtitan_lite.disk.read_requests import REQUEST_BYTES, Piece, segments

SIZE = REQUEST_BYTES + BLOCK_BYTES + 12345


@pytest.fixture(scope="module")
def data() -> bytes:
    return os.urandom(SIZE)


@pytest.fixture
def path(data: bytes, tmp_path: Path) -> Path:
    (tmp_path / "file").write_bytes(data)
    return tmp_path / "file"


RANGES = st.lists(
    st.tuples(
        st.integers(0, SIZE - 40_000)
        | st.integers(-3, 3).map(lambda n: BLOCK_BYTES + n)
        | st.integers(-200, 3).map(lambda n: REQUEST_BYTES + n),
        st.integers(1, 40_000),
    ),
    max_size=12,
)
DENSE = st.builds(dense, st.integers(0, 2 * BLOCK_BYTES), st.integers(0, 300), st.sampled_from([100, 4096, 7000]))


@pytest.mark.slow
@given(ranges=RANGES, many=DENSE, pieces=RANGES, checked=st.booleans(), direct=st.booleans(), chance=st.randoms())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_pieces_in_columns_and_pieces_next_to_them_get_their_bytes_and_no_other_byte_changes(
    path: Path,
    data: bytes,
    ranges: Ranges,
    many: Ranges,
    pieces: Ranges,
    checked: bool,
    direct: bool,
    chance: random.Random,
) -> None:
    together = [*ranges, *many]
    chance.shuffle(together)
    room = Room(together)
    others = [Piece(at, memoryview(bytearray(count))) for at, count in pieces]
    if direct:
        forget(path)
    BlockReader(2, direct).read(path, FileRecord.of(data) if checked else None, others, room.table)
    assert room.memory == room.expected(data)
    assert all(piece.into == data[piece.at : piece.at + len(piece.into)] for piece in others)


@given(ranges=RANGES, many=DENSE, whole_blocks=st.booleans())
@settings(deadline=None)
def test_pieces_in_columns_are_read_by_the_requests_of_pieces(ranges: Ranges, many: Ranges, whole_blocks: bool) -> None:
    together = [*ranges, *many]
    pieces = [Piece(at, memoryview(bytearray(count))) for at, count in together]
    of_pieces = [(each.begin, each.end) for each in segments(pieces, SIZE, whole_blocks)]
    room = Room(together)
    of_table = [(each.begin, each.end) for each in segments([], SIZE, whole_blocks, room.table)]
    if whole_blocks:
        assert of_table == of_pieces
    else:  # A gap within a block that has many pieces is read, however large.
        assert {at for begin, end in of_pieces for at in (begin, end)} >= {
            at for begin, end in of_table for at in (begin, end)
        }
        assert all(any(b <= begin and end <= e for b, e in of_table) for begin, end in of_pieces)


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("count", [10, 800])
def test_damage_in_a_block_of_pieces_in_columns_is_found_and_names_the_block(
    path: Path, data: bytes, count: int, direct: bool
) -> None:
    record = FileRecord.of(data)
    path.write_bytes(data[: BLOCK_BYTES + 7] + b"other" + data[BLOCK_BYTES + 12 :])
    if direct:
        forget(path)
    room = Room(dense(BLOCK_BYTES + 5000, count))
    with pytest.raises(DamagedRange) as caught:
        BlockReader(2, direct).read(path, record, [], room.table)
    assert (caught.value.begin, caught.value.end) == (BLOCK_BYTES, 2 * BLOCK_BYTES)


@pytest.mark.parametrize("checked", [False, True])
def test_pieces_in_columns_beyond_the_end_of_the_file_are_damage(path: Path, data: bytes, checked: bool) -> None:
    room = Room(dense(SIZE - 100_000, 40))
    with pytest.raises(DamagedRange, match=f"the file ends after {SIZE} bytes"):
        BlockReader(1).read(path, FileRecord.of(data) if checked else None, [], room.table)
