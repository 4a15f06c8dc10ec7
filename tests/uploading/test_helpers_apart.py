"""Uploads and the other helpers of a run: what ends or stops one of them changes nothing for another."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from tests.checkpoint.companions import uploader_of, uploads_of
from tests.checkpoint.small_run import SmallRun
from tests.disks import injected
from tests.processes import command_line, own_children, wait_until
from tests.uploading.runs import run_of, steps_in
from torchtitan_lite.checkpoint.saving.savers import ProcessSaver
from torchtitan_lite.disk.durable import Durable
from torchtitan_lite.disk.helper import is_stopped
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.store.store import CheckpointStore

SECONDS = 60.0


@pytest.fixture
def before() -> Iterator[set[int]]:
    """The processes that this one has started before the test."""
    yield {*own_children(os.getpid())}


def started(before: set[int]) -> list[str]:
    """Return which helpers this process has started since."""
    lines = [command_line(pid) for pid in own_children(os.getpid()) if pid not in before]
    modules = ("disk.writer_process", "memory.images.replica_sender", "uploading.upload_process", "hangs.watcher")
    return [module for module in modules for line in lines if f"from torchtitan_lite.{module} import" in line]


@pytest.mark.parametrize(
    ("mode", "expected"), [("disabled", []), ("async", []), ("async_with_pinned_mem", ["disk.writer_process"])]
)
def test_no_helper_is_started_that_no_option_needs(
    tmp_path: Path, before: set[int], mode: str, expected: list[str]
) -> None:
    with SmallRun(tmp_path, interval=1, async_mode=mode).loaded() as run:
        run.train(3)
        run.manager.wait()
        assert started(before) == expected
    assert run.committed() == [1, 2, 3]
    assert started(before) == []


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_uploads_start_their_own_helper_only(tmp_path: Path, other: Path, before: set[int], mode: str) -> None:
    with run_of(tmp_path, other, async_mode=mode).loaded() as run:
        run.step()
        wait_until(lambda: started(before))
        assert started(before) == ["uploading.upload_process"]
    assert started(before) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["kill", "stop", "slow"])
def test_an_upload_continues_whatever_becomes_of_the_writer(tmp_path: Path, other: Path, kind: str) -> None:
    saver = ProcessSaver(Peers(timedelta(seconds=SECONDS)), SECONDS)
    ends = ",seconds=1000" if kind == "slow" else ""
    spec = f"slow@upload:step=1,seconds=2,process=uploader;{kind}@write:step=2,process=writer{ends}"
    with injected(spec), run_of(tmp_path / "run", other, seams={"saver": saver}).loaded() as run:
        run.step()
        uploader, writer = uploader_of(run.manager), saver.process.pid
        wait_until(lambda: uploader.state.uploading == 1)
        pid = uploader.pid
        run.step()
        run.events.wait_for("uploaded")
        if kind == "slow":
            assert saver.process.pid == writer and not run.events.steps("save_failed")
            os.kill(writer or 0, signal.SIGKILL)
        run.train(4)
        assert uploader.pid == pid
    assert run.events.steps("save_failed") == [2]
    assert steps_in(other) == [1, 3, 4]


@pytest.mark.parametrize("mode", ["disabled", "async", "async_with_pinned_mem"])
def test_saves_commit_and_a_run_leaves_in_time_though_the_uploader_is_stopped_during_a_save(
    tmp_path: Path, other: Path, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    pids: list[int] = []

    class Stopping(Durable):
        """Stops the uploader when the save of step 2 makes its folder."""

        def make_dir(self, path: Path) -> None:
            if "step-2" in path.name and not is_stopped(pids[0]):
                os.kill(pids[0], signal.SIGSTOP)
                wait_until(lambda: is_stopped(pids[0]))
            super().make_dir(path)

    store = CheckpointStore(tmp_path / "run" / "checkpoint", durable=Stopping())
    with run_of(tmp_path / "run", other, async_mode=mode, seams={"store": store}).loaded() as run:
        run.step()
        run.events.wait_for("uploaded")
        pids.append(uploader_of(run.manager).pid or 0)
        run.train(4)
        run.manager.wait()
        assert run.committed() == [1, 2, 3, 4]
        uploads_of(run.manager).leave(float)
    assert steps_in(other) == [1]
    assert f"Not yet uploaded to {other}: 3 checkpoints (" in caplog.text
