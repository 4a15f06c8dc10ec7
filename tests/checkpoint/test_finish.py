"""`finish(step)` leaves the state of the step at which the loop is, and never another step's state under its name."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.checkpoint.conftest import StartRun
from tests.checkpoint.small_run import SmallRun, same
from torchtitan_lite.checkpoint.schedule.preemption import PreemptionWatch
from torchtitan_lite.errors import ConfigError, RunNotLoaded
from torchtitan_lite.store.manifest import CheckpointInfo, CheckpointKind
from torchtitan_lite.store.store import CheckpointStore


def exports(run: SmallRun) -> list[int]:
    return [info.step for info in CheckpointStore(run.root.parent / "export").committed()]


def latest(run: SmallRun) -> CheckpointInfo:
    return CheckpointStore(run.root).committed()[-1]


@pytest.mark.parametrize("interval", [1, 10], ids=["saved", "not saved"])
def test_a_step_that_the_loop_has_passed_is_refused_by_name(start_run: StartRun, interval: int) -> None:
    run = start_run(interval=interval, export_folder="export")
    run.train(7, last=False)
    with pytest.raises(ConfigError, match=r"finish\(5\): expected a step from 7 on.*this loop is at step 7"):
        run.manager.finish(5)
    assert exports(run) == []
    run.manager.finish(7)
    assert (exports(run), run.committed()[-1]) == ([7], 7)


def test_a_step_before_the_one_that_was_loaded_is_refused(start_run: StartRun) -> None:
    start_run(interval=1).finished(3)
    again = start_run(export_folder="export").loaded()
    with pytest.raises(ConfigError, match=r"finish\(2\): expected a step from 3 on"):
        again.manager.finish(2)
    assert exports(again) == []


def test_a_last_step_that_no_interval_saved_is_saved_in_full(start_run: StartRun) -> None:
    run = start_run(interval=5)
    run.train(7, last=False)
    state = run.contents()
    run.manager.finish(7)
    assert run.committed() == [5, 7]
    run.scramble()
    assert run.manager.load(7)
    assert same(run.contents(), state)


def test_a_loop_that_ended_early_is_warned_that_its_state_gets_the_later_number(
    start_run: StartRun, caplog: pytest.LogCaptureFixture
) -> None:
    run = start_run(interval=5)
    run.train(3, last=False)
    run.manager.finish(4)
    assert "finish(4)" not in caplog.text
    run.manager.finish(9)
    assert "finish(9): the last step that this loop loaded or passed to save() is 4" in caplog.text
    assert run.committed() == [4, 9]


def test_a_save_in_flight_of_the_last_step_is_durable_on_return_and_made_once(start_run: StartRun, mode: str) -> None:
    run = start_run(interval=2, async_mode=mode)
    run.train(4, last=False)
    run.manager.finish(4)
    assert run.committed() == [2, 4]
    assert run.events.steps("save_started") == [2, 4]


def test_a_step_of_the_branch_that_is_rolled_back_does_not_pass_for_the_last_one(start_run: StartRun) -> None:
    run = start_run(interval=1)
    run.train(4)
    before = latest(run)
    assert run.manager.load(2)
    run.train(4, last=False)
    run.manager.wait()
    run.manager.close()
    again = start_run(interval=10)
    again.manager.load(2)
    again.train(4, last=False)
    again.manager.finish(4)
    assert latest(again).step == 4
    assert latest(again).run_id != before.run_id


def test_where_only_weights_are_left_no_full_checkpoint_is_made_next_to_them(start_run: StartRun) -> None:
    run = start_run(interval=5, model_weights_only=True)
    run.train(7)
    run.manager.finish(7)
    assert (latest(run).step, latest(run).kind) == (7, CheckpointKind.WEIGHTS_ONLY)
    assert run.events.steps("save_started") == [5, 7]


def test_a_state_that_was_loaded_from_another_run_is_saved_in_this_one(start_run: StartRun, tmp_path: Path) -> None:
    first = start_run(interval=1)
    first.train(3)
    again = start_run(tmp_path / "other", initial_load_path=str(first.root / "step-3"), initial_load_model_only=False)
    assert again.manager.load() and again.manager.loaded_step == 3
    again.manager.finish(3)
    assert again.committed() == [3]


def test_a_loop_that_leaves_for_a_signal_does_not_save_what_it_did_not_train_as_the_last_step(
    start_run: StartRun, caplog: pytest.LogCaptureFixture
) -> None:
    watch = PreemptionWatch((), 60)
    run = start_run(interval=10, export_folder="export", seams={"preemption": watch})
    run.step()
    watch.numbers = (signal.SIGTERM,)
    watch.hear(signal.SIGTERM)
    run.train(3, last=False)
    assert run.manager.preempted_by == signal.SIGTERM
    with caplog.at_level("INFO", "torchtitan_lite"):
        run.manager.finish(9)
    assert (run.committed(), exports(run)) == ([3], [])
    assert "Preempted by SIGTERM: the next start finishes step 9" in caplog.text


def test_a_run_that_only_loads_or_saves_nothing_finishes_without_a_trace(start_run: StartRun) -> None:
    start_run(interval=1).finished(2)
    for given in ({"load_only": True}, {"enable_checkpoint": False}):
        again = start_run(export_folder="export", **given).loaded()
        again.manager.finish(2)
        again.manager.finish(9)
        assert (again.committed(), exports(again)) == ([1, 2], [])


def test_a_run_that_was_not_loaded_is_not_finished(start_run: StartRun) -> None:
    start_run(interval=1).finished(2)
    with pytest.raises(RunNotLoaded):
        start_run().manager.finish(2)
