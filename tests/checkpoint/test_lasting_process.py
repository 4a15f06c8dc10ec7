"""A process that lasts, such as a notebook: whatever the manager does again and again, the process does not grow."""

from __future__ import annotations

import gc
import os
import threading
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.checkpoint.images.image_runs import held, images_of, start
from tests.checkpoint.images.image_runs import step as step_with_image
from tests.ranks import on_two_ranks
from torchtitan_lite.checkpoint import CheckpointManager, TrainState, load_model
from torchtitan_lite.checkpoint.format.file_data import FileData
from torchtitan_lite.checkpoint.staging.arena import StagingArena
from torchtitan_lite.checkpoint.staging.copiers import Copied, HostCopier


def open_now() -> Counter[str]:
    """Return how many descriptors this process has of each kind, its threads, and its children."""
    gc.collect()
    found: Counter[str] = Counter()
    for fd in Path("/proc/self/fd").iterdir():
        try:
            name = fd.readlink().name
        except OSError:  # That of the folder itself.
            continue
        found[name if "memfd" in name else "other"] += 1
    found["threads"] = sum(thread.name != "staging" for thread in threading.enumerate())
    found["children"] = len(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())
    return found


def test_loads_of_one_process_keep_no_descriptor_of_its_images(tmp_path: Path, memory_tier: Path) -> None:
    run = start(tmp_path, 4, interval=2)
    run.manager.wait()
    run.manager.load()
    before = open_now()
    for _ in range(5):
        run.manager.load()
    assert open_now() == before
    run.manager.close()


def test_after_a_load_of_its_own_images_a_run_makes_further_ones(tmp_path: Path, memory_tier: Path) -> None:
    run = start(tmp_path, 4).loaded()
    assert run.train_state.step == 4
    step_with_image(run)
    step_with_image(run)
    assert set(held(run.root, memory_tier)) == {4, 5, 6}
    run.manager.close()


def test_an_arena_that_no_keeper_holds_yet_does_not_stay_next_to_those_that_a_load_takes_over(
    tmp_path: Path, memory_tier: Path
) -> None:
    run = start(tmp_path, 4)
    pool = images_of(run).stager.pool
    pool.slots.sort(key=lambda slot: slot.step)
    unkept = pool.slots[0].arena
    assert unkept is not None
    images_of(run).tier.give_up(unkept)
    run.manager.load()
    inodes = [os.fstat(slot.arena.fd).st_ino for slot in pool.slots if slot.arena is not None]
    assert len(inodes) == len({*inodes}), "two arenas of one memory overwrite each other"
    run.manager.close()


def test_a_load_leaves_its_memory_to_a_save_that_no_keeper_holds_and_that_may_still_be_written(
    tmp_path: Path, memory_tier: Path
) -> None:
    run = start(tmp_path, 4)
    arena = images_of(run).stager.pool.slots[0].arena
    assert arena is not None
    images_of(run).tier.give_up(arena)
    memory = os.dup(arena.fd)
    run.manager.load()
    assert os.fstat(memory).st_size == arena.num_bytes, "a save that reads cut memory ends its process (SIGBUS)"
    os.close(memory)
    run.manager.close()


def test_images_after_a_load_are_not_copied_over_what_a_save_still_reads(tmp_path: Path, memory_tier: Path) -> None:
    run = start(tmp_path, 4)
    pool = images_of(run).stager.pool
    read = next(slot for slot in pool.slots if slot.step == 2)
    assert read.arena is not None
    pool.add_reader(read)  # As a save on a disk that hangs, for which the load has stopped waiting.
    memory, before = read.arena.memory, bytes(read.arena.memory)
    run.manager.load()
    for _ in range(6):
        step_with_image(run)
    assert bytes(memory) == before
    pool.release(read)
    for _ in range(3):
        step_with_image(run)
    assert bytes(memory) != before, "nothing reads it any more"
    run.manager.close()


class LateCopier:
    """Copies when the thread that trains waits for the copy, as an accelerator may; for other threads after a while."""

    can_digest = False

    def __init__(self) -> None:
        self._is_copied = threading.Event()

    def copy(self, image: FileData, arena: StagingArena, *, digests: bool) -> Copied:
        def wait() -> None:
            if threading.current_thread() is not threading.main_thread() and self._is_copied.wait(1.0):
                return
            HostCopier().copy(image, arena, digests=False).wait()
            self._is_copied.set()

        return Copied(wait)


def test_a_load_waits_for_the_image_that_is_being_copied_and_takes_it(tmp_path: Path, memory_tier: Path) -> None:
    run = start(tmp_path, 4)
    images_of(run).stager._copier = LateCopier()
    run.step()
    run.manager.load()
    assert run.train_state.step == 5
    run.manager.close()


def test_the_state_may_change_only_once_the_image_of_it_is_copied(tmp_path: Path, memory_tier: Path) -> None:
    run, copier = start(tmp_path, 4), LateCopier()
    images_of(run).stager._copier = copier
    run.step()
    run.manager.maybe_wait_for_staging()
    assert copier._is_copied.is_set()
    run.manager.close()


@pytest.mark.parametrize("mode", ["disabled", "async", "async_with_pinned_mem"])
def test_what_a_save_made_is_freed_without_garbage_collection(mode: str, tmp_path: Path) -> None:
    """In a process with a million objects a complete collection comes late, and what waits for it looks like a leak."""
    model, progress = nn.Linear(2, 1), TrainState()
    states = {"train_state": progress}
    with CheckpointManager.for_loop(
        model=model, states=states, folder=tmp_path, interval=1, async_mode=mode, keep_latest_k=1
    ) as manager:
        manager.load()
        save_and_wait(manager, progress, 3)
        gc.collect()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            save_and_wait(manager, progress, 3)
            gc.collect()
            kinds = Counter(f"{type(each).__module__}.{type(each).__qualname__}" for each in gc.garbage)
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
    assert not [kind for kind in kinds if "torchtitan_lite" in kind or "ctypes" in kind], kinds


def save_and_wait(manager: CheckpointManager, progress: TrainState, number: int) -> None:
    for _ in range(number):
        progress.step += 1
        manager.save(progress.step)
        manager.wait()


def use_managers(folder: Path, number: int) -> None:
    for _ in range(number):
        torch.manual_seed(0)  # Equal on all ranks: earlier cases in these processes drew differing numbers.
        model, progress = nn.Linear(2, 1), TrainState()
        states = {"train_state": progress}
        manager = CheckpointManager.for_loop(
            model=model, states=states, folder=folder, interval=1, async_mode="async", preemption_signals=()
        )
        with manager:
            manager.load()
            progress.step += 1
            manager.save(progress.step)
        load_model(model, folder)
        assert manager.ended() is None, "training.steps is far away"
        manager.close()


def open_after(folder: Path, number: int) -> Counter[str]:
    """Return what is open after `number` more managers, with the threads of torch, which Python does not know."""
    use_managers(folder, number)
    found = open_now()
    found["native threads"] = len(list(Path("/proc/self/task").iterdir()))
    return found


@on_two_ranks
def test_managers_one_after_another_keep_no_process_group(rank: int, tmp_path: Path) -> None:
    before = open_after(tmp_path, 1)
    assert open_after(tmp_path, 2) == before
