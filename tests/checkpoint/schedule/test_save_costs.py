"""What a save costs, measured from the ends of steps by a fake clock."""

from __future__ import annotations

from typing import Any

from tests.checkpoint.conftest import StartRun
from tests.checkpoint.schedule.gated_saver import GatedSaver
from tests.checkpoint.small_run import SmallRun
from torchtitan_lite.checkpoint.saving.auto_interval import AutoInterval
from torchtitan_lite.checkpoint.schedule.optimum import SaveCost


class Measured:
    """A run whose steps take as long as the test says, saved by `saver`, which blocks for `blocked` seconds."""

    def __init__(self, start_run: StartRun, *at_steps: int) -> None:
        self.blocked = 0.5
        self.saver = GatedSaver(self._block)
        seams = {"saver": self.saver}
        self.run: SmallRun = start_run(interval_type="auto", at_steps=at_steps, mtbf_hours=1e6, seams=seams)
        self.run.manager.reset()

    def _block(self) -> None:
        self.run.clock.seconds += self.blocked

    def steps(self, *seconds: float) -> None:
        for each in seconds:
            self.run.clock.seconds += each
            self.run.step()

    def cost(self) -> SaveCost | None:
        (auto,) = self.run.manager._decider._auto
        assert isinstance(auto, AutoInterval)
        return auto._costs.cost()


def test_a_save_costs_what_it_blocks_and_what_the_steps_during_it_take_longer(start_run: StartRun) -> None:
    of = Measured(start_run, 4)
    of.steps(9.0, 2.0, 2.0, 2.0)  # The first step of a start is not counted.
    assert of.cost() is None
    of.steps(2.5, 3.0, 2.0)
    of.saver.finish()
    of.steps(2.0)
    assert of.cost() == SaveCost(blocked_seconds=0.5, slower_seconds=1.5, save_seconds=8.0, step_seconds=2.0)


def test_a_wait_for_the_copy_is_a_part_of_the_step_during_the_save(start_run: StartRun) -> None:
    of = Measured(start_run, 3)
    of.steps(1.0, 1.0, 1.0)
    of.steps(1.0 + 0.25)  # As if maybe_wait_for_staging had waited.
    of.saver.finish()
    of.steps(1.0)
    assert of.cost() == SaveCost(blocked_seconds=0.5, slower_seconds=0.25, save_seconds=1.75, step_seconds=1.0)


def test_steps_that_are_faster_during_a_save_do_not_make_it_cheaper(start_run: StartRun) -> None:
    of = Measured(start_run, 3)
    of.steps(1.0, 1.0, 1.0, 0.5)
    of.saver.finish()
    of.steps(0.5)
    cost = of.cost()
    assert cost is not None and cost.seconds == cost.blocked_seconds == 0.5


def test_a_failed_save_is_not_counted(start_run: StartRun) -> None:
    of = Measured(start_run, 2, 4)
    of.steps(1.0, 1.0)
    of.saver.fail()
    of.steps(1.0)
    assert of.cost() is None
    of.steps(1.0)
    of.saver.finish()
    of.steps(1.0)
    assert of.cost() is not None


def test_a_save_that_fails_after_others_does_not_change_the_cost(start_run: StartRun) -> None:
    of = Measured(start_run, 2, 4)
    of.steps(1.0, 1.0)
    of.saver.finish()
    of.steps(1.0)
    before = of.cost()
    of.blocked = 100.0
    of.steps(1.0)
    of.saver.fail()
    of.steps(1.0, 1.0)  # The ranks agree on a failure, one step later.
    assert of.run.events.steps("save_failed") == [4]
    assert of.cost() == before


def test_the_cost_is_the_median_of_the_last_five_saves(start_run: StartRun) -> None:
    of = Measured(start_run, *range(2, 100, 2))
    of.steps(1.0)
    for blocked in (100.0, 100.0, 3.0, 1.0, 2.0, 50.0, 4.0):
        of.blocked = blocked
        of.steps(1.0)
        of.saver.finish()
        of.steps(1.0)
    cost = of.cost()
    assert cost is not None and cost.blocked_seconds == 3.0


def test_a_step_that_is_long_for_another_reason_does_not_change_what_a_step_takes(start_run: StartRun) -> None:
    of = Measured(start_run, 8)
    of.steps(9.0, 1.0, 1.0, 30.0, 1.0, 1.0, 1.0, 1.0, 1.0)
    of.saver.finish()
    of.steps(1.5)
    cost = of.cost()
    assert cost is not None and (cost.step_seconds, cost.slower_seconds) == (1.0, 0.5)


def test_a_save_that_blocks_until_it_is_durable_costs_that_time(start_run: StartRun) -> None:
    def slow(event: str, step: int, /, **figures: Any) -> None:
        run.clock.seconds += 3.0 if event == "save_started" else 0.0

    run = start_run(interval_type="auto", at_steps=(3,), mtbf_hours=1e6, seams={"on_event": slow})
    run.manager.reset()
    for _ in range(3):
        run.clock.seconds += 1.0
        run.step()
    (auto,) = run.manager._decider._auto
    assert isinstance(auto, AutoInterval)
    assert auto._costs.cost() == SaveCost(blocked_seconds=3.0, save_seconds=3.0, step_seconds=1.0)
