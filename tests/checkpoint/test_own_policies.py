"""A loop's own save policy and retention rule take the place of the keys, and of nothing else."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.logged import logged_warnings
from tests.ranks import on_two_ranks
from torchtitan_lite.checkpoint import (
    AnyOf,
    AtStep,
    CheckpointInfo,
    CheckpointManager,
    EverySteps,
    KeepAny,
    KeepLatest,
    Ruling,
    SavePolicy,
    Tick,
)
from torchtitan_lite.checkpoint.schedule.optimum import Past
from torchtitan_lite.errors import ConfigError

DEADLINE_SECONDS = 3.0


class OnOdd(SavePolicy):
    """The least that a policy has."""

    needs_consensus = False

    def due(self, now: Tick, last_save: Tick) -> bool:
        return now.step % 2 == 1


class OnOwnStep(SavePolicy):
    """Due at steps that this rank alone knows."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def due(self, now: Tick, last_save: Tick) -> bool:
        return now.step in self.steps


class EveryTen(OnOdd):
    """Answers what else the manager asks, too."""

    def missed_step(self, after: int, before: int) -> int | None:
        return after + 1 if after + 1 < before else None

    def is_overdue(self, loaded: Tick, on_disk: Tick) -> bool:
        return loaded.step - on_disk.step >= 10

    def intervals_behind(self, loaded: Tick, on_disk: Tick) -> float:
        return (loaded.step - on_disk.step) / 10


class KeepOdd:
    def rulings(self, full: Sequence[CheckpointInfo], now: float) -> list[Ruling]:
        steps = frozenset(info.step for info in full)
        return [Ruling("odd", frozenset(step for step in steps if step % 2), steps)]


def manager_of(folder: Path, **keys: Any) -> CheckpointManager:
    torch.manual_seed(0)
    return CheckpointManager.for_loop(model=nn.Linear(2, 2), folder=folder, preemption_signals=(), **keys)


def saved(manager: CheckpointManager, *steps: int) -> list[int]:
    """Return at which of `steps` a save began."""
    with manager:
        manager.load()
        return [step for step in steps if manager.save(step)]


def steps_in(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in folder.glob("step-*"))


def test_a_policy_with_the_least_that_it_needs_decides(tmp_path: Path) -> None:
    assert saved(manager_of(tmp_path, save_policy=OnOdd()), 1, 2, 3, 4, 5) == [1, 3, 5]


def test_own_policies_are_combined_with_those_of_the_keys(tmp_path: Path) -> None:
    policy = AnyOf((OnOdd(), EverySteps(4), AtStep(6)))
    assert saved(manager_of(tmp_path, save_policy=policy), *range(1, 9)) == [1, 3, 4, 5, 6, 7, 8]


@on_two_ranks
def test_of_a_policy_that_needs_consensus_any_ranks_yes_counts_a_step_later(rank: int, tmp_path: Path) -> None:
    policy = OnOwnStep()
    policy.steps = [2] if rank == 1 else [5]
    assert saved(manager_of(tmp_path, save_policy=policy), *range(1, 9)) == [3, 6]


def test_a_run_that_only_loads_asks_no_policy(tmp_path: Path) -> None:
    saved(manager_of(tmp_path, save_policy=OnOdd()), 1)
    with logged_warnings() as warnings:
        assert saved(manager_of(tmp_path, save_policy=EveryTen(), load_only=True), 4, 9) == []
    assert not warnings


def test_a_loop_that_leaves_out_a_step_is_warned_by_the_policy_that_knows_it(tmp_path: Path) -> None:
    for policy, num_warnings in ((OnOdd(), 0), (EveryTen(), 1), (AnyOf((OnOdd(), EveryTen())), 1)):
        with logged_warnings() as warnings:
            saved(manager_of(tmp_path / str(len(list(tmp_path.iterdir()))), save_policy=policy), 2, 6)
        assert sum("step 3 was due and was not saved" in warning for warning in warnings) == num_warnings


def test_an_own_policy_says_what_is_owed_after_a_resume_from_memory() -> None:
    loaded, on_disk = Tick(21, 0.0), Tick(11, 0.0)
    assert OnOdd().is_overdue(loaded, on_disk) and not OnOdd().is_overdue(Tick(20, 0.0), on_disk)
    assert OnOdd().intervals_behind(loaded, on_disk) == 0
    both = AnyOf((AtStep(15), EveryTen()))
    assert both.is_overdue(loaded, on_disk) and not both.is_overdue(Tick(20, 0.0), on_disk)
    assert both.intervals_behind(loaded, on_disk) == 1


def test_policies_split_into_those_that_ranks_answer_alike_and_the_others() -> None:
    alike, differing = AnyOf((OnOdd(), OnOwnStep())).split()
    assert (alike.needs_consensus, differing.needs_consensus) == (False, True)
    assert alike.due(Tick(1, 0.0), Tick(0, 0.0)) and not differing.due(Tick(1, 0.0), Tick(0, 0.0))


def test_an_own_rule_decides_what_stays(tmp_path: Path) -> None:
    with manager_of(tmp_path, retention=KeepOdd(), interval=1) as manager:
        manager.load()
        for step in range(1, 7):
            manager.save(step)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-1", "step-3", "step-5", "step-6"]


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"save_policy": OnOdd(), "interval": 5}, "save_policy: found next to interval, which"),
        ({"save_policy": OnOdd(), "interval_type": "steps"}, "next to interval_type, which"),
        (
            {"save_policy": OnOdd(), "at_steps": (1,), "or_every_seconds": 5},
            "next to at_steps, or_every_seconds, which",
        ),
        ({"save_policy": OnOdd(), "enable_first_step_checkpoint": True}, "next to enable_first_step_checkpoint, which"),
        ({"save_policy": OnOdd(), "max_lost_seconds": 9.0}, "next to max_lost_seconds, which"),
        ({"retention": KeepLatest(1), "keep_latest_k": 2}, "retention: found next to keep_latest_k, which"),
        ({"retention": KeepLatest(1), "keep_best_metric": "loss"}, "retention: found next to keep_best_metric, which"),
        ({"save_policy": OnOdd}, "save_policy: expected a SavePolicy, found the class OnOdd"),
        ({"save_policy": KeepOdd()}, "save_policy: expected a SavePolicy, found a KeepOdd"),
        ({"retention": KeepOdd}, "retention: expected an object with a method rulings, found the class KeepOdd"),
        ({"retention": OnOdd()}, "retention: expected an object with a method rulings, found a"),
    ],
)
def test_two_answers_to_one_question_and_what_is_no_policy_are_refused(
    keys: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=named):
        manager_of(tmp_path, **keys)


def test_each_argument_leaves_the_keys_of_the_other_question_alone(tmp_path: Path) -> None:
    assert saved(manager_of(tmp_path, save_policy=OnOdd(), keep_latest_k=1, min_free_disk_gb=1e-9), 1, 2, 3) == [1, 3]
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-3"]


class FailingRule:
    """Does what `fails` does for the steps that are there; says nothing without one."""

    def __init__(self, fails: Callable[[Sequence[CheckpointInfo]], Any] | None) -> None:
        self.fails = fails

    def rulings(self, full: Sequence[CheckpointInfo], now: float) -> Any:
        return [] if self.fails is None else self.fails(full)


def _ruling(keeps: Any, judges: Any) -> Any:
    return lambda full: [Ruling("own", keeps(full), judges(full))]


def _steps(full: Sequence[CheckpointInfo]) -> frozenset[int]:
    return frozenset(info.step for info in full)


@pytest.mark.parametrize("async_mode", ["disabled", "async"])
@pytest.mark.parametrize(
    ("fails", "found"),
    [
        (lambda full: {}[f"no loss of step {full[-1].step}"], "but it raised KeyError: 'no loss of step 1'"),
        (lambda full: sys.exit("no\nway"), "but it raised SystemExit: no way"),
        (lambda full: None, "found None"),
        (lambda full: [None], "found [None]"),
        (lambda full: (1 / 0 for _ in full), "found <generator"),
        (_ruling(lambda full: "step-1", _steps), "found [Ruling("),
        (_ruling(lambda full: frozenset(full), _steps), "found [Ruling("),
        (_ruling(_steps, lambda full: None), "found [Ruling("),
    ],
)
def test_a_rule_that_fails_is_named_once_and_removes_nothing_while_saves_continue(
    fails: Any, found: str, async_mode: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rule = FailingRule(fails)
    keys: dict[str, Any] = {"interval": 1, "async_mode": async_mode, "timeout_seconds": 5}
    with manager_of(tmp_path, retention=KeepAny((KeepLatest(1), rule)), **keys) as manager:
        manager.load()
        for step in (1, 2, 3):
            manager.save(step)
            manager.wait()
            assert manager._housekeeping.wait(DEADLINE_SECONDS)
    (warning,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "\n" not in warning.getMessage() and warning.exc_info is None
    wanted = f"retention: FailingRule.rulings: expected a list of Ruling with steps as numbers, {found}"
    assert warning.getMessage().startswith(wanted)
    assert warning.getMessage().endswith(". No checkpoint is removed while that is so")
    assert steps_in(tmp_path) == [1, 2, 3]


def test_a_rule_that_works_again_removes_again_and_is_named_again_when_it_fails(tmp_path: Path) -> None:
    rule = FailingRule(lambda full: None)
    with (
        logged_warnings() as warnings,
        manager_of(tmp_path, retention=KeepAny((rule, KeepLatest(1))), interval=1) as manager,
    ):
        manager.load()
        for step, fails in enumerate((rule.fails, None, rule.fails, rule.fails), 1):
            rule.fails = fails
            manager.save(step)
            assert len(warnings) == (1 if step < 3 else 2)
    assert steps_in(tmp_path) == [2, 3, 4]


def test_a_rule_may_give_steps_of_numpy_in_any_collection(tmp_path: Path) -> None:
    def rulings(full: Sequence[CheckpointInfo]) -> Any:
        steps = np.array([info.step for info in full])
        yield Ruling("even", steps[steps % 2 == 0], {int(step): "judged" for step in steps})  # type: ignore[arg-type]

    with manager_of(tmp_path, retention=FailingRule(rulings), interval=1) as manager:
        manager.load()
        for step in range(1, 6):
            manager.save(step)
    assert steps_in(tmp_path) == [2, 4, 5]


def test_a_rule_that_changes_the_list_that_it_is_given_changes_nothing_else(tmp_path: Path) -> None:
    def reverse(full: Any) -> list[Ruling]:
        full.sort(key=lambda info: -info.step)
        return []

    rule = FailingRule(reverse)
    with manager_of(tmp_path, retention=KeepAny((rule, KeepLatest(1))), interval=1) as manager:
        manager.load()
        for step in (1, 2, 3):
            manager.save(step)
    assert steps_in(tmp_path) == [3]


class Fails(SavePolicy):
    """Answers all that the manager asks with what `fails` returns at `steps`."""

    def __init__(self, fails: Callable[[], Any], *, alike: bool = True, steps: Sequence[int] = (2,)) -> None:
        self.fails, self.needs_consensus, self.steps = fails, not alike, steps

    def due(self, now: Tick, last_save: Tick) -> Any:
        return self.fails() if now.step in self.steps else False

    def missed_step(self, after: int, before: int) -> Any:
        return self.fails()

    def intervals_behind(self, loaded: Tick, on_disk: Tick) -> Any:
        return self.fails()


FAILURES: list[tuple[Callable[[], Any], str]] = [
    (lambda: "yes", "found 'yes'"),
    (lambda: None, "found None"),
    (lambda: torch.tensor([True, True]), "found tensor([True, True])"),
    (lambda: 1 / 0, "but it raised ZeroDivisionError: division by zero"),
    (lambda: sys.exit(3), "but it raised SystemExit: 3"),
]


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize(("fails", "found"), FAILURES)
def test_a_policy_without_an_answer_is_named(
    fails: Callable[[], Any], found: str, alike: bool, wrapped: bool, tmp_path: Path
) -> None:
    policy: SavePolicy = Fails(fails, alike=alike)
    with manager_of(tmp_path, save_policy=AnyOf((policy, AtStep(9))) if wrapped else policy) as manager:
        manager.load()
        manager.save(1)
        wanted = re.escape(f"save_policy: Fails.due: expected True or False, {found}. Fix that method.")
        with pytest.raises(ConfigError, match=f"^{wanted}$"):
            # The answer of a policy that needs consensus counts one step later.
            assert manager.save(2) is alike is False
            manager.save(3)


@on_two_ranks
def test_what_the_policy_of_one_rank_fails_with_is_raised_on_all_ranks_at_one_step(rank: int, tmp_path: Path) -> None:
    for at, (fails, found) in enumerate(FAILURES):
        policy = Fails(fails, alike=False, steps=[2] if rank == 1 else [])
        with manager_of(tmp_path / str(at), save_policy=policy, timeout_seconds=20) as manager:
            manager.load()
            assert not manager.save(1) and not manager.save(2)
            with pytest.raises(ConfigError, match=re.escape(found)):
                manager.save(3)


def test_a_step_that_is_saved_anyway_is_saved_without_the_answer_of_a_policy(tmp_path: Path) -> None:
    with manager_of(tmp_path, save_policy=Fails(lambda: None, alike=False, steps=(1, 2))) as manager:
        manager.load()
        assert not manager.save(1) and manager.save(2, now=True) and manager.save(3, force=True)


@pytest.mark.parametrize("yes", [np.True_, torch.tensor(True), torch.tensor([True])])
@pytest.mark.parametrize("alike", [True, False])
def test_the_bools_of_numpy_and_torch_are_answers(yes: Any, alike: bool, tmp_path: Path) -> None:
    policy = Fails(lambda: yes, alike=alike)
    assert saved(manager_of(tmp_path, save_policy=policy), 1, 2, 3, 4) == [2 if alike else 3]


@pytest.mark.parametrize("fails", [lambda: "yes", lambda: 1 / 0])
def test_a_policy_that_fails_to_know_what_was_missed_is_a_warning(fails: Callable[[], Any], tmp_path: Path) -> None:
    with logged_warnings() as warnings:
        saved(manager_of(tmp_path, save_policy=Fails(fails, steps=())), 1, 4, 7)
    (warning,) = warnings
    assert warning.startswith("save_policy: Fails.missed_step: expected a step or None, ")
    assert warning.endswith(". Fix that method. Steps that the loop skips are not reported")


def test_a_policy_that_fails_to_know_what_is_owed_is_named() -> None:
    loaded, on_disk = Tick(2, 0.0), Tick(1, 0.0)
    policy = AnyOf((AtStep(9), Fails(lambda: "yes")))
    with pytest.raises(ConfigError, match=r"Fails\.is_overdue: expected True or False, found 'yes'"):
        policy.is_overdue(loaded, on_disk)
    with pytest.raises(ConfigError, match=r"Fails\.intervals_behind: expected a number, found 'yes'"):
        policy.intervals_behind(loaded, on_disk)


@pytest.mark.parametrize(
    ("past", "found"),
    [
        (lambda: 1 / 0, "but it raised ZeroDivisionError: division by zero"),
        (lambda: sys.exit(1), "but it raised SystemExit: 1"),
        (lambda: None, "found None"),
        (lambda: Past(float("nan"), 1), "found Past(hours=nan, unclean_ends=1)"),
    ],
)
def test_a_past_that_fails_is_a_warning_and_the_interval_counts_from_this_start(
    past: Any, found: str, tmp_path: Path
) -> None:
    keys: dict[str, Any] = {"interval_type": "auto", "past": past}
    with logged_warnings() as warnings, manager_of(tmp_path, **keys) as manager:
        manager.load()
        manager.reset()
        for step in (1, 2, 3, 4, 5):
            manager.save(step, now=step == 1)
        assert manager._decider._auto[0].seconds > 0
    (warning,) = warnings
    wanted = f"past: expected a Past of numbers from 0, {found}. The interval does not count earlier starts"
    assert warning == wanted
