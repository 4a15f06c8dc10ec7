"""torchrun's report of a failed job has the error, on whichever rank it happened."""

from pathlib import Path

import pytest

from tests.e2e.jobs import start

FAILS = {"TORCHTITAN_LITE_FAULT": "EIO@step:rank=1,step=1"}


@pytest.mark.slow  # torchrun with two workers
def test_the_report_has_the_traceback_of_an_unexpected_error_on_rank_1(tmp_path: Path) -> None:
    shown = ["--local-ranks-filter=0"]
    with start(tmp_path / "run", "--training.steps=2", ranks=2, torchrun=shown, environment=FAILS, cold=True) as job:
        assert job.wait() == [1]
    report = job.log[job.log.index("Root Cause") :]
    assert "rank      : 1" in report and "Input/output error" in report and "Traceback" in report, job.log
