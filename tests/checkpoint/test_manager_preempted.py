"""What the manager does when the ranks are asked to leave."""

from __future__ import annotations

import signal

import pytest

from tests.checkpoint.conftest import StartRun
from torchtitan_lite.checkpoint.preemption import PreemptionWatch


class Told(PreemptionWatch):
    """Watches nothing; the test says what was received."""

    def __init__(self) -> None:
        super().__init__((), grace_seconds=60)
        self.left = False

    def leave(self) -> None:
        self.left = True

    def receive(self, number: int) -> None:
        self._received = number


def test_a_signal_is_acted_on_one_step_after_it_was_seen_and_the_save_is_durable(
    start_run: StartRun, mode: str
) -> None:
    watch = Told()
    run = start_run(interval=100, async_mode=mode, seams={"preemption": watch})
    run.step()
    watch.receive(signal.SIGTERM)
    assert not run.step()
    assert (run.manager.preempted_by, watch.left) == (0, False)
    assert run.step()
    assert (run.manager.preempted_by, watch.left) == (signal.SIGTERM, True)
    assert run.committed() == [3]
    assert run.events.steps("preempted") == [3]


def test_a_save_in_flight_is_durable_before_the_ranks_leave(start_run: StartRun) -> None:
    watch = Told()
    run = start_run(interval=2, async_mode="async", seams={"preemption": watch})
    run.step()
    watch.receive(signal.SIGUSR1)
    run.step()
    run.step()
    assert run.manager.preempted_by == signal.SIGUSR1
    assert run.names() == ["step-2", "step-3"]


def test_the_last_step_is_the_end_of_the_run_and_no_preemption(start_run: StartRun) -> None:
    watch = Told()
    run = start_run(interval=100, seams={"preemption": watch})
    watch.receive(signal.SIGTERM)
    run.train(2)
    assert run.manager.preempted_by == 0
    assert run.committed() == [2]
    assert watch.left, "a late signal must not change how the run ends"


@pytest.mark.parametrize("options", [{"load_only": True}, {"enable_checkpoint": False}])
def test_a_run_that_never_saves_does_not_save_when_asked_to_leave(
    start_run: StartRun, options: dict[str, bool]
) -> None:
    watch = Told()
    run = start_run(seams={"preemption": watch}, **options)
    watch.receive(signal.SIGTERM)
    run.step()
    run.step()
    assert not run.root.exists()


def test_a_run_that_only_loads_leaves_all_the_same(start_run: StartRun) -> None:
    watch = Told()
    run = start_run(load_only=True, seams={"preemption": watch})
    watch.receive(signal.SIGTERM)
    run.step()
    run.step()
    assert run.manager.preempted_by == signal.SIGTERM
