"""Jobs of the trainer in which a rank hangs: it is named in time, and the launcher starts the ranks again."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest

from tests.e2e.jobs import Job, run, start
from tests.processes import children, command_line, send
from tests.records import Record

BOUND_SECONDS = 3
TRAINS = (
    "--training.steps=100000",
    "--lr_scheduler.warmup_steps=2",
    "--checkpoint.interval=1000000",
    f"--comm.hang_seconds={BOUND_SECONDS}",
)
FAULTS = {"sleep": "slow@step:rank={},step={},seconds=1000", "lock": "lock@step:rank={},step={}"}


def wait_for_log(job: Job, text: str) -> float:
    """Return the time at which `text` was in the output."""
    job.wait_until(lambda job: text in job.log)
    return time.monotonic()


def hang(job: Job, kind: str, rank: int, step: int) -> float:
    """Return the time at which `rank` hung, in about `step`."""
    if kind in FAULTS:
        return wait_for_log(job, "The fault of TORCHTITAN_LITE_FAULT happens here")
    job.wait_for_step(step)
    time.sleep(random.uniform(0.0, 0.1))  # Waits for nothing: the moment in a step is what is drawn.
    send(job.workers()[rank], signal.SIGSTOP)
    return time.monotonic()


TENTH = [0, *(pytest.param(number, marks=pytest.mark.exhaustive) for number in range(1, 10))]


@pytest.mark.slow  # Each is a job of two ranks that hangs for three seconds.
@pytest.mark.parametrize("number", TENTH)
@pytest.mark.parametrize("kind", ["stop", "sleep", "lock"])
def test_the_rank_that_hangs_is_named_within_twice_the_bound(
    kind: str, number: int, tmp_path: Path, record: Record
) -> None:
    rank, step = number % 2, 3 + number
    environment = {"TORCHTITAN_LITE_FAULT": FAULTS.get(kind, "").format(rank, step)}
    with start(tmp_path / "run", *TRAINS, ranks=2, environment=environment) as job:
        hung = hang(job, kind, rank, step)
        named = wait_for_log(job, f"ERROR - Rank {rank} hangs in step") - hung
        assert job.wait() == [-signal.SIGKILL] * 2
    record(kind=kind, rank=rank, seconds=round(named, 2), bound=BOUND_SECONDS)
    assert named < 2 * BOUND_SECONDS
    assert f"ERROR - Rank {1 - rank} hangs" not in job.log
    (event,) = job.events("hung")
    assert event["rank"] == rank


@pytest.mark.slow  # torchrun, which starts two ranks twice.
def test_torchrun_starts_the_ranks_again_and_they_resume(tmp_path: Path) -> None:
    arguments = (
        "--training.steps=60",
        "--checkpoint.interval=5",
        "--checkpoint.async_mode=async",
        *TRAINS[1:2],
        TRAINS[3],
    )
    with start(tmp_path / "run", *arguments, ranks=2, torchrun=["--max-restarts=1"]) as job:
        job.wait_for_step(12)
        send(job.workers()[1], signal.SIGSTOP)
        assert job.wait() == [0]
    assert "ERROR - Rank 1 hangs in step" in job.log
    assert [event["event"] for event in job.events() if event["event"] in ("hung", "resumed", "finished")] == [
        "hung",
        "resumed",
        "finished",
    ]
    assert job.losses().keys() >= set(range(1, 61))


@pytest.mark.slow
def test_steps_and_saves_that_take_long_are_no_hangs(tmp_path: Path) -> None:
    """A step of 5 times the usual, a save that blocks for longer than the bound, and a copy of one rank alone."""
    faults = [
        "slow@step:rank=1,step=4,seconds=0.5",
        "slow@write:rank=1,step=5,seconds=3",
        "slow@stage:rank=1,step=10,seconds=3",
    ]
    environment = {"TORCHTITAN_LITE_FAULT": ";".join(faults)}
    arguments = ("--training.steps=12", "--lr_scheduler.warmup_steps=2", "--checkpoint.interval=5")
    watched = ("--checkpoint.async_mode=async", "--comm.hang_seconds=1")
    job = run(tmp_path / "run", *arguments, *watched, ranks=2, environment=environment)
    assert "hangs" not in job.log
    assert job.checkpoints == ["step-10", "step-12", "step-5"]
    assert job.log.count("happens here") == 3


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["0", "auto"])
def test_only_a_run_that_is_watched_has_watchers_and_it_trains_the_same(setting: str, tmp_path: Path) -> None:
    arguments = ("--training.steps=8", "--lr_scheduler.warmup_steps=2", "--checkpoint.interval=100")
    plain = run(tmp_path / "plain", *arguments, ranks=2)
    environment = {"TORCHTITAN_LITE_FAULT": "slow@step:rank=0,step=4,seconds=1"}
    with start(tmp_path / "run", *arguments, f"--comm.hang_seconds={setting}", ranks=2, environment=environment) as job:
        wait_for_log(job, "happens here")
        found = [child for pid in job.pids() for child in children(pid)]
        watchers = [pid for pid in found if "hangs.watcher" in command_line(pid)]
        assert job.wait() == [0, 0]
    assert len(watchers) == (2 if setting == "auto" else 0)
    assert job.losses() == plain.losses()
