"""What the stager does with its arenas, whatever a copy does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from torchtitan_lite.checkpoint.format.file_data import FileData, FileLayout
from torchtitan_lite.checkpoint.staging.arena import StagingArena
from torchtitan_lite.checkpoint.staging.copiers import Copied, CudaCopier, HostCopier
from torchtitan_lite.checkpoint.staging.stager import Stager, build_stager
from torchtitan_lite.disk.read_requests import HUGE_PAGE_BYTES
from torchtitan_lite.memory.images.pool import ImageStager, Pool, build_image_stager


class Failing(HostCopier):
    """A copier whose first copy fails."""

    def __init__(self) -> None:
        self.num_copies = 0

    def copy(self, image: FileData, arena: StagingArena, *, digests: bool) -> Copied:
        self.num_copies += 1
        if self.num_copies == 1:
            raise MemoryError("no room")
        return super().copy(image, arena, digests=digests)


@pytest.fixture
def pool() -> Pool:
    return Pool()


@pytest.fixture
def stager(pool: Pool) -> Iterator[Stager]:
    stager = Stager(HostCopier(), pool=pool)
    yield stager
    stager.close()


def image(num_elements: int = 1000) -> FileData:
    tensor = torch.zeros(num_elements)
    return FileData(FileLayout([(tensor.dtype, tuple(tensor.shape))]), [tensor])


def test_a_copy_that_fails_leaves_its_arena_to_the_next_one() -> None:
    pool = Pool()
    pool.resize(2)
    stager = Stager(Failing(), pool=pool)
    with pytest.raises(MemoryError, match="no room"):
        stager.take(image(), 1)
    assert not any(slot.is_read for slot in stager.pool.slots)
    staged = [stager.take(image(), step) for step in (2, 3)]
    assert {id(each.slot) for each in staged} == {id(slot) for slot in stager.pool.slots}
    with pytest.raises(TimeoutError, match="step 4"):
        stager.take(image(), 4)
    stager.pool.release(staged[0].slot)
    assert stager.take(image(), 4, 60.0).slot is staged[0].slot
    stager.close()


@pytest.mark.parametrize("num_elements", [1, 1 << 19, (1 << 19) + 1, 3_000_000])
def test_an_arena_is_of_whole_huge_pages_and_has_room_for_objects_that_grow(stager: Stager, num_elements: int) -> None:
    found = image(num_elements)
    arena = stager.take(found).arena
    assert arena.num_bytes % HUGE_PAGE_BYTES == 0
    assert 0 < arena.num_bytes - found.num_bytes <= 2 * HUGE_PAGE_BYTES


def test_only_arenas_for_later_starts_have_marks(stager: Stager) -> None:
    assert stager.take(image()).arena.mark is None
    for_later = build_image_stager(lambda arena: None)
    assert for_later.take(image()).arena.mark is not None
    for_later.close()


def test_every_slot_that_has_too_little_room_is_prepared_and_the_others_stay(stager: Stager, pool: Pool) -> None:
    pool.resize(3)
    staged = stager.take(image(), 1)
    first = staged.arena
    stager.pool.release(staged.slot)
    stager.prepare(1)
    stager.finish_preparation()
    arenas = [slot.arena for slot in stager.pool.slots]
    assert arenas[0] is first and None not in arenas
    stager.prepare(1 << 20)
    assert not stager.is_preparing, "all have room"
    stager.prepare(5 << 20)
    stager.prepare(9 << 20)  # One preparation at a time.
    stager.finish_preparation()
    assert not stager.is_preparing
    assert {slot.arena.num_bytes for slot in stager.pool.slots if slot.arena is not None} == {8 << 20}
    assert first.fd == -1


def test_a_closed_stager_has_freed_every_arena(stager: Stager, pool: Pool) -> None:
    pool.resize(2)
    arenas = [stager.take(image(), step).arena for step in (1, 2)]
    stager.close()
    assert [arena.fd for arena in arenas] == [-1, -1]
    assert [slot.arena for slot in stager.pool.slots] == [None, None]


def test_what_goes_wrong_while_an_arena_is_made_is_raised_where_it_is_taken() -> None:
    def refuse(arena: StagingArena) -> None:
        raise OSError("the keeper does not let go of it")

    stager = ImageStager(HostCopier(), let_go=refuse)
    staged = stager.take(image())
    first = staged.arena
    stager.pool.release(staged.slot)
    stager.prepare(64 << 20)  # Ignores the error: whoever takes the arena gets it.
    with pytest.raises(OSError, match="does not let go"):
        stager.take(image(2_000_000))
    assert not stager.pool.slots[0].is_read
    assert stager.take(image()).arena is first
    stager.close()


def test_an_image_that_just_fits_needs_no_other_arena(stager: Stager) -> None:
    staged = stager.take(image())
    first = staged.arena
    stager.pool.release(staged.slot)
    stager.prepare(first.num_bytes)
    stager.finish_preparation()
    assert stager.pool.slots[0].arena is first
    stager.prepare(first.num_bytes + 1)
    stager.finish_preparation()
    assert stager.pool.slots[0].arena is not first


def test_tensors_in_the_memory_of_the_host_are_copied_with_an_accelerator_too() -> None:
    """As of a state that is only in part on an accelerator; the copier then writes the bytes around them itself."""
    stager = Stager(CudaCopier())
    large = [torch.rand(5_000_000), torch.rand(3, 4).T, torch.rand(7), torch.empty(0)]
    small = [torch.rand(9), torch.ones(2, dtype=torch.bool)]
    for tensors in (large, small, large):
        layout = FileLayout([(each.dtype, tuple(each.shape)) for each in tensors])
        for objects in (b"first", b"and others"):  # Of the same layout the bytes around stay from copy to copy.
            found = FileData(layout, tensors, objects)
            staged = stager.take(found, digests=True)
            staged.wait()
            whole = bytearray(found.num_bytes)
            found.fill(memoryview(whole), 0, found.num_bytes)
            assert staged.arena.memory[: staged.num_bytes] == whole
            assert staged.record is None
    stager.close()


@pytest.mark.parametrize("ends", [True, False], ids=["close", "prepare"])
def test_a_copy_that_is_still_read_is_not_cut(ends: bool) -> None:
    stager = build_stager()
    staged = stager.take(image())
    memory, before = staged.arena.memory, bytes(staged.arena.memory[: staged.num_bytes])
    if ends:
        stager.close()
        assert staged.arena.fd == -1
    else:
        stager.prepare(64 << 20)
        stager.finish_preparation()
    assert bytes(memory[: staged.num_bytes]) == before, "whoever reads it would get SIGBUS"
    stager.pool.release(staged.slot)
    assert stager.take(image(10_000_000)).num_bytes > 10_000_000
    stager.close()
