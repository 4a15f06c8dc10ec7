"""Two ranks, one of which receives a real signal at a bad moment: both leave after the same step and lose nothing."""

from __future__ import annotations

import math
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.checkpoint.savers import TIMEOUT_SECONDS
from tests.checkpoint.schedule.signalled import FakePreemption
from tests.checkpoint.sharded_run import same_everywhere, sharded_run
from tests.checkpoint.small_run import SmallRun, same
from tests.clock import Clock
from tests.processes import wait_until
from tests.ranks import on_two_ranks
from torchtitan_lite.checkpoint.schedule.preemption import PreemptionWatch


class Watch(PreemptionWatch):
    """A real watch that sets an event once the ranks have agreed to leave."""

    def __init__(self) -> None:
        super().__init__(("SIGTERM",), grace_seconds=TIMEOUT_SECONDS)
        self.agreed = threading.Event()

    def leave(self) -> None:
        super().leave()
        self.agreed.set()


@contextmanager
def watching() -> Iterator[Watch]:
    """Yield a watch for SIGTERM; restore the previous handler after the block."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield Watch()
    finally:
        signal.signal(signal.SIGTERM, before)


def signal_myself(watch: PreemptionWatch) -> None:
    """Send SIGTERM to this process, and wait until `watch` has received it."""
    os.kill(os.getpid(), signal.SIGTERM)
    wait_until(lambda: watch.received)


class SignalledWhileLoading:
    """A dataloader without data that sends SIGTERM to this rank during its load, if there is a watch."""

    def __init__(self, watch: PreemptionWatch | None = None) -> None:
        self._watch = watch

    def state_dict(self) -> dict[str, Any]:
        return {"position": 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._watch is not None:
            signal_myself(self._watch)


def leave(run: SmallRun) -> int:
    """Train until the ranks leave; return the step at the end of which they do."""
    while not run.manager.preempted_by:
        run.step()
        assert run.train_state.step < 20, "the signal was forgotten"
    assert same_everywhere((run.manager.preempted_by, run.train_state.step, run.events.happened("preempted")))
    return run.train_state.step


def resumes(folder: Path, run: SmallRun) -> bool:
    """Return whether a run that resumes from the checkpoint of `run` is as that one was left."""
    with (again := sharded_run(folder, loader=SignalledWhileLoading())).manager as manager:
        assert manager.load()
        return same(again.contents(), run.contents())


@on_two_ranks
def test_a_signal_during_the_load_makes_the_ranks_leave_before_a_step_is_trained(rank: int, tmp_path: Path) -> None:
    with (first := sharded_run(tmp_path, interval=2, loader=SignalledWhileLoading())).manager:
        first.train(2, last=False)
    with watching() as watch:
        loader = SignalledWhileLoading(watch if rank == 1 else None)
        with (
            run := sharded_run(tmp_path, interval=100, loader=loader, seams={"preemption": watch})
        ).manager as manager:
            assert manager.load()
            assert leave(run) == 2
            assert watch.agreed.is_set(), "a late signal must not change how the ranks end"
        assert run.names() == ["step-2"]
        assert resumes(tmp_path, run)


@on_two_ranks
def test_a_signal_before_a_fresh_start_makes_the_ranks_leave_with_nothing(rank: int, tmp_path: Path) -> None:
    with watching() as watch, (run := sharded_run(tmp_path, seams={"preemption": watch})).manager as manager:
        assert manager.latest_step() == -1
        if rank == 1:
            signal_myself(watch)
        assert not manager.load()
        assert leave(run) == 0
        assert run.events.happened("save_started") == []


@on_two_ranks
def test_a_signal_in_the_first_step_is_acted_on_after_the_next_at_the_latest(rank: int, tmp_path: Path) -> None:
    with watching() as watch:
        run = sharded_run(tmp_path, interval=100, loader=SignalledWhileLoading(), seams={"preemption": watch})
        with run.manager as manager:
            assert not manager.load()
            manager.reset()
            run.take_step()
            if rank == 1:
                signal_myself(watch)  # as during a compilation, or any other long first step
            manager.save(1)
            assert leave(run) <= 2
        assert run.names() == [f"step-{run.train_state.step}"]
        assert resumes(tmp_path, run)


def signal_once_and_wait(watch: Watch) -> Callable[[Path], None]:
    """Sends SIGTERM during a save, which continues once the ranks have agreed to leave."""

    def before_write(path: Path) -> None:
        if not watch.received:
            os.kill(os.getpid(), signal.SIGTERM)
        assert watch.agreed.wait(TIMEOUT_SECONDS)

    return before_write


@on_two_ranks
def test_a_signal_during_an_asynchronous_save_loses_neither_that_save_nor_the_step(rank: int, tmp_path: Path) -> None:
    with watching() as watch:
        options: dict[str, Any] = {"interval": 2, "async_mode": "async", "loader": SignalledWhileLoading()}
        with (run := sharded_run(tmp_path, seams={"preemption": watch}, **options)).manager:
            run.step()
            if rank == 0:
                run.saver.before_write = signal_once_and_wait(watch)
            run.step()
            if rank == 0:
                wait_until(lambda: watch.received)
            step = leave(run)
        assert 3 <= step <= 4
        assert run.names() == sorted({"step-2", f"step-{step}"})
        assert resumes(tmp_path, run)


@on_two_ranks
def test_the_least_time_of_all_ranks_decides_for_all(rank: int, tmp_path: Path) -> None:
    """Only rank 1 received the signal; the coordinator decides, and its own grace period has not begun."""
    watch, clock = FakePreemption(seconds_left=0.0 if rank == 1 else math.inf), Clock()
    run = sharded_run(tmp_path, interval=2, async_mode="async", seams={"preemption": watch, "clock": clock})

    def wait_and_take_long(path: Path) -> None:
        assert watch.agreed.wait(TIMEOUT_SECONDS)
        clock.seconds += 10

    run.saver.before_write = wait_and_take_long
    with run.manager as manager:
        run.step()
        if rank == 1:
            watch.receive(signal.SIGTERM)
        run.step()
        assert not run.step()
        assert manager.preempted_by == signal.SIGTERM
    assert run.names() == ["step-2"]
    assert [figures["given_up_steps"] for _, _, figures in run.events.happened("preempted")] == [1]
