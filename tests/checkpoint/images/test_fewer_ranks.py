"""A start on fewer ranks, whose files are larger: what it resumed from stays until something newer takes its place."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.checkpoint.images import image_runs
from tests.checkpoint.images.image_runs import images_of
from tests.checkpoint.images.spoiled import keeper_of
from tests.checkpoint.images.starts import run
from tests.checkpoint.small_run import SmallRun
from torchtitan_lite.checkpoint.staging.mark import read_mark

WIDTH = 100_000
"""So that all of the state, 11 MB, is more than the room that an arena for half of it has to spare."""
pytestmark = pytest.mark.usefixtures("memory_tier")


def held(folder: Path) -> tuple[int, set[int]]:
    """Return how many arenas the keeper holds, and the steps of the images in them."""
    with keeper_of(folder) as (_, found):
        marked = [read_mark(each.mark_fd) for each in found]
        return len({os.fstat(each.arena_fd).st_ino for each in found}), {each.step for each in marked if each}


@pytest.mark.slow  # Four processes each.
@pytest.mark.parametrize("interval", [0, 1000], ids=["saves only", "memory_interval"])
def test_what_was_loaded_outlives_the_memory_that_is_made_for_the_next_image(tmp_path: Path, interval: int) -> None:
    folder = tmp_path / "run"
    first = run(folder, 4, ranks=2, width=WIDTH)
    # It makes no image.
    second = run(folder, first.ready + 3, memory_interval=interval, waits_for_memory=True, width=WIDTH)
    assert (second.loaded, second.error) == ((first.ready, "memory"), "")
    assert run(folder, 0, width=WIDTH).loaded == (first.ready, "memory")


@pytest.mark.slow  # Three processes.
def test_once_a_newer_step_is_safe_nothing_is_left_of_the_old_ones(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    first = run(folder, 4, ranks=2)
    second = run(folder, first.ready + 1, interval=1, memory_interval=0, waits_for_memory=True)
    assert second.error == ""
    assert held(folder) == (1, {first.ready + 1})


@pytest.mark.slow  # Four processes, and one after them.
def test_one_rank_after_four_has_three_arenas_and_its_own_images(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    first = run(folder, 4, ranks=4)
    second = run(folder, first.ready + 6)
    assert (second.loaded, second.error) == ((first.ready, "memory"), "")
    assert second.ready == first.ready + 6
    assert held(folder) == (3, {first.ready + 4, first.ready + 5, first.ready + 6})
    assert run(folder, 0).loaded == (second.ready, "memory")


def test_an_image_whose_memory_is_too_small_now_stays_until_a_newer_one_is_complete(tmp_path: Path) -> None:
    first = image_runs.start(tmp_path, 3)
    first.manager.close()
    with SmallRun(tmp_path, async_mode="async", interval=100, memory_interval=1).loaded() as second:
        images = images_of(second)
        images.sized(20 << 20)
        images.stager.prepare(20 << 20)
        images.stager.finish_preparation()
        assert held(first.root) == (1, {3})  # No image is in the new memory yet.
        for _ in range(3):
            image_runs.step(second)
        images._former.free()  # Until the thread that does it is done.
        assert held(first.root) == (3, {4, 5, 6})
        image_runs.step(second, last=True)
