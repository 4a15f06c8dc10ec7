"""A job that lost its folder to another one does not touch the files of that one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.checkpoint.sharded_run import sharded_run
from tests.checkpoint.small_run import SmallRun
from tests.store import filled
from tests.store.filled import flip
from torchtitan_lite.errors import LeaseLost
from torchtitan_lite.store import layout
from torchtitan_lite.store.lease import FolderLease
from torchtitan_lite.store.store import CheckpointStore

THEIRS = "__0_9.distcp"
"""A file that no rank of this job writes."""


class OtherJob:
    """Takes over this job's folder, as after a lease time-out, and begins to save step 2."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._lease = FolderLease(root, run_id="other")  # Of the same process, so that it need not wait.

    def take_over(self) -> None:
        self._lease.take()
        self._before = {path.name for path in self._root.iterdir()}
        self._staging = filled.begun(CheckpointStore(self._root), 2)
        (self._staging / THEIRS).write_bytes(b"what the other job has staged")

    def release(self) -> None:
        self._lease.release()

    def assert_is_as_it_was(self) -> None:
        self._lease.check()
        assert [path.name for path in self._staging.iterdir()] == [THEIRS]
        assert (self._staging / THEIRS).read_bytes() == b"what the other job has staged"
        there = {path.name for path in self._root.iterdir()}
        assert there - self._before == {self._staging.name}
        assert {"step-1", layout.LOCK} <= there


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def started(folder: Path, mode: str, stack: ExitStack) -> tuple[SmallRun, OtherJob]:
    """Start a run that saves every step and has saved the first, and a job that has not taken its folder yet."""
    run = sharded_run(folder, async_mode=mode, interval=1, keep_latest_k=1)
    other = OtherJob(run.root)
    stack.callback(other.release)
    run.train(1, last=False)
    assert run.manager.latest_step() == 1
    return run, other


@pytest.mark.promise("A job that has lost its folder renames and removes nothing there.", section="writer")
def test_a_folder_that_is_lost_during_a_save_keeps_what_the_other_job_staged(
    tmp_path: Path, mode: str, stack: ExitStack
) -> None:
    run, other = started(tmp_path, mode, stack)
    run.saver.before_write = lambda path: other.take_over()
    with pytest.raises(LeaseLost), run.manager:
        run.train(4, last=False)
    other.assert_is_as_it_was()
    assert run.events.happened("purged") == []


@pytest.mark.promise("A job that has lost its folder renames and removes nothing there.", section="writer")
def test_a_folder_that_was_lost_before_a_save_keeps_what_the_other_job_staged(
    tmp_path: Path, mode: str, stack: ExitStack
) -> None:
    run, other = started(tmp_path, mode, stack)
    other.take_over()
    with pytest.raises(LeaseLost), run.manager:
        run.train(4, last=False)
    other.assert_is_as_it_was()
    assert run.events.happened("purged") == []


def test_a_folder_that_is_lost_during_a_load_keeps_the_damaged_step(tmp_path: Path, stack: ExitStack) -> None:
    run = sharded_run(tmp_path, interval=1)
    with run.manager:
        run.train(2, last=False)
    flip(run.root / "step-2" / "__0_0.distcp", 0)
    other = OtherJob(run.root)
    stack.callback(other.release)

    def take_over(event: str, step: int, **figures: object) -> None:
        if event == "fallback":
            other.take_over()

    later = sharded_run(tmp_path, interval=1, seams={"on_event": take_over})
    with pytest.raises(LeaseLost), later.manager:
        later.manager.load()
    assert (run.root / "step-2").is_dir()
    other.assert_is_as_it_was()
