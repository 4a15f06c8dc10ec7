"""When a checkpoint is due."""

from __future__ import annotations

from typing import Any

import pytest

from torchtitan_lite.checkpoint.schedule.interval import (
    AnyOf,
    AtStep,
    EverySeconds,
    EverySteps,
    SavePolicy,
    Tick,
    build_save_policy,
)
from torchtitan_lite.config.job_config import Checkpoint
from torchtitan_lite.errors import ConfigError

START = Tick(0, 0.0)


def due_steps(policy: SavePolicy, steps: int = 10) -> list[int]:
    return [step for step in range(1, steps + 1) if policy.due(Tick(step, 0.0), START)]


def built(**settings: Any) -> SavePolicy:
    return build_save_policy(Checkpoint(**settings))


def test_an_interval_of_steps_is_due_at_its_multiples() -> None:
    assert due_steps(built(interval=3)) == [3, 6, 9]


def test_the_multiples_do_not_shift_when_another_step_was_saved_in_between() -> None:
    assert EverySteps(3).due(Tick(6, 0.0), last_save=Tick(5, 0.0))


def test_the_first_step_is_due_when_asked_for() -> None:
    assert due_steps(built(interval=4, enable_first_step_checkpoint=True)) == [1, 4, 8]


def test_seconds_are_counted_from_the_last_save_whatever_the_step() -> None:
    policy = built(interval=10, interval_type="seconds")
    last = Tick(7, 100.0)
    assert not policy.due(Tick(500, 109.9), last)
    assert policy.due(Tick(8, 110.0), last)


def test_the_first_step_is_due_with_an_interval_of_seconds() -> None:
    policy = built(interval=10, interval_type="seconds", enable_first_step_checkpoint=True)
    assert due_steps(policy) == [1]
    assert policy.due(Tick(2, 10.0), START)


def test_a_run_that_only_loads_is_never_due() -> None:
    policy = built(interval=1, load_only=True, enable_first_step_checkpoint=True)
    assert due_steps(policy) == []
    assert policy == AnyOf(())


def test_only_clocks_need_consensus() -> None:
    assert EverySeconds(1).needs_consensus
    assert not any(policy.needs_consensus for policy in (EverySteps(1), AtStep(1), AnyOf(())))
    assert AnyOf((AtStep(1), EverySeconds(1))).needs_consensus
    assert not AnyOf((AtStep(1), EverySteps(2))).needs_consensus


@pytest.mark.parametrize("policy", [EverySteps(2), EverySeconds(5), AnyOf(()), AnyOf((AtStep(1), EverySeconds(5)))])
def test_a_split_policy_is_due_when_either_part_is(policy: SavePolicy) -> None:
    at_once, after_consensus = policy.split()
    assert not at_once.needs_consensus
    for now in (Tick(step, seconds) for step in range(1, 5) for seconds in (0.0, 5.0)):
        assert policy.due(now, START) == (at_once.due(now, START) or after_consensus.due(now, START))


def test_of_a_split_policy_only_the_clock_waits_for_consensus() -> None:
    at_once, after_consensus = AnyOf((AtStep(1), EverySeconds(5))).split()
    assert at_once.due(Tick(1, 0.0), START)
    assert not after_consensus.due(Tick(1, 0.0), START)
    assert after_consensus.due(Tick(2, 5.0), START)


def test_listed_steps_are_due_with_the_interval() -> None:
    assert due_steps(built(interval=4, at_steps=(3, 10))) == [3, 4, 8, 10]
    assert due_steps(built(interval_type="none", at_steps=[2, 7])) == [2, 7]
    assert due_steps(built(interval_type="none", at_steps=(2,), enable_first_step_checkpoint=True)) == [1, 2]


def test_without_an_interval_no_step_is_due() -> None:
    assert due_steps(built(interval_type="none", interval=1)) == []


def test_of_steps_and_seconds_the_first_that_comes_is_due() -> None:
    policy = built(interval=100, or_every_seconds=30)
    last = Tick(100, 0.0)
    assert not policy.due(Tick(150, 29.9), last)
    assert policy.due(Tick(150, 30.0), last)
    assert policy.due(Tick(200, 1.0), last)
    at_once, after_consensus = policy.split()
    assert at_once.due(Tick(200, 0.0), last) and not at_once.due(Tick(150, 30.0), last)
    assert after_consensus.due(Tick(150, 30.0), last) and not after_consensus.due(Tick(200, 0.0), last)


@pytest.mark.parametrize(
    ("settings", "loaded", "on_disk", "overdue", "behind"),
    [
        ({"interval": 6}, Tick(7, 0.0), Tick(5, 0.0), True, 2 / 6),
        ({"interval": 6}, Tick(6, 0.0), Tick(5, 0.0), True, 1 / 6),
        ({"interval": 6}, Tick(11, 0.0), Tick(6, 0.0), False, 5 / 6),
        ({"interval_type": "none", "at_steps": (7,)}, Tick(7, 0.0), Tick(5, 0.0), False, 0),
        ({"interval_type": "seconds", "interval": 30}, Tick(9, 129.0), Tick(5, 99.0), True, 1),
        ({"interval_type": "seconds", "interval": 30}, Tick(9, 128.0), Tick(5, 99.0), False, 29 / 30),
        ({"interval": 10, "or_every_seconds": 30}, Tick(9, 189.0), Tick(5, 99.0), True, 3),
        ({"interval_type": "auto"}, Tick(9, 150.0, auto_seconds=60.0), Tick(5, 99.0), False, 0),
        ({"interval_type": "auto"}, Tick(9, 160.0, auto_seconds=60.0), Tick(5, 99.0), True, 0),
    ],
)
def test_what_was_loaded_from_memory_is_overdue_if_a_save_since_the_disks_step_is_missing(
    settings: dict[str, Any], loaded: Tick, on_disk: Tick, overdue: bool, behind: float
) -> None:
    assert built(**settings).is_overdue(loaded, on_disk) is overdue
    assert built(**settings).intervals_behind(loaded, on_disk) == pytest.approx(behind)


def test_a_run_that_only_loads_saves_at_no_listed_step_either() -> None:
    assert built(load_only=True, at_steps=(1, 2), or_every_seconds=1, interval_type="auto") == AnyOf(())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"at_steps": (5, 0)}, "checkpoint.at_steps: expected at least 1, found 0"),
        ({"at_steps": ("5",)}, "checkpoint.at_steps: expected a list of whole numbers"),
        ({"at_steps": (True,)}, "checkpoint.at_steps: expected a list of whole numbers"),
        ({"or_every_seconds": -1}, "checkpoint.or_every_seconds: expected a finite number of at least 0"),
        ({"max_overhead": float("nan")}, "checkpoint.max_overhead: expected a finite number"),
    ],
)
def test_a_wrong_value_is_refused_by_the_name_of_its_key(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Checkpoint(**settings)
