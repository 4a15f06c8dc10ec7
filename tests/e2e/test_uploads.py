"""Jobs whose checkpoints are uploaded: the end, the start after it, a lost disk, a folder of another run."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest

from tests.e2e.jobs import run, start
from tests.processes import children, command_line, send
from tests.uploading.runs import steps_in

EACH_STEP = "--checkpoint.interval=1"


@pytest.mark.slow
def test_a_start_of_a_run_that_has_ended_uploads_what_is_missing(tmp_path: Path) -> None:
    other = tmp_path / "other"
    run(tmp_path / "run", EACH_STEP, "--training.steps=2")
    job = run(tmp_path / "run", EACH_STEP, "--training.steps=2", f"--checkpoint.upload_folder={other}")
    assert "Training completed" in job.log
    assert steps_in(other) == [1, 2]
    assert {line["step"] for line in job.events("uploaded")} == {1, 2}


@pytest.mark.slow
def test_a_lost_disk_changes_nothing_of_a_run(tmp_path: Path) -> None:
    arguments = (EACH_STEP, f"--checkpoint.upload_folder={tmp_path / 'other'}")
    straight = run(tmp_path / "straight", EACH_STEP, "--training.steps=4")
    run(tmp_path / "run", *arguments, "--training.steps=4")
    shutil.rmtree(tmp_path / "run" / "checkpoint")
    for step in (3, 4):
        shutil.rmtree(tmp_path / "other" / f"step-{step}")
    job = run(tmp_path / "run", *arguments, "--training.steps=4")
    assert "Finished loading" in job.log
    assert job.losses() == straight.losses()


@pytest.mark.slow
def test_a_folder_of_another_run_is_one_sentence_at_the_end_and_no_success(tmp_path: Path) -> None:
    run(tmp_path / "first", EACH_STEP, "--training.steps=1")
    first = tmp_path / "first" / "checkpoint"
    run(tmp_path / "run", EACH_STEP, "--training.steps=1")
    arguments = (EACH_STEP, "--training.steps=3", f"--checkpoint.upload_folder={first}")
    with start(tmp_path / "run", *arguments) as job:
        assert job.wait() == [1], job.log
    assert steps_in(tmp_path / "run" / "checkpoint") == [1, 2, 3]
    assert steps_in(first) == [1]
    said = [line for line in job.log.splitlines() if "it has checkpoints of another run," in line]
    assert said
    assert "Traceback" not in job.log


@pytest.mark.slow
def test_a_signal_ends_the_run_with_its_code_though_the_uploader_does_not_answer(tmp_path: Path) -> None:
    keys = (EACH_STEP, "--training.steps=100000", "--checkpoint.preemption_grace_seconds=12")
    with start(tmp_path / "run", *keys, f"--checkpoint.upload_folder={tmp_path / 'other'}") as job:
        job.wait_until(lambda job: job.events("uploaded"))
        (uploader,) = [pid for pid in children(job.processes[0].pid) if "uploading.upload_process" in command_line(pid)]
        send(uploader, signal.SIGSTOP)
        committed = len(job.events("committed"))
        job.wait_until(lambda job: len(job.events("committed")) > committed + 1)
        send(job.processes[0].pid, signal.SIGTERM)
        assert job.wait() == [143], job.log
    assert job.events("committed")[-1]["step"] == max(job.losses())
    assert "Not yet uploaded to" in job.log
