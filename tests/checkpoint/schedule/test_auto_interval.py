"""A manager chooses the interval from what its saves cost, and its ranks save the same steps."""

from __future__ import annotations

import itertools
import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.conftest import StartRun
from tests.checkpoint.schedule.gated_saver import GatedSaver
from tests.checkpoint.sharded_run import same_everywhere, sharded_run
from tests.checkpoint.small_run import SmallRun
from tests.ranks import on_two_ranks
from torchtitan_lite.checkpoint.saving.auto_interval import AutoInterval
from torchtitan_lite.checkpoint.schedule.interval import EveryAutoSeconds, Tick, build_save_policy
from torchtitan_lite.checkpoint.schedule.optimum import Past
from torchtitan_lite.config.job_config import Checkpoint
from torchtitan_lite.errors import ConfigError

BLOCKED = 2.0


class Auto:
    """A run with steps of 10 s by a fake clock; its saves block for `BLOCKED` seconds and write for `writes` steps."""

    step_seconds = 10.0

    def __init__(
        self, start_run: StartRun, *, writes: int = 0, past: Callable[[], Past] = Past, **options: Any
    ) -> None:
        self.blocked = BLOCKED
        self._writes = writes
        self.saver = GatedSaver(self._block)
        self.run: SmallRun = start_run(interval_type="auto", seams={"saver": self.saver, "past": past}, **options)
        self.run.manager.reset()
        self.saved: list[int] = []

    def _block(self) -> None:
        self.run.clock.seconds += self.blocked

    def train(self, steps: int) -> list[int]:
        """Train, and return the steps that were saved."""
        before = len(self.saved)
        for _ in range(steps):
            self.run.clock.seconds += self.step_seconds
            if self.run.step():
                self.saved.append(self.run.train_state.step)
            if self.saved and self.run.train_state.step == self.saved[-1] + self._writes:
                self.saver.finish()
        return self.saved[before:]


def chosen(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the lines that name the interval."""
    return [line for line in caplog.messages if line.startswith("Saving every")]


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "torchtitan_lite")
    return caplog


def test_only_the_interval_of_the_coordinator_makes_a_save_due() -> None:
    policy = build_save_policy(Checkpoint(interval_type="auto"))
    assert policy == EveryAutoSeconds() and policy.needs_consensus
    start = Tick(0, 100.0)
    assert not policy.due(Tick(9, 1e9), start), "a rank that chooses nothing"
    assert policy.due(Tick(9, 110.0, auto_seconds=10.0), start)
    assert not policy.due(Tick(9, 109.9, auto_seconds=10.0), start)
    assert not policy.due(Tick(9, 110.0, is_writing=True, auto_seconds=10.0), start), "a save that takes longer"


def test_the_first_save_comes_after_a_minute_and_the_next_ones_at_the_optimum(
    start_run: StartRun, log: pytest.LogCaptureFixture
) -> None:
    run = Auto(start_run, mtbf_hours=1.0)
    run.step_seconds = 5.0
    saved = run.train(120)
    optimum = math.sqrt(2 * BLOCKED * 3600) + BLOCKED / 3 - BLOCKED
    assert saved[0] == 60 // 5 + 1
    assert {after - before for before, after in itertools.pairwise(saved)} == {math.ceil(optimum / 5) + 1}
    assert chosen(log) == [
        "Saving every 118.7 s: the optimum; a save costs 2.00 s (blocked 2.00 s, slower steps 0.00 s) and is durable "
        "in 2.00 s, a failure is expected every 1.0 h"
    ]


def test_the_interval_follows_what_saves_cost_and_a_noticeable_change_is_logged(
    start_run: StartRun, log: pytest.LogCaptureFixture
) -> None:
    run = Auto(start_run, mtbf_hours=1.0)
    run.train(30)
    run.blocked = 2.6
    run.train(60)
    assert len(chosen(log)) == 1, "an interval that is a seventh longer is not worth a line"
    run.blocked = 8.0
    saved = run.train(150)
    assert saved[-1] - saved[-2] == math.ceil(234.7 / 10) + 1
    assert [line.split(" and is")[0] for line in chosen(log)[1:]] == [
        "Saving every 234.7 s: the optimum; a save costs 8.00 s (blocked 8.00 s, slower steps 0.00 s)"
    ]


def test_slower_steps_during_a_save_count(start_run: StartRun, log: pytest.LogCaptureFixture) -> None:
    run = Auto(start_run, mtbf_hours=1.0, writes=5)
    assert run.train(7) == [7]
    run.step_seconds = 10.5
    run.train(6)
    assert "a save costs 5.00 s (blocked 2.00 s, slower steps 3.00 s) and is durable in 54.50 s" in chosen(log)[0]


@pytest.mark.parametrize(("past", "hours"), [(Past(), 167.5), (Past(16.3, 0), 200.1), (Past(16.3, 2), 40.0)])
def test_without_mtbf_hours_unclean_ends_shorten_the_interval(
    start_run: StartRun, log: pytest.LogCaptureFixture, past: Past, hours: float
) -> None:
    calls: list[Past] = []

    def known() -> Past:
        calls.append(past)
        return past

    run = Auto(start_run, past=known)
    run.train(9)
    assert chosen(log)[0].endswith(f"a failure is expected every {hours:.1f} h")
    assert len(calls) == 1


def test_the_hours_of_this_start_count_too(start_run: StartRun, log: pytest.LogCaptureFixture) -> None:
    run = Auto(start_run, past=lambda: Past(16.3, 2))
    run.train(9)
    run.run.clock.seconds += 100 * 3600
    run.train(1)
    assert [line.rpartition("every ")[2] for line in chosen(log)] == ["40.0 h", "80.0 h"]


@pytest.mark.parametrize(
    ("caps", "gap", "reason", "warning"),
    [
        ({"max_overhead": 0.01}, 21, "checkpoint.max_overhead", None),
        ({"max_lost_seconds": 84.0}, 7, "checkpoint.max_lost_seconds", None),
        (
            {"max_lost_seconds": 84.0, "max_overhead": 0.01},
            7,
            "checkpoint.max_lost_seconds",
            "checkpoint.max_lost_seconds = 84 takes precedence over checkpoint.max_overhead = 0.01: saves cost "
            "0.0333 of the time between them",
        ),
        (
            {"max_lost_seconds": 20.0, "max_overhead": 0.01},
            2,
            "the time that a save takes",
            "checkpoint.max_lost_seconds = 20 cannot be met: a save takes 2.0 s, so a failure may lose 26 s",
        ),
    ],
)
def test_the_caps_hold_and_where_they_conflict_one_line_says_so(
    start_run: StartRun,
    log: pytest.LogCaptureFixture,
    caps: dict[str, float],
    gap: int,
    reason: str,
    warning: str | None,
) -> None:
    saved = Auto(start_run, mtbf_hours=1.0, **caps).train(80)
    assert saved[-1] - saved[-2] == gap
    assert [line.split(": ")[1].split(";")[0] for line in chosen(log)] == [reason]
    warnings = [record.getMessage() for record in log.records if record.levelno == logging.WARNING]
    assert warnings == ([] if warning is None else [warning])


def test_the_first_save_comes_after_half_of_max_lost_seconds_if_that_is_less(start_run: StartRun) -> None:
    assert Auto(start_run, max_lost_seconds=84.0).train(10)[0] == math.ceil(42 / 10) + 1


def test_a_conflict_that_begins_later_is_one_warning_however_the_interval_changes(
    start_run: StartRun, log: pytest.LogCaptureFixture
) -> None:
    run = Auto(start_run, mtbf_hours=1.0, max_lost_seconds=84.0, max_overhead=0.05)
    warnings = []
    for blocked in (2.0, 4.0, 14.0):
        run.blocked = blocked
        run.train(60)
        warnings.append(sum("takes precedence over" in line for line in log.messages))
    assert warnings == [0, 1, 1]
    assert [line.split(": ")[0] for line in chosen(log)] == [
        "Saving every 60.0 s",
        "Saving every 56.0 s",
        "Saving every 36.0 s",
    ]


def test_no_moment_of_a_run_would_lose_more_than_max_lost_seconds(start_run: StartRun) -> None:
    run = Auto(start_run, mtbf_hours=1000.0, max_lost_seconds=300.0, writes=7)
    clock = run.run.clock
    lost, durable, begun = [], clock.seconds, {}
    for _ in range(200):
        ended = clock.seconds + run.step_seconds
        if run.train(1):
            begun[run.saved[-1]] = ended
        lost.append(clock.seconds - durable)
        if run.run.train_state.step - 7 in begun:
            durable = begun[run.run.train_state.step - 7]
    run.saver.finish()
    assert 270 < max(lost) <= 300


def test_a_forced_save_is_not_measured_and_ends_nothing(start_run: StartRun) -> None:
    run = start_run(interval_type="auto")
    run.manager.reset()
    run.train(3)
    assert run.committed() == [3]
    (auto,) = run.manager._decider._auto
    assert isinstance(auto, AutoInterval) and auto._costs.cost() is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mtbf_hours": -1.0}, "checkpoint.mtbf_hours: expected a finite number of at least 0"),
        ({"max_lost_seconds": float("inf")}, "checkpoint.max_lost_seconds: expected a finite number of at least 0"),
        ({"max_overhead": -0.1}, "checkpoint.max_overhead: expected a finite number of at least 0"),
    ],
)
def test_a_wrong_value_is_refused_by_the_name_of_its_key(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Checkpoint(**settings)


@pytest.mark.slow
@on_two_ranks
def test_ranks_with_other_clocks_costs_and_pasts_save_the_steps_of_rank_0(rank: int, tmp_path: Path, mode: str) -> None:
    seconds = [1000.0 * rank]

    def slow(event: str, step: int, /, **figures: Any) -> None:
        seconds[0] += (2.0, 0.5)[rank] if event == "save_started" else 0.0

    past = Past(167.0, 0) if rank == 0 else Past(1.0, 1000)
    seams = {"clock": lambda: seconds[0], "on_event": slow, "past": lambda: past}
    run = sharded_run(tmp_path, interval_type="auto", async_mode=mode, max_overhead=0.02, mtbf_hours=0.1, seams=seams)
    with run.manager:
        run.manager.reset()
        saved = []
        for step in range(1, 36):
            seconds[0] += (10.0, 19.0)[rank]
            saved += run.train(step, last=False)
            run.saver.wait()
    # A minute until the first save, then 2 s / 0.02, by the clock of rank 0; each comes a step after it is due.
    assert same_everywhere(saved)
    assert saved == [7, 18, 29]
    assert run.names() == sorted(f"step-{step}" for step in saved)


def test_each_interval_in_the_log_is_an_event(start_run: StartRun, log: pytest.LogCaptureFixture) -> None:
    run = Auto(start_run, mtbf_hours=1.0)
    run.train(90)
    run.blocked = 8.0
    run.train(150)
    events = [(step, figures) for name, step, figures in run.run.events.recorded if name == "interval_chosen"]
    assert len(events) == len(chosen(log)) == 2
    assert [step for step, _ in events] == sorted(step for step, _ in events)
    first, second = (figures for _, figures in events)
    assert first == {
        **{"seconds": pytest.approx(118.67, abs=0.01), "reason": "the optimum", "mtbf_hours": 1.0},
        **{"cost_seconds": 2.0, "stall_seconds": 2.0, "save_seconds": 2.0},
    }
    assert second["cost_seconds"] == 8.0 and second["seconds"] > first["seconds"]
    json.dumps(events)
