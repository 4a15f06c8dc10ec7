"""Metrics that a loop gives to `save`: they stand in the checkpoint, and retention keeps the best."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.conftest import StartRun
from tests.checkpoint.sharded_run import sharded_run
from tests.checkpoint.small_run import SmallRun
from tests.e2e import jobs
from tests.processes import read_lines
from tests.ranks import on_two_ranks
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.store.store import CheckpointStore

TAG = "loss_metrics/global_avg_loss"


def save(run: SmallRun, step: int, metrics: Any = None, *, last: bool = False) -> None:
    run.train_state.step = step - 1
    run.take_step()
    run.manager.save(step, force=last, metrics=metrics)


def metrics_of(root: Path) -> dict[int, dict[str, float]]:
    return {info.step: dict(info.metrics) for info in CheckpointStore(root).committed()}


def test_metrics_are_recorded_with_their_step_in_every_mode(start_run: StartRun, mode: str) -> None:
    run = start_run(interval=2, async_mode=mode)
    save(run, 1, {"loss": 9.0})
    save(run, 2, {"loss": 1.25, "accuracy": torch.tensor([0.5])})
    save(run, 3)
    save(run, 4)
    save(run, 5, {"loss": 3}, last=True)
    assert metrics_of(run.root) == {2: {"loss": 1.25, "accuracy": 0.5}, 4: {}, 5: {"loss": 3.0}}


def test_what_is_not_finite_is_left_out_and_the_save_succeeds(start_run: StartRun) -> None:
    run = start_run(interval=1)
    save(run, 1, {"loss": math.nan, "grad_norm": torch.tensor(math.inf), "accuracy": 0.5})
    assert metrics_of(run.root) == {1: {"accuracy": 0.5}}


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ({"loss": "1.0"}, r"metrics\['loss'\]: expected a number, found str"),
        ({"loss": None}, r"metrics\['loss'\]: expected a number, found NoneType"),
        ({"loss": True}, r"metrics\['loss'\]: expected a number, found bool"),
        ({"loss": torch.ones(3)}, r"metrics\['loss'\]: expected a tensor of one element, found the shape \[3\]"),
        ({7: 1.0}, "metrics: expected a name for each metric, found 7"),
        ({"": 1.0}, "metrics: expected a name for each metric, found ''"),
        ({"a\ud800": 1.0}, "metrics: expected a name for each metric"),
    ],
)
def test_a_metric_that_is_no_number_is_refused_before_a_save_is_due(
    start_run: StartRun, metrics: Any, message: str
) -> None:
    run = start_run(interval=100)
    with pytest.raises(ConfigError, match=message):
        run.manager.save(1, metrics=metrics)


def test_the_best_and_the_latest_stay(start_run: StartRun, mode: str) -> None:
    run = start_run(interval=1, keep_latest_k=1, keep_best_k=1, keep_best_metric="loss", async_mode=mode)
    for step, loss in enumerate((5.0, 1.0, 3.0, math.nan, 2.0), start=1):
        save(run, step, {"loss": loss})
    run.manager.close()
    assert run.committed() == [2, 5]


@pytest.mark.slow  # A job of six steps.
def test_a_job_keeps_its_best_and_every_fourth_step(tmp_path: Path) -> None:
    job = jobs.run(
        tmp_path / "outputs",
        *("--training.steps=6", "--checkpoint.interval=1", "--checkpoint.keep_every_n_steps=4"),
        *("--checkpoint.keep_best_k=1", "--checkpoint.keep_best_metric=max:grad_norm"),
    )
    logged = {line["step"]: line for line in read_lines(job.dump_folder / "metrics.jsonl")}
    best = max(logged, key=lambda step: logged[step]["grad_norm"])
    found = metrics_of(job.dump_folder / "checkpoint")
    assert {*found} == {4, 6, best}
    assert found[4] == {key: logged[4][tag] for key, tag in (("loss", TAG), ("grad_norm", "grad_norm"))}


@on_two_ranks
def test_of_values_that_differ_over_ranks_the_first_one_is_recorded(rank: int, tmp_path: Path) -> None:
    with (run := sharded_run(tmp_path, interval=1, async_mode="async")).manager:
        run.take_step()
        run.manager.save(1, metrics={"loss": torch.tensor(1.0 + rank)})
    if rank == 0:
        assert metrics_of(tmp_path / "checkpoint") == {1: {"loss": 1.0}}


@on_two_ranks
def test_a_metric_that_cannot_be_read_on_one_rank_is_a_failed_save_on_both(rank: int, tmp_path: Path) -> None:
    class Broken:
        def __float__(self) -> float:
            raise RuntimeError("the device is gone")

    with (run := sharded_run(tmp_path, interval=1)).manager:
        run.take_step()
        run.manager.save(1, metrics={"loss": Broken() if rank == 1 else 1.0})
        assert run.manager.wait() == -1
    assert run.names() == []
