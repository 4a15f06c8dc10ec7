"""A disk that is really full: training continues, and later saves succeed once there is room."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from tests.checkpoint.conftest import StartRun
from tests.checkpoint.small_run import job_config
from tests.disks import fill, make_read_only
from torchtitan_lite.checkpoint.resume.restore import refuse_early
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.errors import FolderUnusable
from torchtitan_lite.store import layout
from torchtitan_lite.store.holder import Holder


@pytest.mark.promise(
    "A full disk or another error of one rank fails the save on all ranks, with one error that names rank and cause; "
    "earlier checkpoints stay, and training continues.",
    section="failure",
)
def test_training_continues_on_a_full_disk_and_saves_when_there_is_room(
    start_run: StartRun, disk: Path, mode: str
) -> None:
    run = start_run(disk, interval=2, async_mode=mode, max_failed_saves=9, keep_latest_k=2)
    filler = fill(disk, leave_bytes=64 << 10)
    for _ in range(5):
        run.step()
    assert run.manager.latest_step() == -1
    assert run.events.steps("save_failed") == [2, 4]
    assert "No space left on device" in run.events.figures("save_failed")["reason"]
    assert run.names() == []
    filler.unlink()
    run.train(10)
    run.manager.close()  # The asynchronous modes purge in the background.
    assert run.committed() == [8, 10]
    again = start_run(disk, interval=2, async_mode=mode).resumed()
    assert again.losses == run.losses


def test_a_save_after_which_the_disk_fills_up_stays(start_run: StartRun, disk: Path) -> None:
    run = start_run(disk, interval=1, max_failed_saves=9)
    run.step()
    nbytes = sum(path.stat().st_size for path in (run.root / "step-1").iterdir())
    fill(disk, leave_bytes=2 * nbytes)
    for _ in range(3):
        run.step()
    assert run.committed()[0] == 1
    assert run.events.steps("save_failed")
    start_run(disk, load_only=True).resumed()


def stale_staging(disk: Path) -> Path:
    """Fill the disk with the staging folder of an interrupted save; return the folder."""
    staging = disk / "checkpoint" / "step-7.staging"
    staging.mkdir(parents=True)
    fill(disk).rename(staging / "__0_0.distcp")
    return staging


@pytest.mark.promise(
    "A start on a disk that is full of a killed save's leftovers removes them and continues.",
    section="failure",
)
def test_a_run_starts_on_a_disk_that_is_full_with_what_a_cut_save_left(start_run: StartRun, disk: Path) -> None:
    staging = stale_staging(disk)
    run = start_run(disk, interval=1)
    assert not run.manager.load()
    assert not staging.exists()
    run.train(2)
    assert run.committed() == [1, 2]


@pytest.mark.promise(
    "A start on a disk that is full of a killed save's leftovers removes them and continues.",
    section="failure",
)
def test_a_run_takes_over_from_one_that_was_killed_on_a_disk_that_is_full(start_run: StartRun, disk: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    holder = replace(Holder.this_process("before", 1.0), pid=ended.pid)
    (disk / "checkpoint").mkdir()
    lock = disk / "checkpoint" / layout.LOCK
    lock.write_bytes(holder.to_bytes(3, 2.0))
    staging = stale_staging(disk)
    run = start_run(disk, interval=1).loaded()
    mine = Holder.parse(lock.read_bytes())
    assert mine is not None and mine.pid == os.getpid() and not staging.exists()
    run.train(1)
    run.manager.close()
    assert run.names() == ["step-1"] and not lock.exists()


def test_a_disk_full_of_other_files_gives_one_sentence_and_does_not_change(start_run: StartRun, disk: Path) -> None:
    (disk / "checkpoint").mkdir()
    fill(disk)
    with pytest.raises(FolderUnusable, match=r"cannot be used for checkpoints: .*No space left on device"):
        start_run(disk).manager.load()
    assert not list((disk / "checkpoint").iterdir())


def test_a_folder_that_cannot_be_written_gives_one_sentence(start_run: StartRun, disk: Path, tmp_path: Path) -> None:
    make_read_only(disk)
    (tmp_path / "file").write_text("in its place")
    for folder, cause in ((disk, "Read-only file system"), (tmp_path / "file", "Not a directory")):
        with pytest.raises(FolderUnusable, match=cause) as error:
            start_run(folder).manager.load()
        assert str(folder / "checkpoint") in str(error.value) and "--job.dump_folder" in str(error.value)


def test_a_file_in_the_place_of_the_dump_folder_is_refused_before_a_model_is_built(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in its place")
    with pytest.raises(FolderUnusable, match="Not a directory"):
        refuse_early(job_config(tmp_path / "file"), Peers(timedelta(seconds=60)))
