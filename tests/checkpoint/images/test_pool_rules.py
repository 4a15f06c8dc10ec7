"""The rules of the pool on values: which arena is spare, what a rank reports, what the ranks then know."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from torchtitan_lite.checkpoint.staging.arena import ArenaSlot, StagingArena
from torchtitan_lite.checkpoint.staging.mark import Mark
from torchtitan_lite.memory.images.pool import NO_STEP, Pool, choose_arena, is_busy


def Arena(step: int, *, is_valid: bool = True, is_read: bool = False) -> ArenaSlot:  # reads as a value
    return ArenaSlot(None, step, is_valid, num_readers=int(is_read))


NEW = Arena(NO_STEP, is_valid=False)


@pytest.mark.parametrize(
    ("arenas", "complete", "number"),
    [
        ([Arena(1, is_read=True)], 1, 0),
        ([NEW, NEW], NO_STEP, 0),
        ([Arena(1), NEW], NO_STEP, 1),
        ([Arena(2), Arena(1)], NO_STEP, 1),
        ([Arena(1), Arena(2)], 2, 0),
        ([Arena(2), Arena(1)], 2, 1),
        ([Arena(1), Arena(2)], 1, 1),
        ([Arena(3), Arena(2, is_valid=False), Arena(1)], 3, 1),
        ([Arena(1, is_valid=False), Arena(2)], 1, 0),
        ([Arena(1, is_read=True), Arena(2)], 2, None),
        ([Arena(1, is_valid=False, is_read=True), Arena(2)], 1, 1),
        ([Arena(1, is_read=True), Arena(2, is_read=True)], NO_STEP, None),
    ],
)
def test_the_arena_to_overwrite_is_the_least_useful_one_that_is_spare(
    arenas: Sequence[ArenaSlot], complete: int, number: int | None
) -> None:
    assert choose_arena(arenas, (complete,)) == number


def test_the_image_that_has_replicas_is_kept_next_to_the_one_that_all_ranks_have() -> None:
    arenas = [Arena(1), Arena(3), Arena(2), Arena(4, is_read=True)]
    assert choose_arena(arenas, (3, 1)) == 2
    assert choose_arena(arenas[:2], (3, 1)) is None
    assert is_busy(arenas[:2], 2) and not is_busy(arenas, 2)
    assert not is_busy([Arena(1), Arena(3, is_valid=False)], 2), "what is no image may be overwritten"


@pytest.mark.parametrize(
    ("arenas", "busy"),
    [
        ([Arena(1)], False),
        ([Arena(1, is_read=True)], True),
        ([NEW, NEW], False),
        ([Arena(1), Arena(2)], False),
        ([Arena(1, is_read=True), Arena(2)], True),
        ([Arena(1, is_read=True), Arena(2, is_valid=False)], False),
        ([Arena(1, is_read=True), Arena(2), Arena(3)], False),
        ([Arena(1, is_read=True), Arena(2, is_read=True)], True),
    ],
)
def test_a_rank_is_busy_if_its_only_spare_arena_may_have_the_image_that_all_ranks_have(
    arenas: Sequence[ArenaSlot], busy: bool
) -> None:
    assert is_busy(arenas) == busy


def pool_of(num_slots: int) -> Pool:
    pool = Pool()
    pool.resize(num_slots)
    return pool


def nothing() -> None:
    """Mark nothing."""


def staged(pool: Pool, step: int, *, valid: bool = True) -> None:
    pool.note_staged(step)
    slot = pool.take(step)
    if valid:
        pool.validate(slot, slot.num_copies, nothing)
    pool.release(slot)


def test_a_pool_grows_by_resize_only() -> None:
    pool = pool_of(3)
    slots = [*pool.slots]
    pool.resize(2)
    assert pool.slots == slots
    pool.resize(4)
    assert len(pool.slots) == 4 and pool.slots[:3] == slots


def test_a_pool_that_shrinks_keeps_the_image_that_all_ranks_have() -> None:
    pool = pool_of(3)
    for step in (1, 2):
        staged(pool, step)
    pool.agree((False, True, True, False, True))  # Of the steps none, 1 and 2: all ranks have step 1.
    assert pool.complete == 1
    assert pool.shrink(3, 0.0) == []
    assert pool.shrink(1, 0.0) == []
    assert [slot.step for slot in pool.slots] == [1]
    assert pool.report() == (), "as a pool of one"


def test_a_pool_that_shrinks_keeps_what_is_being_read() -> None:
    pool = pool_of(3)
    staged(pool, 1)
    read = pool.take(2)
    pool.shrink(1, 0.0)
    assert pool.slots == [read]


def test_a_report_says_of_each_of_the_last_four_steps_whether_its_image_is_lacking() -> None:
    pool = pool_of(3)
    assert pool.report() == (False, True, True, True, True)
    staged(pool, 1)
    staged(pool, 2, valid=False)
    assert pool.report() == (False, True, True, False, True)
    staged(pool, 3)
    assert pool.report() == (False, True, False, True, False)
    staged(pool, 4)
    staged(pool, 5)
    assert pool.report() == (False, True, False, False, False), "step 1 is no longer in it"
    staged(pool, 5)
    assert pool.report() == (False, True, True, False, False), "a step that is staged again counts once"


def test_the_latest_step_that_no_rank_lacks_is_complete_and_stays_so() -> None:
    pool = pool_of(3)
    for step in (1, 2, 3):
        staged(pool, step)
    assert pool.agree((False, True, False, False, True))
    assert pool.complete == 2
    assert pool.agree((False, True, True, True, True)), "none is complete: the one before counts"
    assert pool.complete == 2
    assert not pool.agree((True, True, False, False, False)), "a rank has none to spare"
    assert pool.complete == 3
    assert pool.agree(()), "with one arena nothing is reported"


def test_a_copy_that_was_overwritten_is_no_image_even_if_the_later_one_is_of_the_same_step() -> None:
    pool, marked = Pool(), list[str]()
    slot = pool.take(1)
    number = slot.num_copies
    assert pool.take(1) is slot
    assert not pool.validate(slot, number, lambda: marked.append("first"))
    assert not slot.is_valid
    assert pool.validate(slot, slot.num_copies, lambda: marked.append("second"))
    assert slot.is_valid and marked == ["second"]
    pool.clear()
    assert not pool.validate(slot, slot.num_copies - 1, lambda: marked.append("after a load"))
    assert marked == ["second"]


def test_a_slot_that_is_released_too_often_has_no_reader_and_its_next_one_counts() -> None:
    pool = pool_of(2)
    slot = pool.take(1)
    for _ in range(3):
        pool.release(slot)
    assert slot.num_readers == 0
    pool.add_reader(slot)
    assert slot.is_read


def test_taking_waits_for_a_reader_and_gives_up_after_its_time() -> None:
    pool = pool_of(2)
    first, _ = pool.take(1), pool.take(2)
    with pytest.raises(TimeoutError, match="no staging memory for step 3"):
        pool.take(3)
    reader = threading.Thread(target=pool.release, args=(first,))
    reader.start()
    assert pool.take(3, 60.0) is first
    reader.join()
    assert (first.step, first.is_valid, first.num_readers) == (3, False, 1)


def test_waiting_until_nothing_is_read_ends_with_the_last_reader() -> None:
    pool = pool_of(2)
    slots = [pool.take(1), pool.take(2)]
    pool.wait_until_unread(0.0)
    assert all(slot.is_read for slot in slots)
    reader = threading.Thread(target=lambda: [pool.release(slot) for slot in slots])
    reader.start()
    pool.wait_until_unread(60.0)
    assert not any(slot.is_read for slot in slots)
    reader.join()


def test_adopted_images_are_valid_known_and_the_only_ones_that_are_visited() -> None:
    arenas = [StagingArena(4096, mark=Mark()) for _ in range(3)]
    pool = Pool()
    pool.adopt([(arenas[0], 7), (arenas[1], NO_STEP), (arenas[2], 5)], [5, 7, NO_STEP, 7, 3, 1])
    assert [(slot.arena, slot.step, slot.is_valid) for slot in pool.slots] == [
        (arenas[0], 7, True),
        (arenas[1], NO_STEP, False),
        (arenas[2], 5, True),
    ]
    assert pool.report() == (False, True, True, False, False), "of steps 1, 3, 5 and 7"
    visited: list[StagingArena] = []
    pool.resize(4)
    pool.for_each_valid(visited.append)
    assert visited == [arenas[0], arenas[2]]
    for arena in arenas:
        arena.close()
