"""A job whose load_step is damaged ends, and its events have the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.jobs import run, start


@pytest.mark.slow  # Two jobs.
def test_a_damaged_load_step_ends_the_job_with_an_event(tmp_path: Path) -> None:
    dump = tmp_path / "outputs"
    options = ["--checkpoint.interval=2", "--training.steps=4"]
    run(dump, *options)
    (dump / "checkpoint" / "step-2" / "manifest.json").write_bytes(b"{")
    with start(dump, *options, "--checkpoint.load_step=2") as job:
        assert job.wait() == [1]
    assert "step-2 is damaged: manifest.json: it is not JSON" in job.log
    [failed] = job.events("load_failed")
    assert failed["step"] == 2
    assert failed["finding"].startswith("manifest.json: ")
