"""A job chooses its interval, and knows after a restart that the start before it was killed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.e2e.jobs import Job, run, start

# Two seconds until the first save.
AUTO = ("--checkpoint.interval_type=auto", "--checkpoint.max_lost_seconds=4", "--checkpoint.async_mode=async")


def expected_hours(job: Job) -> str:
    """Return the hours between failures that the job has logged."""
    found = re.findall(r"a failure is expected every ([\d.]+) h", job.log)
    return found[0] if found else ""


@pytest.mark.slow  # the first save comes after two seconds, in both starts
def test_a_job_that_was_killed_expects_to_fail_more_often(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with start(folder, *AUTO, "--training.steps=100000", ranks=2) as job:
        job.wait_until(expected_hours)
        assert expected_hours(job) == "166.9"
        assert "Saving every " in job.log
        step = job.events("committed")[-1]["step"]
        job.kill()
    with start(folder, *AUTO, "--training.steps=100000", ranks=2) as again:
        again.wait_until(expected_hours)
        assert expected_hours(again) == "55.6", "half a failure in 167 hours, and one"
    assert again.events("resumed")[0]["step"] >= step


@pytest.mark.slow  # a complete job
def test_a_job_saves_at_the_steps_that_its_command_line_lists(tmp_path: Path) -> None:
    job = run(tmp_path / "run", "--checkpoint.interval_type=none", "--checkpoint.at_steps=2,5", "--training.steps=6")
    assert job.checkpoints == ["step-2", "step-5", "step-6"]
