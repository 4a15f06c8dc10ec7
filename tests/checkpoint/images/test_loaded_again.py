"""A loop that loads again without a new process, as after a loss that exploded: its own images are what it finds."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.checkpoint.images.image_runs import held, images_of, start, step
from torchtitan_lite.distributed.environment import runtime_folder

pytestmark = pytest.mark.usefixtures("memory_tier")


@pytest.mark.parametrize("wanted", [-1, 4])
def test_a_second_load_uses_each_memory_once_and_images_continue(tmp_path: Path, wanted: int) -> None:
    run = start(tmp_path, 5, interval=4)
    run.manager.wait()
    runtime = runtime_folder()
    assert runtime is not None
    run.manager.load(wanted)
    assert run.train_state.step == (5 if wanted == -1 else 4)
    begun = run.train_state.step
    slots = images_of(run).stager.pool.slots
    inodes = [os.fstat(slot.arena.fd).st_ino for slot in slots if slot.arena is not None]
    assert len(inodes) == len({*inodes}) <= 3
    for number in range(1, 4):
        step(run)
        assert max(held(run.root, runtime)) == begun + number
    inodes = [os.fstat(slot.arena.fd).st_ino for slot in slots if slot.arena is not None]
    assert len(inodes) == len({*inodes}) == 3
    assert len(held(run.root, runtime)) == 3
    step(run, last=True)


def test_a_second_load_among_two_copies_of_a_step_shares_no_memory(tmp_path: Path) -> None:
    run = start(tmp_path, 3)
    images_of(run).stage(3, lambda: run.manager._maker._full(), run.manager._maker._origin(3, {}))
    assert images_of(run).wait(60)
    run.manager.load()
    assert run.train_state.step == 3
    slots = images_of(run).stager.pool.slots
    inodes = [os.fstat(slot.arena.fd).st_ino for slot in slots if slot.arena is not None]
    assert len(inodes) == len({*inodes})
    for _ in range(4):
        step(run)
    runtime = runtime_folder()
    assert runtime is not None
    assert max(held(run.root, runtime)) == 7
    step(run, last=True)
