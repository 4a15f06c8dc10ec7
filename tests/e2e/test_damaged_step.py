"""A job that is asked for a damaged step ends, and says why in its events."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.jobs import run, start


@pytest.mark.slow  # Two jobs.
def test_a_step_that_was_asked_for_and_is_damaged_is_an_event_of_the_job(tmp_path: Path) -> None:
    dump = tmp_path / "outputs"
    options = ["--checkpoint.interval=2", "--training.steps=4"]
    run(dump, *options)
    (dump / "checkpoint" / "step-2" / "manifest.json").write_bytes(b"{")
    with start(dump, *options, "--checkpoint.load_step=2") as job:
        assert job.wait() == [1]
    assert "step-2 is damaged: manifest.json: it is not JSON" in job.log
    [told] = job.events("load_failed")
    assert told["step"] == 2
    assert told["finding"].startswith("manifest.json: ")
