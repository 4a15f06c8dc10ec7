"""A manager saves at listed steps, and by whichever of steps and seconds comes first."""

from __future__ import annotations

from tests.checkpoint.conftest import StartRun


def test_listed_steps_are_saved_with_the_interval_and_the_last_step(start_run: StartRun) -> None:
    run = start_run(interval=4, at_steps=(1, 3))
    run.train(6)
    assert run.committed() == [1, 3, 4, 6]


def test_listed_steps_alone_are_saved_and_so_is_a_step_on_demand(start_run: StartRun) -> None:
    run = start_run(interval_type="none", at_steps=(2,))
    run.train(4, last=False)
    run.train_state.step += 1
    assert run.manager.save(5, now=True)
    run.train(7)
    assert run.committed() == [2, 5, 7]


def test_whichever_of_steps_and_seconds_comes_first_is_saved(start_run: StartRun) -> None:
    run = start_run(interval=5, or_every_seconds=10.0).loaded()
    run.manager.reset()
    saved = []
    for seconds in (4, 4, 4, 4, 1, 1, 1, 1, 1, 1):
        run.clock.seconds += seconds
        saved.append(run.step())
    # After 12 s step 3 is due by the clock, and the ranks act on it in step 4. 5 and 10 are due by their steps.
    assert [step for step, is_saved in enumerate(saved, start=1) if is_saved] == [4, 5, 10]
