"""A loop that loads again, or saves a step again: its own images are what it finds, and each memory is used once."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from tests.checkpoint.images.image_runs import held, images_of, start, step
from tests.checkpoint.images.spoiled import keeper_of, other_bytes
from tests.checkpoint.small_run import SmallRun
from tests.logged import logged_warnings
from torchtitan_lite.checkpoint.staging.mark import Marked, read_mark
from torchtitan_lite.distributed.environment import runtime_folder
from torchtitan_lite.memory.images import run_images
from torchtitan_lite.memory.images.card import Card
from torchtitan_lite.memory.keeper.client import HeldMemory

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
    images_of(run).not_saved(3, run.manager._maker._full_state, lambda: run.manager._maker._origin(3, {}))
    assert images_of(run).marker.wait(60)
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


@pytest.mark.parametrize("end", ["finished", "failed images", "no memory"])
def test_a_manager_that_is_opened_again_makes_images_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    run = start(tmp_path, 3)
    for _ in range(3 if end == "failed images" else 0):
        images_of(run).marker.note_failed(3, OSError("no"))
    with monkeypatch.context() as patched:
        patched.setattr(run_images, "is_short", lambda: end == "no memory")
        step(run, last=end == "finished")
    run.manager.close()
    run.manager.load()
    runtime = runtime_folder()
    assert runtime is not None
    begun = run.train_state.step
    for _ in range(3):
        step(run)
    assert max(held(run.root, runtime)) == begun + 3
    assert len(images_of(run).stager.pool.slots) == 3


OPTIONS = {"async_mode": "async", "interval": 100, "memory_interval": 1, "max_failed_saves": 9}


def two_copies(folder: Path) -> Path:
    """Leave two images of step 3, of which the later one has another loss; return the folder of checkpoints."""
    run = start(folder, 3)
    run.train_state.record_loss(77.0, 77.0)
    images_of(run).not_saved(3, run.manager._maker._full_state, lambda: run.manager._maker._origin(3, {}))
    assert images_of(run).marker.wait(60)
    run.manager.close()
    return run.root


def by_copy(held: list[HeldMemory]) -> list[tuple[HeldMemory, Marked]]:
    """Return the images of step 3, the one that was made first before the other."""
    found = [(each, marked) for each in held if (marked := read_mark(each.mark_fd)) is not None and marked.step == 3]
    assert len(found) == 2
    return sorted(found, key=lambda pair: Card.parse(pair[1].card).created_at)


def loaded(folder: Path) -> tuple[int, bool]:
    """Return the step that a new start loads, and whether it is the later copy."""
    with SmallRun(folder, **OPTIONS).loaded() as run:
        return run.train_state.step, 77.0 in run.losses


def test_the_later_copy_is_loaded_and_where_it_is_damaged_the_earlier_one(tmp_path: Path) -> None:
    root = two_copies(tmp_path)
    assert loaded(tmp_path) == (3, True)
    with keeper_of(root) as (_, held):
        other_bytes(*by_copy(held)[1])
    with logged_warnings() as warned:
        assert loaded(tmp_path) == (3, False)
    assert sum("in-memory snapshot of step 3 is not loaded" in message for message in warned) == 1
    with keeper_of(root) as (_, held):  # The damaged one is no image any more.
        (only,) = [marked.step for each in held if (marked := read_mark(each.mark_fd)) is not None and marked.step == 3]
    assert only == 3


@pytest.mark.parametrize("damaged", ["0", "zz"], ids=["first", "second"])
def test_two_memories_with_the_same_image_are_both_tried(tmp_path: Path, damaged: str) -> None:
    run = start(tmp_path, 1)
    while run.train_state.step < 3:
        run.step()
        assert images_of(run).marker.wait(60)
    run.manager.close()
    with keeper_of(run.root) as (keeper, held):
        marks = [(each, marked) for each in held if (marked := read_mark(each.mark_fd)) is not None]
        latest, marked = max(marks, key=lambda pair: pair[1].step)
        keeper.drop([each.name for each, _ in marks])
        for name in ("0", "zz"):
            fds = tuple(_copy_of(fd) for fd in (latest.arena_fd, latest.mark_fd))
            if name == damaged:
                other_bytes(HeldMemory(name, *fds, False), marked)
            keeper.keep(name, fds)
            for fd in fds:
                os.close(fd)
    assert loaded(tmp_path) == (3, False)


def _copy_of(fd: int) -> int:
    copy = os.memfd_create("copy")
    os.sendfile(copy, fd, 0, os.fstat(fd).st_size)
    return copy


def test_two_copies_of_a_step_that_wait_for_their_digests_both_give_their_memory_back(tmp_path: Path) -> None:
    run = start(tmp_path, 3)
    images, may_continue = images_of(run), threading.Event()
    images.marker._background.run(
        "another image", lambda: None if may_continue.wait(60) else pytest.fail("it waited for too long")
    )
    for _ in range(2):
        images.not_saved(3, run.manager._maker._full_state, lambda: run.manager._maker._origin(3, {}))
    may_continue.set()
    assert images.marker.wait(60)
    assert [slot.num_readers for slot in images.stager.pool.slots] == [0, 0, 0]
    step(run, last=True)
