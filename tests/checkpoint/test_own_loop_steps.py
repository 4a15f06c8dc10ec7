"""The numbers and objects that a loop hands to the manager by mistake: refused by name, at once."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch

from tests.checkpoint.conftest import StartRun
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.store.store import CheckpointStore


@pytest.mark.parametrize("step", ["1", 1.0, None, -1, True], ids=repr)
def test_a_step_that_is_no_whole_number_is_refused_by_name(start_run: StartRun, step: Any) -> None:
    run = start_run(interval=1)
    for call, least in ((run.manager.save, 0), (run.manager.finish, 0), (run.manager.load, -1)):
        if step != -1 or least == 0:
            with pytest.raises(ConfigError, match=f"{call.__name__}: expected a step, a whole number from {least}"):
                call(step)


@pytest.mark.parametrize("step", [np.int64(1), torch.tensor(1)], ids=["numpy", "tensor"])
def test_whole_numbers_of_numpy_and_torch_are_steps(start_run: StartRun, step: Any) -> None:
    run = start_run(interval=1)
    run.train(1, last=False)
    assert run.manager.save(step)
    assert run.manager.load(step)
    assert run.committed() == [1]


def test_a_loop_that_counts_its_steps_from_the_start_again_is_refused(start_run: StartRun) -> None:
    run = start_run(interval=1)
    run.train(3, last=False)
    with pytest.raises(
        ConfigError, match=r"save\(1\): expected a step from 3 on.*After a load, count from manager.loaded_step on"
    ):
        run.manager.save(1)
    assert run.manager.wait() == 3


def test_a_loop_that_does_not_count_on_after_a_load_is_refused(start_run: StartRun) -> None:
    start_run(interval=1).finished(3, last=False)
    again = start_run(interval=1).resumed()
    with pytest.raises(ConfigError, match=r"save\(1\): expected a step from 3 on"):
        again.manager.save(1)


def test_after_a_load_of_an_earlier_step_the_steps_count_from_there(start_run: StartRun) -> None:
    run = start_run(interval=1)
    run.train(3, last=False)
    assert run.manager.load(1)
    run.train(2, last=False)
    assert run.manager.wait() == 2


def test_a_loop_that_calls_save_only_at_steps_of_its_own_is_warned_once(
    start_run: StartRun, caplog: pytest.LogCaptureFixture
) -> None:
    run = start_run(interval=10)
    assert not any(run.manager.save(step) for step in range(7, 36, 7))
    warned = [record.getMessage() for record in caplog.records if "was due" in record.getMessage()]
    assert len(warned) == 1 and "save(14): step 10 was due" in warned[0] and "now=True" in warned[0]


def test_a_loop_that_misses_no_due_step_is_not_warned(start_run: StartRun, caplog: pytest.LogCaptureFixture) -> None:
    run = start_run(interval=10)
    for step in (10, 13, 20, 40):  # Step 30 was missed, but a due step is saved at once.
        run.manager.save(step)
    run.manager.save(55, now=True)
    run.manager.save(65, force=True)
    run.manager.load()
    run.manager.save(66)
    assert run.committed() == [10, 20, 40, 55, 65]
    assert not [record for record in caplog.records if "was due" in record.getMessage()]


def test_a_loss_with_its_graph_is_a_metric_without_a_warning(start_run: StartRun) -> None:
    run = start_run(interval=1)
    loss = run.model(next(run.loader)).square().mean()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.manager.save(1, metrics={"loss": loss})
    run.manager.wait()
    [info] = CheckpointStore(run.root).committed()
    assert info.metrics["loss"] == loss.item()


def test_metrics_without_names_are_refused(start_run: StartRun) -> None:
    metrics: Any = [("loss", 0.5)]
    with pytest.raises(ConfigError, match=r"metrics: expected numbers by name.*found list"):
        start_run(interval=1).manager.save(1, metrics=metrics)


def test_an_optimizer_that_lost_a_group_but_not_its_state_is_named(start_run: StartRun) -> None:
    run = start_run(interval=1)
    run.train(1, last=False)
    run.optimizer.param_groups[0]["params"].pop()
    with pytest.raises(ConfigError, match="AdamW has a state for parameters that are in none of its param_groups"):
        run.manager.save(2)
