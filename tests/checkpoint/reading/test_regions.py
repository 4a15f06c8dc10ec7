"""What is read straight into its place, what is staged through a buffer, and in parts of which size."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from torchtitan_lite.checkpoint.devices.buffer_ring import DeviceRing
from torchtitan_lite.checkpoint.devices.link import CudaLink
from torchtitan_lite.checkpoint.format.chunk_runs import row_major_strides
from torchtitan_lite.checkpoint.format.contents import Chunk, Item
from torchtitan_lite.checkpoint.reading import regions
from torchtitan_lite.checkpoint.reading.regions import StoredBox, staged, straight, whole
from torchtitan_lite.disk.read_requests import GAP_BYTES, Piece

RING = DeviceRing(CudaLink())
"""For tensors in the memory of this host, which it leaves alone."""
FLOAT = torch.float32
LONG_RUN_BYTES = 16 << 10
"""Rows of this many bytes are read one by one."""
LONG_ROW = LONG_RUN_BYTES // 4
"""In elements of four bytes."""


def file_of(num_elements: int) -> bytes:
    """Return a file of seven bytes and then the elements 0.0, 1.0 and so on."""
    return b"padding" + torch.arange(float(num_elements)).numpy().tobytes()


def source(shape: Sequence[int], strides: Sequence[int] | None = None, first: int = 0) -> StoredBox:
    """Return the source of a tensor of `shape` in such a file, starting at the element `first`."""
    strides = row_major_strides(tuple(shape)) if strides is None else strides
    return StoredBox("f", 7 + 4 * first, FLOAT, tuple(shape), tuple(strides))


def read(pieces: Sequence[Piece], data: bytes) -> None:
    for piece in pieces:
        piece.into[:] = data[piece.at : piece.at + len(piece.into)]


def expected(of: StoredBox) -> Tensor:
    """Return the elements of `of` in such a file."""
    count = (of.at - 7) // 4 + of.nbytes // 4
    return torch.arange(float(count)).as_strided(of.shape, of.strides, (of.at - 7) // 4)


@pytest.mark.parametrize(
    ("shape", "strides"),
    [((), ()), ((5,), (1,)), ((2, 3), (3, 1)), ((4, 3, 2), (6, 2, 1)), ((2, 0, 3), (3, 3, 1)), ((1, 1), (1, 1))],
)
def test_strides_of_a_row_major_tensor_are_those_of_torch(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    assert row_major_strides(shape) == strides == torch.empty(shape).contiguous().stride()


def test_a_box_in_a_source_begins_at_its_first_element_and_ends_at_its_last() -> None:
    box = source((6, 10)).part((2, 3), (2, 4))
    assert (box.file, box.dtype, box.shape, box.strides) == ("f", FLOAT, (2, 4), (10, 1))
    assert (box.at, box.nbytes) == (7 + 4 * 23, 4 * 14)
    assert (source(()).nbytes, source((3,)).nbytes) == (4, 12)


def test_a_tensor_that_lies_as_it_is_stored_is_one_piece() -> None:
    target = torch.zeros(6, 10)
    pieces = straight(source((6, 10), first=3), target, RING)
    assert pieces is not None
    assert [(piece.at, len(piece.into)) for piece in pieces] == [(7 + 12, 240)]
    read(pieces, file_of(63))
    assert torch.equal(target, expected(source((6, 10), first=3)))


@pytest.mark.parametrize("length", [LONG_ROW, LONG_ROW + 1])
def test_long_rows_are_read_one_by_one_each_into_its_place(length: int) -> None:
    target = torch.zeros(3, length + 2)[:, 1:-1]
    box = source((5, length + 9)).part((1, 4), (3, length))
    pieces = straight(box, target, RING)
    assert pieces is not None
    rows = [7 + 4 * ((row + 1) * (length + 9) + 4) for row in range(3)]
    assert [(piece.at, len(piece.into)) for piece in pieces] == [(at, 4 * length) for at in rows]
    read(pieces, file_of(5 * (length + 9)))
    assert torch.equal(target, expected(box))


def test_short_rows_that_lie_close_together_are_not_read_one_by_one() -> None:
    """Many small reads are slower than one read and a copy."""
    length = LONG_ROW - 1
    assert straight(source((5, length + 9)).part((0, 0), (3, length)), torch.zeros(3, length), RING) is None


@pytest.mark.parametrize(("gap", "is_straight"), [(GAP_BYTES // 4, False), (GAP_BYTES // 4 + 1, True)])
def test_short_rows_that_lie_far_apart_are_read_one_by_one(gap: int, is_straight: bool) -> None:
    """One read of them all would read the large gaps for nothing."""
    box, target = source((3, 10 + gap)).part((0, 0), (3, 10)), torch.zeros(3, 10)
    pieces = straight(box, target, RING)
    assert (pieces is not None) == is_straight
    if pieces is not None:
        read(pieces, file_of(3 * (10 + gap)))
        assert torch.equal(target, expected(box))


def test_the_smallest_gap_between_rows_in_several_dimensions_counts() -> None:
    far = GAP_BYTES // 4 + 100
    assert straight(source((2, 3, 8), (far, 9, 1)), torch.zeros(2, 3, 8), RING) is None
    target = torch.zeros(2, 3, 8)
    pieces = straight(source((2, 3, 8), (3 * far, far, 1)), target, RING)
    assert pieces is not None
    assert len(pieces) == 6
    read(pieces, file_of(6 * far))
    assert torch.equal(target, expected(source((2, 3, 8), (3 * far, far, 1))))


def test_dimensions_that_lie_together_in_both_are_one_row() -> None:
    target = torch.zeros(3, 2, 2, LONG_ROW)[:, :1]
    box = source((3, 1, 2, LONG_ROW), (4 * LONG_ROW, 7, LONG_ROW, 1))  # The stride of a dim of size 1 does not matter.
    pieces = straight(box, target, RING)
    assert pieces is not None
    assert [len(piece.into) for piece in pieces] == [8 * LONG_ROW] * 3
    read(pieces, file_of(12 * LONG_ROW))
    assert torch.equal(target, expected(box))


def test_a_transposed_tensor_is_read_straight_where_it_lies_as_it_is_stored() -> None:
    target = torch.zeros(5, LONG_ROW).t()
    pieces = straight(source((LONG_ROW, 5), (1, LONG_ROW)), target, RING)
    assert pieces is not None
    assert [len(piece.into) for piece in pieces] == [20 * LONG_ROW]
    read(pieces, file_of(5 * LONG_ROW))
    assert torch.equal(target, expected(source((LONG_ROW, 5), (1, LONG_ROW))))


def test_a_small_transposed_tensor_is_one_piece_too() -> None:
    target = torch.zeros(2, 3).t()
    pieces = straight(source((3, 2), (1, 3)), target, RING)
    assert pieces is not None
    assert [len(piece.into) for piece in pieces] == [24]
    read(pieces, file_of(6))
    assert target.tolist() == [[0, 3], [1, 4], [2, 5]]


def test_elements_that_are_stored_once_for_many_places_are_not_read_straight() -> None:
    assert straight(source((3, LONG_ROW), (0, 1)), torch.zeros(3, LONG_ROW), RING) is None


class Subclass(torch.Tensor):
    """A tensor whose memory may mean anything."""


@pytest.mark.parametrize(
    "target",
    [
        torch.zeros(4, dtype=torch.float64),
        torch.zeros(4).as_subclass(Subclass),
        torch.zeros(4, dtype=torch.complex64).imag,
        torch._neg_view(torch.zeros(4)),
        torch.zeros(4, device="meta"),
        torch.zeros(4).to_sparse(),
    ],
    ids=["dtype", "subclass", "gaps", "negative", "device", "layout"],
)
def test_a_target_without_plain_memory_of_that_dtype_is_not_read_straight(target: Tensor) -> None:
    assert straight(source((4,)), target, RING) is None
    assert whole(Chunk("f", 7, (0,), (4,)), FLOAT, target, RING) is None


def test_a_parameter_is_read_straight() -> None:
    assert straight(source((4,)), torch.nn.Parameter(torch.zeros(4)).detach(), RING) is not None
    assert straight(source((4,)), torch.nn.Parameter(torch.zeros(4), requires_grad=False), RING) is not None


def test_a_conjugated_view_is_not_read_straight() -> None:
    target = torch.zeros(4, dtype=torch.complex64).conj()
    assert straight(StoredBox("f", 0, torch.complex64, (4,), (1,)), target, RING) is None


def test_a_whole_chunk_is_one_piece_if_its_target_has_its_dtype_shape_and_layout() -> None:
    chunk, target = Chunk("f", 7, (0, 0), (2, 3)), torch.zeros(2, 3)
    piece = whole(chunk, FLOAT, target, RING)
    assert piece is not None
    assert (piece.at, len(piece.into)) == (7, 24)
    read([piece], file_of(6))
    assert target.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert whole(chunk, torch.int32, target, RING) is None
    assert whole(chunk, FLOAT, torch.zeros(3, 2), RING) is None
    assert whole(chunk, FLOAT, torch.zeros(3, 2).t(), RING) is None
    assert whole(Chunk("f", None, (0, 0), (2, 3), Item("f", 0, 24)), FLOAT, target, RING) is None


SMALL = 4096
"""Bytes of a staged part in the tests below."""


@pytest.mark.parametrize(
    ("of", "target"),
    [
        (source((4000,)), torch.zeros(4000, dtype=torch.float64)),
        (source((40, 100)), torch.zeros(100, 40).t()),
        (source((40, 100)), torch.zeros(40, 100, dtype=torch.bfloat16)),
        (source((100, 40), (1, 100)), torch.zeros(100, 40)),
        (source((3, 5000)).part((0, 17), (3, 2000)), torch.zeros(3, 2000, dtype=torch.float64)),
        (source((2, 3, 700), (2100, 1, 3)), torch.zeros(2, 3, 700)),
        (source((1, 9, 1, 999), (1, 5000, 1, 3)), torch.zeros(1, 9, 1, 999)),
        (source((2, 2, 2), (400, 400, 400)), torch.zeros(2, 2, 2)),
    ],
    ids=[
        "dtype",
        "target lies otherwise",
        "cast",
        "source lies otherwise",
        "box",
        "three dimensions",
        "gaps",
        "overlap",
    ],
)
def test_parts_are_small_and_make_up_the_whole(of: StoredBox, target: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regions, "STAGED_BYTES", SMALL)
    data = file_of((of.at + of.nbytes) // 4 + 1)
    parts = list(staged(of, target, RING))
    assert len(parts) > 1
    for part in parts:
        assert part.file == "f"
        assert part.num_bytes <= SMALL
        pieces = part.begin()
        assert sum(len(piece.into) for piece in pieces) <= part.num_bytes
        assert min(piece.at for piece in pieces) == part.at
        read(pieces, data)
        part.finish()
    assert torch.equal(target, expected(of).to(target.dtype))


def test_gaps_between_long_rows_are_not_read_when_the_rows_are_staged() -> None:
    box = source((4, 3 * LONG_ROW)).part((0, LONG_ROW), (4, LONG_ROW))
    [part] = staged(box, torch.zeros(4, LONG_ROW, dtype=torch.float64), RING)
    assert [len(piece.into) for piece in part.begin()] == [LONG_RUN_BYTES] * 4


def test_a_source_that_is_no_larger_than_a_part_is_one_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regions, "STAGED_BYTES", SMALL)
    for count, parts in ((SMALL // 4, 1), (SMALL // 4 + 1, 2)):
        assert len(list(staged(source((count,)), torch.zeros(count, dtype=torch.float64), RING))) == parts


def test_a_single_element_may_be_larger_than_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regions, "STAGED_BYTES", 2)
    target = torch.zeros(3, dtype=torch.float64)
    parts = list(staged(source((3,)), target, RING))
    assert [part.num_bytes for part in parts] == [4, 4, 4]
    for part in parts:
        read(part.begin(), file_of(3))
        part.finish()
    assert target.tolist() == [0, 1, 2]


def test_parts_are_as_large_as_they_may_be() -> None:
    """They have 8 MiB: each part costs a request of its own, and an object for each of its rows."""
    count = (20 << 20) // 4
    parts = list(staged(source((count,)), torch.zeros(count, dtype=torch.float64), RING))
    assert [part.num_bytes for part in parts] == [8 << 20, 8 << 20, 4 << 20]
