"""A run that is killed and restarted has the losses of a run that was never killed."""

import signal
from pathlib import Path

import pytest

from tests.e2e.jobs import Job, run, start
from tests.examples import mostly_exhaustive
from tests.processes import send

STEPS = 20
MODES = ("disabled", "async", "async_with_pinned_mem")
ARGUMENTS = (f"--training.steps={STEPS}", "--checkpoint.interval=3", "--lr_scheduler.warmup_steps=2")


@pytest.fixture(scope="module")
def straight_losses_of_one(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Losses of the run that is not killed. They do not depend on the async mode."""
    return run(tmp_path_factory.mktemp("straight") / "run", *ARGUMENTS).losses()


@pytest.fixture(scope="module")
def straight_losses_of_two(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    return run(tmp_path_factory.mktemp("straight") / "run", *ARGUMENTS, ranks=2).losses()


@pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=[pytest.mark.slow] if mode != "async_with_pinned_mem" else []) for mode in MODES]
)
def test_one_process_killed_twice_has_the_losses_of_the_straight_run(
    mode: str, tmp_path: Path, straight_losses_of_one: dict[int, float]
) -> None:
    assert _killed_twice(tmp_path / "run", mode, ranks=1) == straight_losses_of_one


@pytest.mark.slow
@pytest.mark.parametrize("mode", mostly_exhaustive(MODES, kept=("async_with_pinned_mem",)))
def test_two_processes_killed_twice_have_the_losses_of_the_straight_run(
    mode: str, tmp_path: Path, straight_losses_of_two: dict[int, float]
) -> None:
    assert _killed_twice(tmp_path / "run", mode, ranks=2) == straight_losses_of_two


@pytest.mark.slow
def test_with_max_restarts_a_killed_worker_restarts_all_of_the_job(
    tmp_path: Path, straight_losses_of_two: dict[int, float]
) -> None:
    with start(tmp_path / "run", *ARGUMENTS, ranks=2, torchrun=["--max-restarts=1"]) as job:
        job.wait_until(lambda job: 7 in job.losses())
        send(job.workers()[1], signal.SIGKILL)
        assert job.wait() == [0], job.log
    assert job.losses() == straight_losses_of_two
    assert len(job.events("resumed")) == 1


def _killed_twice(dump_folder: Path, mode: str, ranks: int) -> dict[int, float]:
    arguments = (*ARGUMENTS, f"--checkpoint.async_mode={mode}")
    for kill_after in (7, 13):
        with start(dump_folder, *arguments, ranks=ranks) as job:
            job.wait_until(lambda job, step=kill_after: step in job.losses())
            job.kill()
            assert STEPS not in job.losses(), "the kill came too late for the test to show anything"
    job = run(dump_folder, *arguments, ranks=ranks)
    resumed = [event["step"] for event in job.events("resumed")]
    assert len(resumed) == 2 and 3 <= resumed[0] <= resumed[1], job.log
    assert _is_clean(job)
    return job.losses()


def _is_clean(job: Job) -> bool:
    return all(name.removeprefix("step-").isdigit() for name in job.checkpoints)
