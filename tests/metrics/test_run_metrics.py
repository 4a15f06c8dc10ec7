"""The figures of a run as the loop passes them on: in metrics.jsonl and the ledger, and for the automatic interval."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.disks import fill, small_disk
from tests.logged import logged_warnings
from tests.no_threads import no_threads
from torchtitan_lite.accounts import LEDGER_FILE, read_accounts
from torchtitan_lite.checkpoint.schedule.optimum import Past
from torchtitan_lite.config.job_config import Checkpoint, Job, JobConfig, Metrics
from torchtitan_lite.distributed.process_group import World
from torchtitan_lite.events import Finished, Resumed
from torchtitan_lite.metrics.logger import METRICS_FILE
from torchtitan_lite.metrics.run_metrics import Heartbeat, RunMetrics


def _metrics(folder: Path, *, rank: int = 0, load_only: bool = False, **metrics: Any) -> RunMetrics:
    config = JobConfig(
        job=Job(dump_folder=str(folder)),
        metrics=Metrics(log_freq=2, **metrics),
        checkpoint=Checkpoint(enable_checkpoint=True, load_only=load_only),
    )
    return RunMetrics(config, World(rank, 2, torch.device("cpu")), flops_per_token=1.0)


def _train(metrics: RunMetrics, first: int, losses: list[float]) -> None:
    for step, loss in enumerate(losses, first):
        with metrics.waiting_for_data():
            pass
        with metrics.ledger.step(step):
            metrics.step_done(10.0, loss)
            if step % 2 == 0:
                figures = {f"loss_metrics/global_{kind}_loss": loss for kind in ("avg", "max")}
                figures |= {"grad_norm": 1.0, "lr": 0.1, "n_tokens_seen": 10 * step}
                metrics.log(step, figures, (0, None))


def _killed(metrics: RunMetrics) -> None:
    assert metrics._heartbeat is not None
    metrics._heartbeat.close()


def test_the_running_loss_is_the_mean_of_the_steps_since_the_last_logged_one(tmp_path: Path) -> None:
    with _metrics(tmp_path) as metrics:
        metrics.begin("1 process")
        metrics.start(0)
        _train(metrics, 1, [8.0, 4.0, 3.0, 1.0])
    lines = [json.loads(line) for line in (tmp_path / METRICS_FILE).read_text().splitlines()]
    assert [line["loss_metrics/running_avg_loss"] for line in lines] == [6.0, 2.0]
    assert [line["loss_metrics/global_avg_loss"] for line in lines] == [4.0, 1.0]
    assert [line["checkpoint/at_risk_steps"] for line in lines] == [1, 3], "a step counts from its end on"
    assert all(line[f"goodput/{part}(s)"] >= 0 for line in lines for part in ("productive", "down"))


def test_the_past_is_that_of_the_ledger(tmp_path: Path) -> None:
    first = _metrics(tmp_path)
    assert first.past() == Past()
    first.begin("1 process")
    assert first.past() == Past()
    first.start(0)
    _train(first, 1, [1.0, 1.0, 1.0])
    _killed(first)
    second = _metrics(tmp_path)
    second.begin("1 process")
    assert second.past().unclean_ends == 1 and 0 < second.past().hours < 1
    second.note(Resumed(1))
    second.start(1)
    _train(second, 2, [1.0, 1.0, 1.0])
    second.note(Finished(4))
    second.close()
    accounts = read_accounts(tmp_path)
    assert (accounts.redone_steps, accounts.unclean_ends) == (2, 1)
    assert [start.end for start in accounts.starts] == ["", "finished"]
    resumed, finished = (json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines())
    assert (finished["redone_steps"], finished["starts"], 0 < finished["goodput"] < 1) == (2, 2, True)
    assert (resumed["redone_steps"], resumed["down_seconds"] >= 0) == (2, True)


def test_an_error_that_ends_the_run_is_a_failed_end(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), _metrics(tmp_path) as metrics:
        metrics.begin("1 process")
        metrics.start(0)
        raise RuntimeError
    assert read_accounts(tmp_path).starts[0].end == "failed"
    assert read_accounts(tmp_path).unclean_ends == 1


@pytest.mark.parametrize("reason", [{"rank": 1}, {"load_only": True}])
def test_other_ranks_and_a_run_that_only_loads_write_no_ledger(reason: dict[str, Any], tmp_path: Path) -> None:
    with _metrics(tmp_path, **reason) as metrics:
        metrics.begin("2 processes")
        metrics.start(0)
        _train(metrics, 1, [1.0, 1.0])
        metrics.note(Finished(2))
    assert list(tmp_path.iterdir()) == []
    assert 0 < metrics.ledger.tags()["goodput(%)"] <= 100


def test_a_full_disk_is_one_warning_for_the_ledger_and_ends_nothing(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        fill(disk)
        metrics = _metrics(disk)
        with logged_warnings() as warnings:
            metrics.begin("1 process")
            metrics.start(0)
            _train(metrics, 1, [1.0] * 4)
            metrics.close()
    assert sum(LEDGER_FILE in warning for warning in warnings) == 1, warnings


def test_where_the_system_has_no_more_threads_there_is_no_heartbeat_which_is_one_warning() -> None:
    with logged_warnings() as warnings, no_threads():
        Heartbeat(list).close()
    assert warnings == ["No heartbeat is written: [Errno 11] can't start new thread. Training continues"]


def test_a_heartbeat_continues_after_an_error_which_is_one_warning() -> None:
    beats, enough = list[int](), threading.Event()

    def beat() -> None:
        beats.append(1)
        if len(beats) == 4:
            enough.set()
        raise OSError("no")

    with logged_warnings() as warnings:
        heart = Heartbeat(beat, seconds=0.001)
        assert enough.wait(30)
        heart.close()
        heart.close()
    assert warnings == ["A heartbeat failed: OSError: no. Training continues"]
