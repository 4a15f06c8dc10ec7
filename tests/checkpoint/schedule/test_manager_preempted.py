"""What the manager does after a signal to leave."""

from __future__ import annotations

import signal
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.conftest import StartRun
from tests.checkpoint.schedule.signalled import FakePreemption
from tests.checkpoint.small_run import SmallRun
from tests.clock import Clock
from tests.disks import FailingDisk
from torchtitan_lite.checkpoint.saving.savers import PendingSave, ThreadSaver
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.store.store import CheckpointStore


def test_a_signal_is_acted_on_one_step_after_it_was_seen_and_the_save_is_durable(
    start_run: StartRun, mode: str
) -> None:
    watch = FakePreemption()
    run = start_run(interval=100, async_mode=mode, seams={"preemption": watch})
    run.step()
    watch.receive(signal.SIGTERM)
    assert not run.step()
    assert (run.manager.preempted_by, watch.agreed.is_set()) == (0, False)
    assert run.step()
    assert (run.manager.preempted_by, watch.agreed.is_set()) == (signal.SIGTERM, True)
    assert run.committed() == [3]
    assert run.events.steps("preempted") == [3]


def test_a_save_in_flight_is_durable_before_the_ranks_leave(start_run: StartRun) -> None:
    watch = FakePreemption()
    run = start_run(interval=2, async_mode="async", seams={"preemption": watch})
    run.step()
    watch.receive(signal.SIGUSR1)
    run.step()
    run.step()
    assert run.manager.preempted_by == signal.SIGUSR1
    assert run.names() == ["step-2", "step-3"]


def test_the_last_step_is_the_end_of_the_run_and_no_preemption(start_run: StartRun) -> None:
    watch = FakePreemption()
    run = start_run(interval=100, seams={"preemption": watch})
    watch.receive(signal.SIGTERM)
    run.train(2)
    assert run.manager.preempted_by == 0
    assert run.committed() == [2]
    assert watch.agreed.is_set(), "a late signal must not change how the run ends"


@pytest.mark.parametrize("options", [{"load_only": True}, {"enable_checkpoint": False}])
def test_a_run_that_never_saves_leaves_without_a_save(start_run: StartRun, options: dict[str, bool]) -> None:
    watch = FakePreemption()
    run = start_run(seams={"preemption": watch}, **options)
    watch.receive(signal.SIGTERM)
    run.step()
    run.step()
    assert not run.root.exists()


def test_a_run_that_only_loads_leaves_too(start_run: StartRun) -> None:
    watch = FakePreemption()
    run = start_run(load_only=True, seams={"preemption": watch})
    watch.receive(signal.SIGTERM)
    run.step()
    run.step()
    assert run.manager.preempted_by == signal.SIGTERM


@pytest.mark.parametrize("load_only", [False, True])
def test_a_loop_that_trains_on_after_a_signal_is_warned_once(
    start_run: StartRun, load_only: bool, caplog: pytest.LogCaptureFixture
) -> None:
    watch = FakePreemption()
    run = start_run(interval=100, load_only=load_only, seams={"preemption": watch})
    watch.receive(signal.SIGTERM)
    run.train(2, last=False)
    assert run.manager.preempted_by == signal.SIGTERM
    assert not _warnings_of_a_loop_that_trains_on(caplog)
    run.step()
    run.step()
    [warning] = _warnings_of_a_loop_that_trains_on(caplog)
    assert "SIGTERM" in warning and "preempted_by" in warning


def _warnings_of_a_loop_that_trains_on(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [text for text in caplog.messages if "continues to train" in text]


class ReportedLater(ThreadSaver):
    """Its saves count as in flight until the test calls `report`."""

    def __init__(self) -> None:
        super().__init__(Peers(timedelta(seconds=60)))
        self._saved: Future[None] = Future()
        self._reported: Future[None] = Future()

    def save(self, *given: Any, **named: Any) -> PendingSave:
        pending = super().save(*given, **named)
        self._saved, self._reported = pending.durable, Future()
        return PendingSave(pending.step, pending.staged, self._reported)

    def report(self) -> None:
        failure = self._saved.exception(60)
        if failure is None:
            self._reported.set_result(None)
        else:
            self._reported.set_exception(failure)


class InFlightUntilTheRanksLeave(FakePreemption):
    """Also the run's saver and clock: a save takes `SAVE_SECONDS`, and ends when the ranks have agreed to leave."""

    SAVE_SECONDS = 30.0

    def __init__(self, seconds_left: float) -> None:
        super().__init__(seconds_left)
        self.clock, self.saver = Clock(), ReportedLater()

    def leave(self) -> None:
        super().leave()
        self.clock.seconds += self.SAVE_SECONDS
        self.saver.report()


def leaves_at_step_3_while_step_2_is_being_saved(
    start_run: StartRun, watch: InFlightUntilTheRanksLeave, store: CheckpointStore | None = None
) -> tuple[SmallRun, bool]:
    """Return the run that left, and what `save` returned for its last step."""
    run = start_run(interval=2, seams={"preemption": watch, "saver": watch.saver, "clock": watch.clock, "store": store})
    run.step()
    watch.receive(signal.SIGTERM)
    assert run.step()
    saved = run.step()
    assert run.manager.preempted_by == signal.SIGTERM
    return run, saved


def test_if_there_is_time_another_save_follows_the_one_in_flight(start_run: StartRun) -> None:
    run, saved = leaves_at_step_3_while_step_2_is_being_saved(start_run, InFlightUntilTheRanksLeave(30.0))
    assert saved
    assert run.names() == ["step-2", "step-3"]
    assert run.events.steps("preempted") == [3]
    assert run.events.figures("preempted") == {"signal": signal.SIGTERM, "given_up_steps": 0}


def test_without_time_for_another_the_ranks_leave_with_the_save_that_was_in_flight(
    start_run: StartRun, caplog: pytest.LogCaptureFixture
) -> None:
    run, saved = leaves_at_step_3_while_step_2_is_being_saved(start_run, InFlightUntilTheRanksLeave(29.9))
    assert not saved
    assert run.names() == ["step-2"]
    assert run.events.steps("save_started") == [2]
    assert run.events.steps("preempted") == [2]
    assert run.events.figures("preempted") == {"signal": signal.SIGTERM, "given_up_steps": 1}
    assert "too short to save step 3;" in caplog.text
    run.manager.close()
    again = start_run().resumed()
    assert again.train_state.step == 2


def test_a_failed_save_in_flight_is_not_enough_to_leave(start_run: StartRun, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoint", durable=FailingDisk("rename", times=1))
    run, saved = leaves_at_step_3_while_step_2_is_being_saved(start_run, InFlightUntilTheRanksLeave(0.0), store)
    assert saved
    assert run.events.steps("save_failed") == [2]
    assert run.names() == ["step-3"]


def test_with_nothing_in_flight_a_save_is_tried_however_little_time_is_left(start_run: StartRun) -> None:
    watch = FakePreemption(seconds_left=0.0)
    run = start_run(interval=2, seams={"preemption": watch})
    run.step()
    run.step()
    watch.receive(signal.SIGTERM)
    run.step()
    run.clock.seconds += 100
    run.step()
    assert run.names() == ["step-2", "step-4"]
    assert run.events.steps("preempted") == [4]


def test_a_step_that_is_durable_is_not_saved_again(start_run: StartRun) -> None:
    watch = FakePreemption(seconds_left=0.0)
    run = start_run(interval=1, seams={"preemption": watch})
    watch.receive(signal.SIGTERM)
    run.step()
    assert run.manager.save(1)
    assert run.manager.preempted_by == signal.SIGTERM
    assert run.events.steps("save_started") == [1]
    assert run.events.steps("preempted") == [1]


def test_a_step_saved_before_rolling_back_is_not_what_the_ranks_leave_with(start_run: StartRun) -> None:
    watch = FakePreemption()
    run = start_run(interval=4, seams={"preemption": watch})
    run.train(8, last=False)
    assert run.manager.load(4)
    run.train(7, last=False)
    watch.receive(signal.SIGTERM)
    run.train(8, last=False)  # A save is due here; the ranks agree on the signal at the next step.
    run.step()
    assert run.manager.preempted_by == signal.SIGTERM
    lineages = {info.step: info.lineage for info in CheckpointStore(run.root).committed()}
    assert sorted(lineages) == [4, 8, 9]
    assert (lineages[8].parent_step, lineages[9].parent_step) == (4, 8)


def test_a_rolled_back_run_that_is_at_the_step_saved_before_saves_it_again(start_run: StartRun) -> None:
    watch = FakePreemption()
    run = start_run(interval=100, seams={"preemption": watch})
    run.train(2, last=False)
    run.manager.save(2, force=True)
    run.train(6, last=False)
    run.manager.save(6, force=True)
    assert run.manager.load(2)
    run.train(4, last=False)
    watch.receive(signal.SIGTERM)
    run.step()
    run.step()
    assert run.manager.preempted_by == signal.SIGTERM
    (lineage,) = [info.lineage for info in CheckpointStore(run.root).committed() if info.step == 6]
    assert (lineage.parent_step, lineage.branch_point) == (2, 2)
