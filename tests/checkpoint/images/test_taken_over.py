"""What the start before left at the keeper becomes the memory of this one, each arena once, whatever was cut short."""

from __future__ import annotations

import os
import random
from datetime import timedelta
from pathlib import Path

import pytest

from tests.checkpoint.images.spoiled import empty, fill, keeper_of, other_bytes, spoil, steps_in
from tests.checkpoint.images.starts import KILLED, run
from tests.examples import mostly_exhaustive
from tests.keepers import has_one_keeper_at_most, processes_of
from torchtitan_lite.distributed.environment import runtime_folder
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.memory.images.held_images import HeldImages
from torchtitan_lite.memory.keeper.client import HeldMemory, Keeper

pytestmark = pytest.mark.usefixtures("memory_tier")


def arenas(folder: Path) -> list[int]:
    """Return the inode of each arena at the keeper, for each name that it has."""
    with keeper_of(folder) as (_, held):
        return [os.fstat(each.arena_fd).st_ino for each in held]


def keep_twice(folder: Path) -> None:
    """Keep what is held under second names, like a start that is killed before it drops the names of the one before."""
    with keeper_of(folder) as (keeper, held):
        for each in held:
            keeper.keep(f"zz{each.name}", (each.arena_fd, each.mark_fd))


def test_memory_with_two_names_is_taken_over_once_and_its_image_stays(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    first = run(folder, 5)
    keep_twice(folder)
    assert run(folder, first.ready).loaded == (first.ready, "memory")  # It trains nothing.
    left = arenas(folder)
    assert len(left) == len({*left}) <= 3
    assert run(folder, 7).loaded == (first.ready, "memory")


def test_a_start_without_an_interval_takes_over_the_memory_of_one_image(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    first = run(folder, 5)
    assert len(arenas(folder)) > 1
    assert run(folder, first.ready, memory_interval=0).loaded == (first.ready, "memory")
    assert len(arenas(folder)) == 1


def test_what_is_no_image_is_ignored_with_one_line_and_makes_room(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    first = run(folder, 5)
    spoil(folder, [first.ready], other_bytes)
    spoil(folder, [first.ready - 1], empty)
    fill(folder)
    second = run(folder, 6)
    assert (second.loaded, second.error) == ((first.ready - 2, "memory"), "")
    assert second.log.count(" unusable in-memory snapshot") == 1
    assert second.ready == 6
    assert len(arenas(folder)) <= 3


LONGEST_SECONDS = 0.1
"""From the load to the kill: a hundred steps, while images are copied, digested and marked."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "starts",
    mostly_exhaustive([10, 100], kept=(10,)),  # 100 take 19 s.
)
def test_many_restarts_lose_no_image_and_leave_no_process_and_no_memory(
    starts: int, tmp_path: Path, memory_tier: Path
) -> None:
    folder, moments = tmp_path / "run", random.Random(starts)
    reported, weights, before = 0, {}, ""
    for number in range(starts):
        start = run(folder, 1_000_000, interval=50, kill_after=moments.uniform(0.0, LONGEST_SECONDS))
        assert (start.code, start.error) == (KILLED, "")
        resumed = start.loaded[0] if start.loaded is not None else 0
        assert resumed >= reported, f"start {number}: step {reported} was reported\n{before}\n---\n{start.log}"
        assert all(weights.get(step, weight) == weight for step, weight in start.weights.items())
        weights |= start.weights
        reported, before = max(reported, start.ready, resumed), start.log
        assert len({*arenas(folder)}) <= 3
        assert has_one_keeper_at_most(memory_tier)
    last = max(weights) + 1
    assert run(folder, last, kills=False, finishes=True).code == 0
    assert processes_of(memory_tier) == []
    straight = run(tmp_path / "straight", last, memory_ttl_seconds=0.0, memory_interval=0, kills=False).weights
    assert weights == {step: straight[step] for step in weights}
    assert len(weights) == last - 1, "no step was left out"


class KeepsOneMore(Keeper):
    """A keeper with which a process of the start before is registered, which keeps one more arena before it ends.

    A list from before the end of that process could differ between the ranks of a host, and two of them would write
    into the same memory.
    """

    has_ended_now = False

    def held(self, start_id: str | None = None) -> list[HeldMemory]:
        return [
            HeldMemory(*each, not self.has_ended_now)
            for each in ((h.name, h.arena_fd, h.mark_fd) for h in super().held())
        ]

    def wait_until_unmapped(self, seconds: float, start_id: str | None = None) -> bool:
        (first, *others) = super().held()
        fds = os.memfd_create("arena"), os.memfd_create("mark")
        for fd in fds:
            os.ftruncate(fd, 4096)
        self.keep("zz", fds)
        for each in (first, *others):
            each.close()
        for fd in fds:
            os.close(fd)
        self.has_ended_now = True
        return True


def test_what_was_kept_while_a_start_waited_is_among_what_it_finds(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(folder, 3)
    before = steps_in(folder)
    images = HeldImages(KeepsOneMore(folder, 60.0, runtime=runtime_folder()), "new", Peers(timedelta(seconds=60)))
    open_before = len([*Path("/proc/self/fd").iterdir()])
    images.look(topology="")
    assert "zz" in images._own_host
    assert [each.image.key.step for each in images.complete] == before[::-1]
    images.close()
    assert len([*Path("/proc/self/fd").iterdir()]) == open_before
