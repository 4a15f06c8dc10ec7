"""All bytes get to and from a device, whatever the order of copies, and no memory is used before its copy has ended."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.checkpoint.devices.late_link import LateLink
from tests.checkpoint.reading.stored_boxes import numbers
from tests.examples import examples
from torchtitan_lite.checkpoint.devices.buffer_ring import SLOT_BYTES, DeviceRing


@st.composite
def cuts(draw: st.DrawFn, size: int) -> list[int]:
    """Return where to cut `size` bytes: rarely, and often in places."""
    near = draw(st.integers(0, size))
    few = draw(st.lists(st.integers(0, size), max_size=8))
    many = [min(size, near + 50 * number) for number in range(draw(st.integers(0, 40)))]
    return sorted({0, *few, *many, size})


@settings(deadline=None, max_examples=examples(150))
@given(st.data())
def test_all_bytes_arrive_whatever_the_order_of_parts_and_copies(data: st.DataObject) -> None:
    size = data.draw(st.sampled_from([1, 1000, SLOT_BYTES, 3 * SLOT_BYTES + 17]))
    source, target = numbers((size,), torch.uint8, 3), torch.zeros(size, dtype=torch.uint8)
    at = data.draw(cuts(size))
    ranges = data.draw(st.permutations([*pairwise(at)]))
    share = data.draw(st.integers(1, 20))
    link = LateLink(data.draw(st.sets(st.integers(0, 20))))
    read_only = data.draw(st.booleans())
    room = memoryview(source.numpy()).toreadonly() if read_only else memoryview(source.numpy())
    with DeviceRing(link, num_slots=data.draw(st.integers(1, 4))) as ring:
        place = ring.place(target)
        ring.follow()

        def copy(some: Sequence[tuple[int, int]]) -> None:
            # Their memory may change at once: as a reader's buffer does, which reads the next range.
            rooms = [memoryview(bytearray(room[begin:end])) for begin, end in some]
            ring.copy([(place[begin:end], each) for (begin, end), each in zip(some, rooms, strict=True)])
            for each in rooms:
                each[:] = bytes(len(each))

        with ThreadPoolExecutor(data.draw(st.integers(1, 5))) as threads:
            list(threads.map(copy, [ranges[first : first + share] for first in range(0, len(ranges), share)]))
    assert torch.equal(source, target)
    assert link.locked == 0


@settings(deadline=None, max_examples=examples(150))
@given(st.data())
def test_all_bytes_are_fetched_whatever_the_order_of_parts_and_copies(data: st.DataObject) -> None:
    size = data.draw(st.sampled_from([1, 1000, SLOT_BYTES, 5 * SLOT_BYTES + 17]))
    source, target = numbers((size,), torch.uint8, 3), bytearray(size)
    ranges = data.draw(st.permutations([*pairwise(data.draw(cuts(size)))]))
    share = data.draw(st.integers(1, 20))
    link = LateLink(data.draw(st.sets(st.integers(0, 20))))
    with DeviceRing(link, num_slots=data.draw(st.integers(1, 4))) as ring:
        place, room = ring.place(source), memoryview(target)
        ring.follow()

        def fetch(some: Sequence[tuple[int, int]]) -> bool:
            ring.fetch((place[begin:end], room[begin:end]) for begin, end in some)
            return all(room[begin:end] == memoryview(source.numpy())[begin:end] for begin, end in some)

        with ThreadPoolExecutor(data.draw(st.integers(1, 5))) as threads:
            # Whoever fetched them uses them at once.
            assert all(threads.map(fetch, [ranges[first : first + share] for first in range(0, len(ranges), share)]))
    assert link.locked == 0


@pytest.mark.parametrize("failing", range(4))
def test_what_was_begun_before_a_copy_that_fails_has_ended_when_the_ring_has(failing: int) -> None:
    link, source = LateLink(failing=failing), numbers((4 * SLOT_BYTES,), torch.uint8, 3)
    with DeviceRing(link, num_slots=2) as ring:
        place, room = ring.place(source), memoryview(bytearray(len(source)))
        ring.follow()
        with pytest.raises(RuntimeError, match="the device is lost"):
            ring.fetch([(place, room)])
        ring.fetch([(place, room)])  # No slot is lost.
    assert room == memoryview(source.numpy())
    assert link.locked == 0


def test_a_part_that_cannot_be_read_loses_no_slot() -> None:
    link, target = LateLink(), torch.zeros(10, dtype=torch.uint8)
    with DeviceRing(link, num_slots=1) as ring:
        place = ring.place(target)
        ring.follow()
        for _ in range(2):
            with pytest.raises(ValueError, match="structures"):
                ring.copy([(place, memoryview(bytearray(20)).cast("H"))])
        ring.copy([(place, memoryview(bytes(range(10))))])
    assert target.tolist() == [*range(10)]


def test_a_wait_that_fails_is_raised_and_loses_no_slot() -> None:
    link, target = LateLink(lost=0), torch.zeros(10, dtype=torch.uint8)
    with DeviceRing(link, num_slots=1) as ring:
        place = ring.place(target)
        ring.follow()
        ring.copy([(place, memoryview(bytes(10)))])
        with pytest.raises(RuntimeError, match="the device is lost"):
            ring.copy([(place, memoryview(bytes(10)))])
        ring.copy([(place, memoryview(bytes(range(10))))])
    assert target.tolist() == [*range(10)]


def test_neighbours_travel_together() -> None:
    link, target = LateLink(), torch.zeros(SLOT_BYTES, dtype=torch.uint8)
    with DeviceRing(link) as ring:
        place = ring.place(target)
        ring.follow()
        rows = [memoryview(bytes([row + 1]) * 4096) for row in range(100)]
        ring.copy([(place[4096 * row : 4096 * (row + 1)], data) for row, data in enumerate(rows)])
        ring.copy([(place[size : size + 10], memoryview(b"0123456789")) for size in (500_000, 600_000)])
    assert [len(data) for data in link.begun] == [409_600, 10, 10]
    assert target[: 100 * 4096].view(100, 4096).unique(dim=1).flatten().tolist() == list(range(1, 101))


def test_no_copy_is_empty_after_a_part_that_fills_a_slot() -> None:
    link, target = LateLink(), torch.zeros(3 * SLOT_BYTES, dtype=torch.uint8)
    with DeviceRing(link) as ring:
        place = ring.place(target)
        ring.follow()
        ring.copy(
            [(place[:SLOT_BYTES], memoryview(bytes(SLOT_BYTES))), (place[2 * SLOT_BYTES :][:10], memoryview(bytes(10)))]
        )
    assert [len(data) for data in link.begun] == [SLOT_BYTES, 10]
