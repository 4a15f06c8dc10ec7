"""Jobs on a disk that is full or read-only: training continues if possible, and otherwise one sentence says why not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.disks import fill, make_read_only
from tests.e2e.jobs import start

pytestmark = pytest.mark.slow  # a job or two in each

STEPS = ("--training.steps=4", "--checkpoint.interval=2", "--metrics.enable_tensorboard")


def test_a_job_starts_on_a_disk_that_an_interrupted_save_filled_and_trains_to_its_end(disk: Path) -> None:
    staging = disk / "checkpoint" / "step-9.staging"
    staging.mkdir(parents=True)
    fill(disk).rename(staging / "__0_0.distcp")
    with start(disk, *STEPS) as job:
        assert job.wait() == [1]
    assert "Training starts at step 1," in job.log and "step:  4  loss: " in job.log
    assert [event["step"] for event in job.events("save_failed")][:1] == [2]
    assert "SaveFailed: the save of step 4 failed: " in job.log and "Traceback" not in job.log, job.log
    assert job.checkpoints == []


def test_a_job_without_checkpoints_succeeds_on_a_disk_that_is_read_only_from_the_start(disk: Path) -> None:
    make_read_only(disk)
    with start(disk, *STEPS, "--checkpoint.no_enable_checkpoint", "--training.trace_samples") as job:
        assert job.wait() == [0], job.log
    assert "step:  4  loss: " in job.log and "Training completed" in job.log
    warnings = [line for line in job.log.splitlines() if "WARNING" in line and str(disk) in line]
    files = "config.json, configs.jsonl, ledger.jsonl, metrics, TensorBoard, events and samples"
    assert len(warnings) == 7, f"{files}: one each\n{job.log}"


def test_a_folder_that_cannot_be_written_is_one_sentence(disk: Path, tmp_path: Path) -> None:
    make_read_only(disk)
    (tmp_path / "file").write_text("in its place")
    for folder in (disk, tmp_path / "file"):
        with start(tmp_path / "run", *STEPS, f"--job.dump_folder={folder}") as job:
            assert job.wait() == [1]
        (error,) = [line for line in job.log.splitlines() if "FolderUnusable: " in line]
        assert str(folder) in error and "Traceback" not in job.log and "Training starts" not in job.log, job.log
