"""A disk that is full or read-only is one warning for each file of a run, and never ends the run."""

from __future__ import annotations

import json
import threading
from contextlib import closing
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.disks import fill, make_read_only
from tests.events import an_event
from tests.logged import logged_warnings
from torchtitan_lite.config.job_config import Metrics
from torchtitan_lite.event_lines import Recorded
from torchtitan_lite.json_lines import JsonLines
from torchtitan_lite.metrics.logger import METRICS_FILE, MetricsLogger

TENSORBOARD = Metrics(enable_tensorboard=True)
LOSS = "loss_metrics/global_avg_loss"


def log_steps(metrics: MetricsLogger, events: JsonLines, steps: range) -> None:
    for step in steps:
        metrics.log(step, {LOSS: float(step)})
        events.append(Recorded(0.0, an_event("committed", step)).to_record())


@pytest.mark.parametrize("refuse", [fill, make_read_only])
def test_each_file_is_one_warning_on_a_disk_that_refuses_from_the_start(refuse: object, disk: Path) -> None:
    assert callable(refuse)
    refuse(disk)
    before = threading.active_count()
    with logged_warnings() as warnings, closing(MetricsLogger(disk, TENSORBOARD, rank=0)) as metrics:
        events = JsonLines(disk / "events.jsonl")
        metrics.start(0)
        log_steps(metrics, events, range(1, 30))
        events.close()
        assert threading.active_count() == before
    assert len(warnings) == 3, warnings
    assert all(any(name in line for line in warnings) for name in ("TensorBoard", METRICS_FILE, "events.jsonl"))
    assert all(line.endswith("Training continues") for line in warnings)


def test_writing_continues_when_a_full_disk_has_space_again(disk: Path) -> None:
    metrics, events = MetricsLogger(disk, TENSORBOARD, rank=0), JsonLines(disk / "events.jsonl")
    metrics.start(0)
    with logged_warnings() as warnings:
        log_steps(metrics, events, range(1, 3))
        filler = fill(disk)
        log_steps(metrics, events, range(3, 300))
        filler.unlink()
        log_steps(metrics, events, range(300, 303))
        metrics.close()
    assert len(warnings) == 6, warnings
    steps = [json.loads(line)["step"] for line in (disk / METRICS_FILE).read_text().splitlines() if line.endswith("}")]
    assert {1, 2, 300, 301, 302} <= {*steps} and 299 not in steps
    scalars = EventAccumulator(str(disk / "tb"))
    scalars.Reload()
    shown = [event.step for event in scalars.Scalars(LOSS)]
    assert {1, 2, 300, 301, 302} <= {*shown} and 299 not in shown


def test_a_resume_on_a_full_disk_drops_the_lines_after_the_loaded_step(disk: Path) -> None:
    lines = [json.dumps({"step": step}) + "\n" for step in range(1, 6)]
    (disk / METRICS_FILE).write_text("".join(lines))
    fill(disk)
    with logged_warnings() as warnings, closing(MetricsLogger(disk, Metrics(), rank=0)) as metrics:
        metrics.start(3)
    assert (disk / METRICS_FILE).read_text() == "".join(lines[:3])
    assert warnings == []


def test_lines_that_cannot_be_dropped_are_a_warning(disk: Path) -> None:
    (disk / METRICS_FILE).write_text('{"step": 1}\n{"step": 2}\n')
    make_read_only(disk)
    for loaded_step in (0, 1):
        with logged_warnings() as warnings, closing(MetricsLogger(disk, Metrics(), rank=0)) as metrics:
            metrics.start(loaded_step)
        (warning,) = warnings
        assert f"{disk / METRICS_FILE} still has the lines of an earlier run" in warning


def test_an_event_file_that_could_not_be_started_is_removed(disk: Path) -> None:
    fill(disk)
    with closing(MetricsLogger(disk, TENSORBOARD, rank=0)) as metrics:
        metrics.start(0)
        metrics.log(1, {LOSS: 1.0})
    assert not list(disk.glob("tb/*"))
