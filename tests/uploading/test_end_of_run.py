"""The end of a run with uploads: it replaces a dead uploader, waits for nothing in vain, and says what is missing."""

from __future__ import annotations

import errno
import math
import os
import shlex
import signal
from pathlib import Path

import pytest

from tests.checkpoint.companions import uploader_of, uploads_of
from tests.checkpoint.small_run import SmallRun
from tests.disks import injected
from tests.uploading.runs import run_of, steps_in
from torchtitan_lite.disk import helper
from torchtitan_lite.errors import FolderUnusable
from torchtitan_lite.events import ignore
from torchtitan_lite.uploading import upload_process
from torchtitan_lite.uploading.upload_process import UploadProcess
from torchtitan_lite.uploading.uploader import UploadJob

NO_FOLDER = "/proc/no/folder"
"""Where no process, of root either, can make a folder."""


def killed(run: SmallRun) -> None:
    """Kill the uploader, as for memory, and return once the trainer knows."""
    process = uploader_of(run.manager)
    assert process._process is not None and process._listener is not None
    os.kill(process._process.pid, signal.SIGKILL)
    process._listener.join()


@pytest.mark.slow
@pytest.mark.parametrize("is_idle", [True, False], ids=["idle", "busy"])
def test_an_uploader_that_was_killed_is_replaced_and_all_is_there(tmp_path: Path, other: Path, is_idle: bool) -> None:
    slow = "" if is_idle else "slow@upload:seconds=60"
    with injected(slow), run_of(tmp_path / "run", other).loaded() as run:
        run.step()
        if is_idle:
            run.events.wait_for("uploaded")
        killed(run)
        run.train(4)
        with injected(""):
            run.manager.close()
    assert steps_in(other) == [1, 2, 3, 4]


def test_an_uploader_that_could_not_be_started_again_at_once_is_started_later(
    tmp_path: Path, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = SmallRun(tmp_path / "run", interval=1).loaded().finished(1)
    process = UploadProcess(UploadJob(str(run.root), str(other), "run"), ignore)
    process.start()
    assert process.pid is not None and process._listener is not None
    os.kill(process.pid, signal.SIGKILL)
    process._listener.join()

    def no_process(*call: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(upload_process, "_RESTART_SECONDS", 0.0)
    with monkeypatch.context() as full:
        full.setattr(helper, "_spawn", no_process)
        process.look()
    assert process.pid is None
    process.look()
    assert process.pid is not None
    assert process.wait(lambda: math.inf, 600.0)
    process.close()
    assert steps_in(other) == [1]


@pytest.mark.slow
def test_an_uploader_that_dies_each_time_is_said_with_all_that_is_missing(
    tmp_path: Path, other: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with injected("kill@upload:times=always"), run_of(tmp_path / "run", other).loaded() as run:
        run.train(3)
    assert f"Not yet uploaded to {other}: 3 checkpoints (" in caplog.text
    assert "the process that uploads ended each time" in caplog.text


@pytest.mark.slow
def test_what_was_saved_during_an_upload_counts_as_missing(
    tmp_path: Path, other: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with run_of(tmp_path / "run", other).loaded() as run:
        run.train(2)
    with injected("slow@upload:seconds=60"), run_of(tmp_path / "run", other).loaded() as run:
        run.step()
        run.manager.wait()
        while uploader_of(run.manager).state.uploading is None:
            pass
        run.train(6)
        uploads_of(run.manager).leave(lambda: 0.0)
    assert f"Not yet uploaded to {other}: 4 checkpoints (" in caplog.text


@pytest.mark.slow
def test_a_step_that_is_damaged_counts_as_missing(
    tmp_path: Path, other: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = SmallRun(tmp_path / "run", interval=1).loaded().finished(2)
    (run.root / "step-1" / "__0_0.distcp").unlink()
    run_of(tmp_path / "run", other).loaded().finished(3)
    assert f"Not yet uploaded to {other}: 1 checkpoint (" in caplog.text


def test_a_folder_that_can_never_be_written_is_tried_once_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    looks = iter([math.inf] * 40)
    with run_of(tmp_path / "run", NO_FOLDER).loaded() as run:
        run.train(2)
        uploads_of(run.manager).leave(lambda: next(looks, 0.0))
    assert next(looks, None) is not None
    assert f"Not yet uploaded to {NO_FOLDER}: 2 checkpoints (" in caplog.text
    assert "No such file or directory" in caplog.text


def test_what_is_wrong_with_that_folder_names_no_key_of_another_one(
    tmp_path: Path, other: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with run_of(tmp_path / "run", NO_FOLDER).loaded() as run:
        run.step()
        run.events.wait_for("upload_failed")
    (said,) = [line for line in capfd.readouterr().err.splitlines() if "Could not upload" in line]
    finding = "[Errno 2] No such file or directory: '/proc/no'"
    assert said.endswith(f"Could not upload to {NO_FOLDER}: {finding}. Trying again")
    assert run.events.figures("upload_failed")["reason"] == finding
    other.write_text("no folder")
    with pytest.raises(FolderUnusable, match=r"or set another --checkpoint\.upload_folder\.$"):
        run_of(tmp_path / "empty", other).manager.load()
    with run_of(tmp_path / "run", other).loaded() as run:
        assert run.train_state.step == 1
    assert "set another --checkpoint.upload_folder); continuing with step 1" in caplog.text


def test_the_command_that_uploads_what_is_missing_has_quoted_folders(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    there = tmp_path / "other place"
    SmallRun(tmp_path / "my run", interval=1).loaded().finished(1)
    with run_of(tmp_path / "my run", there) as run:
        uploads_of(run.manager)._report_missing(set(), "")
        _, _, command = caplog.messages[-1].partition("run: ")
        assert shlex.split(command) == ["torchtitan-lite", "upload", str(run.root), str(there)]
