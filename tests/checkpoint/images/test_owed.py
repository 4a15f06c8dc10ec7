"""What a start that resumes from memory owes the disk: its intervals count the training that the disk lacks."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.images.image_runs import RUNS, images_of, start, step, tier_on
from tests.checkpoint.sharded_run import same_everywhere
from tests.checkpoint.small_run import SmallRun
from tests.clock import Clock
from tests.ranks import on_two_ranks
from torchtitan_lite import faults
from torchtitan_lite.store.manifest import Manifest
from torchtitan_lite.store.manifest_fields import TRAINED_SECONDS

STEP_SECONDS = 20.0
STARTS = 20


@pytest.fixture
def job_folder(tmp_path: Path, memory_tier: Path) -> Path:
    """A folder for a `Job`; the memory tier is on."""
    return tmp_path


class Job:
    """Starts of one run, on one fake clock. Each ends as by a kill: nothing is saved for its end."""

    def __init__(self, folder: Path, **checkpoint: Any) -> None:
        self.folder, self.clock = folder, Clock()
        self.options: dict[str, Any] = {
            "async_mode": "async",
            "memory_interval": 1,
            "max_failed_saves": 1000,
        } | checkpoint
        self.trained = {0: 0.0}
        """The seconds of training up to each step."""
        self.saved = 0
        """The latest step on disk."""

    def start(self, *, resets: bool = True) -> SmallRun:
        """Return a start that has loaded, an hour later."""
        self.clock.seconds += 3600
        self.run = SmallRun(self.folder, seams={"clock": self.clock}, **self.options)
        RUNS.append(self.run)
        self.run.manager.load()
        if resets:
            self.clock.seconds += 500
            self.run.manager.reset()
        return self.run

    def step(self) -> int:
        """Take a step of `STEP_SECONDS`, wait until it is an image and its save is over; return its number."""
        step = self.run.train_state.step + 1
        self.clock.seconds += STEP_SECONDS
        self.run.step()
        self.run.manager.maybe_wait_for_staging()
        images_of(self.run).stager.finish_preparation()
        assert images_of(self.run).marker.wait(60)
        self.run.manager.wait()
        self.trained[step] = self.trained[step - 1] + STEP_SECONDS
        self.saved = max(self.run.committed(), default=0)
        return step

    def kill(self) -> None:
        """End the start: what the keeper has and the disk stay."""
        self.run.manager.close()
        RUNS.remove(self.run)

    @property
    def behind(self) -> tuple[int, float]:
        """The training that the disk lacks, in steps and in seconds."""
        step = self.run.train_state.step
        return step - self.saved, self.trained[step] - self.trained[self.saved]


@pytest.mark.slow
@pytest.mark.parametrize(
    "interval",
    [
        {"interval_type": "seconds", "interval": 100},
        pytest.param({"interval_type": "none", "or_every_seconds": 100}, marks=pytest.mark.slow),
        pytest.param({"interval": 1000, "at_steps": (2,), "or_every_seconds": 100}, marks=pytest.mark.slow),
        {"interval_type": "auto", "mtbf_hours": 1000},
    ],
    ids=["seconds", "or_every_seconds", "steps or seconds", "auto"],
)
@pytest.mark.parametrize("resets", [True, pytest.param(False, marks=pytest.mark.exhaustive)], ids=["reset", "own loop"])
def test_kills_more_often_than_the_seconds_leave_the_disk_at_most_two_intervals_behind(
    job_folder: Path, interval: dict[str, Any], resets: bool
) -> None:
    job = Job(job_folder, **interval)
    seconds = 60.0 if interval.get("interval_type") == "auto" else 100.0  # Of the first interval of a start.
    for number in range(STARTS):
        run = job.start(resets=resets)
        assert run.train_state.step == max(job.trained), f"start {number} resumes from the last image"
        job.step()
        for _ in range(int(0.6 * seconds / STEP_SECONDS)):
            job.step()
            assert job.behind[1] <= 2 * seconds, f"start {number}: step {run.train_state.step}, saved {job.saved}"
        job.kill()


@pytest.mark.slow
def test_kills_that_cut_each_save_leave_the_disk_at_most_two_intervals_of_steps_behind(job_folder: Path) -> None:
    job = Job(job_folder, interval=10)
    for number in range(STARTS):
        run = job.start()
        first = job.step()
        for at in range(first + 1, first + 7):
            if at % 10 == 0:
                faults.install(f"EIO@metadata:step={at}", rank=0)
            job.step()
            assert job.behind[0] <= 20, f"start {number}: step {run.train_state.step}, saved {job.saved}"
        faults.install("", rank=0)
        job.kill()
    assert job.saved > 100


def test_what_is_overdue_is_saved_right_after_the_first_step_in_the_background(job_folder: Path) -> None:
    job = Job(job_folder, interval=6, at_steps=(7,))
    job.start()
    faults.install("EIO@metadata:times=always", rank=0)
    for _ in range(8):
        job.step()
    faults.install("", rank=0)
    job.kill()
    run = job.start()
    assert run.events.figures("loaded")["origin"] == "memory"
    assert [job.step() for _ in range(4)] == [9, 10, 11, 12]
    assert run.events.steps("committed") == [9, 12], "step 6 is overdue; from then on multiples count"
    assert run.events.figures("save_started")["at_risk_steps"] == 3


def test_a_step_of_at_steps_that_was_missed_is_not_made_up_for(job_folder: Path) -> None:
    job = Job(job_folder, interval_type="none", at_steps=(3,))
    job.start()
    faults.install("EIO@metadata:times=always", rank=0)
    for _ in range(4):
        job.step()
    faults.install("", rank=0)
    job.kill()
    run = job.start()
    job.step()
    assert not run.events.steps("save_started")


def test_a_start_from_disk_owes_nothing(job_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = Job(job_folder, interval_type="seconds", interval=100)
    job.options |= {"memory_interval": 0}
    job.start()
    for _ in range(6):
        job.step()
    assert job.saved == 6
    job.kill()
    run = job.start()
    figures = run.events.figures("loaded")
    assert (figures["at_risk_steps"], figures["at_risk_seconds"]) == (0, 0.0)
    for _ in range(4):
        job.step()
    assert job.saved == 6, "neither the hour in the queue nor the load counts"
    assert not [line for line in caplog.records if line.levelno >= logging.WARNING]


def test_what_the_disk_lacks_is_in_the_events_and_the_log(job_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    job = Job(job_folder, interval=4)
    run = job.start()
    for _ in range(6):
        job.step()
    assert job.saved == 4
    figures = run.events.figures("image_ready")
    assert (figures["at_risk_steps"], figures["at_risk_seconds"]) == (2, 2 * STEP_SECONDS)
    assert Manifest.of_folder(run.root / "step-4").extra[TRAINED_SECONDS] == 4 * STEP_SECONDS  # type: ignore[union-attr]
    job.kill()
    run = job.start()
    figures = run.events.figures("loaded")
    assert (figures["at_risk_steps"], figures["at_risk_seconds"]) == (2, 2 * STEP_SECONDS)
    assert "the disk lacks 2 steps (40.0 s of training)" in caplog.text
    job.step()
    assert run.events.figures("image_ready")["at_risk_seconds"] == 3 * STEP_SECONDS
    job.step()
    figures = run.events.figures("save_started")
    assert (figures["at_risk_steps"], figures["at_risk_seconds"]) == (4, 4 * STEP_SECONDS)
    assert not [line for line in caplog.records if line.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("steps", "interval", "warns"),
    [
        (9, {"interval": 4}, True),
        (8, {"interval": 4}, False),
        (6, {"interval": 1000, "or_every_seconds": 50}, True),
        (4, {"interval": 1000, "or_every_seconds": 50}, False),
        (9, {"interval_type": "auto", "max_lost_seconds": 10}, False),
    ],
)
def test_one_warning_says_that_the_disk_is_more_than_two_intervals_behind(
    job_folder: Path, caplog: pytest.LogCaptureFixture, steps: int, interval: dict[str, Any], warns: bool
) -> None:
    job = Job(job_folder, **interval)
    job.start()
    faults.install("EIO@metadata:times=always", rank=0)
    for _ in range(steps):
        job.step()
    faults.install("", rank=0)
    job.kill()
    caplog.clear()
    job.start()
    job.step()
    assert job.saved == steps + 1
    job.step()
    warned = [line.getMessage() for line in caplog.records if line.levelno >= logging.WARNING]
    assert len(warned) == warns, warned
    if warns:
        assert f"The disk is {steps} steps ({20 * steps:.1f} s of training) behind step {steps}" in warned[0]


@pytest.mark.slow
@on_two_ranks
def test_ranks_with_other_clocks_save_what_rank_0_finds_overdue_after_the_same_first_step(
    rank: int, tmp_path: Path
) -> None:
    with tier_on(tmp_path):
        clock = Clock()
        options: dict[str, Any] = {"interval_type": "seconds", "interval": 100, "seams": {"clock": clock}}
        for started in (1, 2, 3):
            run = start(tmp_path, 0, **options)
            for _ in range(4):
                clock.seconds += (14.0, 3.0)[rank]
                step(run)
            assert run.train_state.step == 4 * started, "each resumes from the last image"
            assert same_everywhere(run.events.steps("save_started"))
            assert run.events.steps("save_started") == ([9] if started == 3 else []), "112 s of rank 0, 24 of rank 1"
            RUNS.remove(run)
            run.manager.close()
            assert same_everywhere(0)
