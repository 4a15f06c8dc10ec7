"""What a start resumed from and cannot use for its own copies: it is kept next to them, until it is freed or left."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from tests.checkpoint.images.spoiled import steps_in
from torchtitan_lite.checkpoint.staging.arena import StagingArena
from torchtitan_lite.checkpoint.staging.mark import Mark
from torchtitan_lite.distributed.environment import runtime_folder
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.memory.images.pool import NO_STEP, FormerImages, Pool, step_in
from torchtitan_lite.memory.images.tier import Tier
from torchtitan_lite.memory.keeper.client import Keeper

PEERS = Peers(timedelta(seconds=60))
SIZE = 4096


@pytest.fixture
def tier(tmp_path: Path, memory_tier: Path) -> Iterator[Tier]:
    tier = Tier(Keeper(tmp_path / "checkpoint", 600.0, runtime=runtime_folder()), 0)
    tier.start, tier.folder_id = "s1", "f1"
    tier.begin_keeping(list)
    yield tier
    tier.finish()


def kept(tier: Tier, step: int) -> tuple[StagingArena, int]:
    """Return an arena with an image of `step` that the keeper holds, and another descriptor of its memory."""
    arena = StagingArena(SIZE, mark=Mark())
    arena.allocate()
    assert arena.mark is not None
    arena.mark.set(step, 3, b"card")
    assert tier.keep(arena)
    return arena, os.dup(arena.fd)


def is_freed(memory: int) -> bool:
    return os.fstat(memory).st_size == 0


def pool_with(*arenas: tuple[StagingArena, int]) -> Pool:
    pool = Pool()
    pool.adopt(arenas, [step for _, step in arenas])
    return pool


@pytest.mark.parametrize(("num_bytes", "taken"), [(SIZE, False), (SIZE + 1, True)])
def test_only_what_was_loaded_and_has_no_room_is_taken_out_of_the_pool(tier: Tier, num_bytes: int, taken: bool) -> None:
    former, (loaded, _), (earlier, _) = FormerImages(tier), kept(tier, 7), kept(tier, 6)
    former.step = 7
    pool = pool_with((loaded, 7), (earlier, 6))
    assert not former.are_any
    former.take_from(pool, num_bytes, PEERS)
    assert former.are_any == taken
    assert [slot.arena for slot in pool.slots] == [None if taken else loaded, earlier]
    assert [(slot.step, slot.is_valid) for slot in pool.slots] == [(NO_STEP, False) if taken else (7, True), (6, True)]
    former.free()
    assert steps_in(tier.keeper.folder) == ([6] if taken else [6, 7])
    former.close()


@pytest.mark.parametrize("later", [False, True], ids=["now", "in a thread"])
def test_what_is_freed_is_no_image_any_more_and_its_memory_is_free(tier: Tier, later: bool) -> None:
    former, (arena, memory) = FormerImages(tier), kept(tier, 7)
    former.free_later()  # There is nothing.
    former.hold([arena])
    if later:
        former.free_later()
        for thread in threading.enumerate():
            if thread.name == "former images":
                thread.join(60.0)
    else:
        former.free()
    assert steps_in(tier.keeper.folder) == [] and is_freed(memory)
    assert former.are_any, "all ranks continue alike, whether or not one has freed its own"
    former.free()
    os.close(memory)


def test_what_is_closed_stays_for_later_starts_and_what_no_keeper_holds_goes(tier: Tier) -> None:
    former, (arena, memory), (lost, unkept) = FormerImages(tier), kept(tier, 7), kept(tier, 6)
    tier.give_up(lost)
    former.hold([arena, lost])
    former.close()
    former.close()
    assert steps_in(tier.keeper.folder) == [7]
    assert (is_freed(memory), is_freed(unkept)) == (False, True)
    assert (arena.fd, lost.fd) == (-1, -1)
    for fd in (memory, unkept):
        os.close(fd)


def test_once_the_keeper_has_ended_the_memory_is_free(tier: Tier) -> None:
    former, (arena, memory) = FormerImages(tier), kept(tier, 7)
    former.hold([arena])
    tier.finish()
    former.close()
    assert is_freed(memory) and arena.fd == -1
    os.close(memory)


def test_a_mark_that_says_nothing_or_is_none_has_no_step(tier: Tier) -> None:
    mark, other = Mark(), os.memfd_create("mark")
    assert (step_in(mark.fd), step_in(other)) == (NO_STEP, NO_STEP)
    os.close(other)
    assert step_in(other) == NO_STEP
    mark.set(0, 3, b"card")
    assert step_in(mark.fd) == 0
    mark.close()
