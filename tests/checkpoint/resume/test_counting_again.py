"""A run that begins with the weights of an old one and counts steps from the start, in the same folder."""

from __future__ import annotations

from typing import Any

import pytest

from tests.checkpoint.conftest import StartRun
from tests.checkpoint.small_run import SmallRun, same
from torchtitan_lite.config.job_config import Checkpoint
from torchtitan_lite.errors import ConfigError

AGAIN = ("train_state", "lr_scheduler", "dataloader")


def old_run(start_run: StartRun) -> SmallRun:
    run = start_run(interval=2).finished(6)
    return run


@pytest.mark.parametrize("excluded", [("train_state",), ("train_state", "lr_scheduler"), ("train_state", "dataloader")])
def test_the_step_counter_is_not_excluded_without_what_goes_with_it(excluded: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=r"'train_state' without 'lr_scheduler' and 'dataloader'.*Add "):
        Checkpoint(exclude_from_loading=excluded)
    Checkpoint(exclude_from_loading=AGAIN)


@pytest.mark.parametrize("options", [{}, {"load_step": 4}])
def test_steps_are_counted_again_on_a_branch_that_sets_the_old_ones_aside(
    start_run: StartRun, options: dict[str, Any]
) -> None:
    old = old_run(start_run)
    run = start_run(seed=1, interval=2, exclude_from_loading=AGAIN, **options)
    assert run.manager.latest_step() == -1, "nothing of the new count is there"
    assert run.manager.load()
    assert (run.train_state.step, run.manager.loaded_step) == (0, None)
    if not options:
        assert same(run.contents()["model"], old.contents()["model"])
    run.train(2, last=False)
    run.manager.close()
    names = run.names()
    assert [name for name in names if "abandoned" not in name] == ["step-2"]
    assert [name.partition(".")[0] for name in names if "abandoned" in name] == ["step-2", "step-4", "step-6"]


@pytest.mark.parametrize("options", [{}, {"load_step": 4}])
def test_the_same_command_again_loads_all_of_its_own(start_run: StartRun, options: dict[str, Any]) -> None:
    old_run(start_run)
    command: dict[str, Any] = {"interval": 2, "exclude_from_loading": AGAIN, **options}
    run = start_run(seed=1, **command).loaded().finished(4, last=False)
    again = start_run(seed=2, **command)
    assert again.manager.latest_step() == 4
    assert again.manager.load()
    assert same(again.contents(), run.contents())
    assert again.manager.loaded_step == 4
    again.train(6, last=False)
    assert [name for name in again.names() if "abandoned" not in name] == ["step-2", "step-4", "step-6"]


def test_new_branch_counts_from_the_start_once_more(start_run: StartRun) -> None:
    old_run(start_run)
    start_run(seed=1, interval=2, exclude_from_loading=AGAIN).loaded().finished(2, last=False)
    again = start_run(seed=2, interval=2, exclude_from_loading=AGAIN, new_branch=True).loaded()
    assert again.train_state.step == 0


def test_a_start_that_ends_before_its_first_save_has_set_nothing_aside(start_run: StartRun) -> None:
    old_run(start_run)
    run = start_run(seed=1, interval=2, exclude_from_loading=AGAIN).loaded()
    run.step()
    run.manager.close()
    assert run.names() == ["step-2", "step-4", "step-6"]


def test_a_run_that_counts_again_can_roll_back_to_the_step_at_which_the_old_run_branched(start_run: StartRun) -> None:
    old_run(start_run)
    start_run(seed=1, interval=2, load_step=2).loaded().finished(4, last=False)
    start_run(seed=2, interval=2, exclude_from_loading=AGAIN).loaded().finished(4, last=False)
    rolled_back = start_run(seed=3, interval=2, load_step=2).loaded()
    assert rolled_back.manager.loaded_step == 2, "it continues no branch: the old one began at another step 2"
