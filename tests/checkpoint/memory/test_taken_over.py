"""What the start before left at the keeper becomes the memory of this one, each arena once, whatever was cut short."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.checkpoint.memory.starts import KILLED, run
from tests.keepers import keepers_in, processes_of
from torchtitan_lite.distributed.environment import runtime_folder
from torchtitan_lite.keeper.client import Keeper

pytestmark = pytest.mark.usefixtures("memory_tier")


def arenas(folder: Path) -> list[int]:
    """Return the inode of each arena at the keeper, for each name that it has."""
    found = []
    for held in Keeper(folder, 60.0, runtime=runtime_folder()).held():
        found.append(os.fstat(held.arena_fd).st_ino)
        held.close()
    return found


def keep_twice(folder: Path) -> None:
    """Keep what is held under second names, like a start that is killed before it drops the names of the one before."""
    keeper = Keeper(folder, 60.0, runtime=runtime_folder())
    for held in keeper.held():
        keeper.keep(f"zz{held.name}", (held.arena_fd, held.mark_fd))
        held.close()


def test_memory_with_two_names_is_taken_over_once_and_its_image_stays(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    first = run(folder, 5)
    keep_twice(folder)
    assert run(folder, first.ready).loaded == (first.ready, "memory")  # It trains nothing.
    left = arenas(folder)
    assert len(left) == len({*left}) <= 3
    assert run(folder, 7).loaded == (first.ready, "memory")


LONGEST_SECONDS = 0.1
"""From the load to the kill: a hundred steps, while images are copied, digested and marked."""


@pytest.mark.parametrize(
    "starts",
    [
        pytest.param(10, marks=pytest.mark.slow),  # Each takes half a second.
        pytest.param(100, marks=pytest.mark.exhaustive),
    ],
)
def test_many_restarts_lose_no_image_and_leave_no_process_and_no_memory(
    starts: int, tmp_path: Path, memory_tier: Path
) -> None:
    folder, moments = tmp_path / "run", random.Random(starts)
    reported, weights = 0, {}
    for number in range(starts):
        start = run(folder, 1_000_000, interval=50, kill_after=moments.uniform(0.0, LONGEST_SECONDS))
        assert (start.code, start.error) == (KILLED, "")
        resumed = start.loaded[0] if start.loaded is not None else 0
        assert resumed >= reported, f"start {number}: step {reported} was reported\n{start.log}"
        assert all(weights.get(step, weight) == weight for step, weight in start.weights.items())
        weights |= start.weights
        reported = max(reported, start.ready, resumed)
        assert len({*arenas(folder)}) <= 3
        assert len(keepers_in(memory_tier)) <= 1
    last = max(weights) + 1
    assert run(folder, last, kills=False, finishes=True).code == 0
    assert processes_of(memory_tier) == []
    straight = run(tmp_path / "straight", last, memory_ttl_seconds=0.0, memory_interval=0, kills=False).weights
    assert weights == {step: straight[step] for step in weights}
    assert len(weights) == last - 1, "no step was left out"
