"""Which arena the next image goes to: whenever the job is killed, there is a step whose image every rank has."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_lite.checkpoint.format.file_data import FileData, FileLayout
from torchtitan_lite.checkpoint.staging.arena import NO_STEP, ArenaSlot, StagingArena
from torchtitan_lite.checkpoint.staging.copiers import HostCopier
from torchtitan_lite.checkpoint.staging.mark import Mark, read_mark
from torchtitan_lite.memory.images.pool import ImageStager, Pool


class Ranks:
    """Pools of several ranks that stage the same steps; each rank digests, fails and writes at its own pace."""

    def __init__(self, num_ranks: int, num_slots: int) -> None:
        self.pools = [Pool() for _ in range(num_ranks)]
        for pool in self.pools:
            pool.resize(num_slots)
        self.digesting: list[list[tuple[ArenaSlot, int]]] = [[] for _ in self.pools]
        self.writing: list[ArenaSlot | None] = [None for _ in self.pools]
        self.complete = NO_STEP

    def stage(self, step: int, failing: int, *, saves: bool) -> None:
        """Stage `step`, which the rank `failing` cannot; with `saves` a disk write reads the copy, too."""
        reports = [pool.report() for pool in self.pools]
        spare = [pool.agree([max(numbers) for numbers in zip(*reports, strict=True)]) for pool in self.pools]
        assert len(set(spare)) == 1, "all ranks take the same decision"
        if not spare[0] or (saves and any(self.writing)):
            return
        for rank, pool in enumerate(self.pools):
            pool.note_staged(step)
            if rank == failing:
                continue
            slot = pool.take(step)
            assert slot.num_readers == 1
            self.digesting[rank].append((slot, slot.num_copies))
            if saves:
                pool.add_reader(slot)
                self.writing[rank] = slot

    def digest(self, rank: int, *, fails: bool) -> None:
        """Digest the first copy of the queue of `rank`."""
        if self.digesting[rank]:
            slot, number = self.digesting[rank].pop(0)
            if not fails:
                self.pools[rank].validate(slot, number, lambda: None)
            self.pools[rank].release(slot)

    def end_write(self, rank: int) -> None:
        slot, self.writing[rank] = self.writing[rank], None
        if slot is not None:
            self.pools[rank].release(slot)

    def steps_of_all(self) -> set[int]:
        """Return the steps whose image every rank has."""
        return set.intersection(*({slot.step for slot in pool.slots if slot.is_valid} for pool in self.pools))


ACTIONS = st.one_of(
    st.tuples(st.just("stage"), st.sampled_from([-1, -1, -1, 0, 1]), st.booleans()),
    st.tuples(st.just("digest"), st.integers(0, 1), st.sampled_from([False, False, False, True])),
    st.tuples(st.just("end_write"), st.integers(0, 1), st.just(False)),
)


@given(st.sampled_from([2, 3]), st.lists(ACTIONS, max_size=60))
def test_once_a_step_was_complete_on_all_ranks_one_always_is(
    num_slots: int, actions: list[tuple[str, int, bool]]
) -> None:
    ranks, latest = Ranks(2, num_slots), NO_STEP
    for step, (action, rank, flag) in enumerate(actions):
        held = [set(map(id, _read(pool))) for pool in ranks.pools]
        if action == "stage":
            ranks.stage(step, rank, saves=flag)
            kept = [{id(slot) for slot in pool.slots if slot.is_read} for pool in ranks.pools]
            assert all(before <= after for before, after in zip(held, kept, strict=True)), "a copy in use stays"
        elif action == "digest":
            ranks.digest(rank, fails=flag)
        else:
            ranks.end_write(rank)
        assert latest == NO_STEP or max(ranks.steps_of_all(), default=NO_STEP) >= latest
        latest = max(pool.complete for pool in ranks.pools)


def _read(pool: Pool) -> list[ArenaSlot]:
    return [slot for slot in pool.slots if slot.is_read]


@given(st.integers(1, 30))
def test_with_three_arenas_every_step_has_an_image_although_one_is_being_written(num_steps: int) -> None:
    ranks = Ranks(2, 3)
    ranks.stage(0, -1, saves=True)
    for step in range(1, num_steps + 1):
        for rank in (0, 1):
            ranks.digest(rank, fails=False)
        ranks.stage(step, -1, saves=False)
    for rank in (0, 1):
        ranks.digest(rank, fails=False)
    assert max(ranks.steps_of_all()) == num_steps


def test_with_two_arenas_there_is_no_new_image_while_one_is_being_written() -> None:
    ranks = Ranks(2, 2)
    ranks.stage(0, -1, saves=False)
    for rank in (0, 1):
        ranks.digest(rank, fails=False)
    ranks.stage(1, -1, saves=True)
    for rank in (0, 1):
        ranks.digest(rank, fails=False)
    ranks.stage(2, -1, saves=False)
    assert ranks.steps_of_all() == {0, 1}
    ranks.end_write(0)
    ranks.end_write(1)
    ranks.stage(3, -1, saves=False)
    for rank in (0, 1):
        ranks.digest(rank, fails=False)
    assert ranks.steps_of_all() == {1, 3}


def test_one_arena_is_taken_again_and_again_and_reports_nothing() -> None:
    pool = Pool()
    assert pool.report() == ()
    assert pool.take(1) is pool.take(2)


def test_an_image_is_invalid_before_the_first_byte_of_the_next_one() -> None:
    stager = ImageStager(HostCopier(), let_go=lambda arena: None)
    image = FileData(FileLayout([(torch.float32, (1000,))]), [torch.zeros(1000)])
    arena = stager.take(image).arena
    assert arena.mark is not None
    arena.mark.set(1, image.num_bytes, b"card")
    assert read_mark(arena.mark.fd) is not None
    stager.take(image, 2)
    assert read_mark(arena.mark.fd) is None
    stager.close()


def test_an_arena_that_a_keeper_holds_is_never_truncated() -> None:
    arena = StagingArena(1 << 20, mark=Mark())
    arena.allocate()
    arena.is_kept = True
    assert arena.mark is not None
    elsewhere, mark = os.dup(arena.fd), os.dup(arena.mark.fd)
    arena.close()
    assert os.fstat(elsewhere).st_blocks * 512 >= 1 << 20
    again = StagingArena.adopted(elsewhere, mark)
    assert again.num_bytes == 1 << 20
    again.close()


def test_an_arena_that_is_too_small_is_given_up_before_a_larger_one_is_made() -> None:
    given_up: list[StagingArena] = []
    stager = ImageStager(HostCopier(), let_go=given_up.append)
    small, large = torch.zeros(1000), torch.zeros(2_000_000)
    first = stager.take(FileData(FileLayout([(small.dtype, small.shape)]), [small])).arena
    stager.take(FileData(FileLayout([(large.dtype, large.shape)]), [large]))
    assert given_up == [first]
    stager.close()


def test_a_forked_child_has_no_mapping_of_an_arena_and_leaves_it_alone() -> None:
    arena = StagingArena(1 << 20, mark=Mark())
    arena.allocate()
    child = os.fork()
    if child == 0:
        is_mapped = f"{arena.address:x}-" in Path("/proc/self/maps").read_text()
        arena.close()
        os._exit(1 if is_mapped or arena.fd != -1 else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert os.fstat(arena.fd).st_size == 1 << 20
    arena.close()
