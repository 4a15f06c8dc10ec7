"""A save is due while the last one is still being written: it waits, or it is skipped."""

from __future__ import annotations

import threading

from tests.checkpoint.conftest import StartRun
from tests.checkpoint.savers import Lent
from tests.checkpoint.slow_disk import SlowDisk
from torchtitan_lite.checkpoint.format.flattening import State
from torchtitan_lite.checkpoint.saving.savers import PendingSave
from torchtitan_lite.checkpoint.saving.target import SaveTarget


def test_skip_omits_due_saves_during_a_write_and_saves_again_after_it(start_run: StartRun) -> None:
    disk = SlowDisk()
    run = start_run(interval=2, when_busy="skip", async_mode="async", seams={"saver": disk.saver})
    for _ in range(6):
        run.step()
    assert run.events.steps("save_started") == [2]
    assert run.events.steps("save_skipped") == [4, 6]
    assert run.events.figures("save_skipped")["in_flight"] == 2
    disk.may_write.set()
    assert run.manager.latest_step() == 2
    run.train(12)
    assert {2, 8, 12} <= set(run.committed()), "10 may find 8 still being written"


def test_wait_makes_every_save_that_is_due(start_run: StartRun) -> None:
    disk = SlowDisk()
    run = start_run(interval=2, when_busy="wait", async_mode="async", seams={"saver": disk.saver})
    run.step()
    run.step()
    run.step()
    threading.Timer(0.05, disk.may_write.set).start()
    run.step()
    assert run.events.steps("save_started") == [2, 4]
    run.train(6)
    assert run.committed() == [2, 4, 6]


def test_the_last_step_is_never_skipped(start_run: StartRun) -> None:
    disk = SlowDisk()
    run = start_run(interval=2, when_busy="skip", async_mode="async", seams={"saver": disk.saver})
    for _ in range(4):
        run.step()
    threading.Timer(0.05, disk.may_write.set).start()
    run.step(last=True)
    assert run.committed() == [2, 5]


def test_memory_is_that_of_one_save(start_run: StartRun) -> None:
    disk = SlowDisk()
    disk.may_write.set()
    run = start_run(interval=1, async_mode="async", seams={"saver": disk.saver})
    run.step()
    arenas = [slot.arena for slot in disk.stager.pool.slots]
    run.train(8)
    assert len(arenas) == 1 and [slot.arena for slot in disk.stager.pool.slots] == arenas


class Noting(Lent):
    """Keeps the last save."""

    def save(self, state: State, target: SaveTarget) -> PendingSave:
        self.pending = self.inner.save(state, target)
        return self.pending


def test_a_save_that_ended_since_the_last_step_skips_nothing(start_run: StartRun) -> None:
    disk = SlowDisk()
    saver = Noting(disk.saver)
    run = start_run(interval=2, when_busy="skip", async_mode="async", seams={"saver": saver})
    for _ in range(3):
        run.step()
    disk.may_write.set()
    saver.pending.durable.result(60)
    run.step()
    assert run.events.steps("save_skipped") == []
    run.manager.close()
    assert run.committed() == [2, 4]
