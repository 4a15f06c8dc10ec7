"""Whatever the system refuses, on one rank or all, in each mode: the save fails on every rank, training continues."""

from __future__ import annotations

import errno
import gc
import os
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.checkpoint.conftest import StartRun
from tests.checkpoint.sharded_run import (
    assert_one_failure,
    run_with,
    sharded_run,
    train_over_a_failure,
)
from tests.checkpoint.small_run import Tiny
from tests.disks import FailingDisk, injected
from tests.ranks import on_two_ranks
from tests.store.filled import without_token
from torchtitan_lite import faults
from torchtitan_lite.errors import SaveFailed
from torchtitan_lite.store import layout
from torchtitan_lite.store.store import CheckpointStore

ERRORS = ("ENOSPC", "EIO", "EACCES", "EROFS", "EDQUOT")
ON_ONE_RANK = [
    *((f"{error}@write:rank=1,step=2", 1) for error in ERRORS),
    ("EACCES@open:rank=0,step=2", 0),
    ("EIO@fsync:rank=1,step=2", 1),
    ("tear@write:rank=0,step=2", 0),
    ("ENOSPC@metadata:step=2", 0),
    ("EDQUOT@manifest:step=2", 0),
    ("EIO@seal:step=2", 0),
    ("EROFS@commit:step=2", 0),
]
WHERE_MODES_DIFFER = [ON_ONE_RANK[0], ("EIO@fsync:rank=1,step=2", 1), ("ENOSPC@metadata:step=2", 0)]
"""The caller, a thread or a process writes and syncs the bytes; the rest is the same code in each mode."""
ON_ALL_RANKS = ["ENOSPC@write:step=2", "EIO@fsync:step=2", "EROFS@open:step=2"]


@pytest.mark.promise(
    "A full disk or another error of one rank fails the save on all ranks, with one error that names rank and cause; "
    "earlier checkpoints stay, and training continues.",
    section="failure",
)
@on_two_ranks
def test_what_one_rank_is_refused_fails_the_save_of_both(rank: int, tmp_path: Path, mode: str) -> None:
    for case, (fault, where) in enumerate(ON_ONE_RANK if mode == "disabled" else WHERE_MODES_DIFFER):
        run = run_with(fault, rank, tmp_path / str(case), mode)
        train_over_a_failure(run)
        code = "EIO" if fault.startswith("tear") else fault.partition("@")[0]
        number = getattr(errno, code)
        assert_one_failure(run, f"rank {where}: ", f"[Errno {number}] {os.strerror(number)}")
    faults.install("", rank=rank)


@pytest.mark.slow
@on_two_ranks
def test_what_all_ranks_are_refused_is_one_failure(rank: int, tmp_path: Path, mode: str) -> None:
    for number, fault in enumerate(ON_ALL_RANKS):
        run = run_with(fault, rank, tmp_path / str(number), mode)
        train_over_a_failure(run)
        assert_one_failure(run, os.strerror(getattr(errno, fault.partition("@")[0])))
    faults.install("", rank=rank)


@pytest.mark.slow
@on_two_ranks
def test_a_short_write_is_continued(rank: int, tmp_path: Path, mode: str) -> None:
    run = run_with("short@write:rank=1,step=2", rank, tmp_path, mode)
    with run.manager:
        run.train(1, last=False)
        run.train(2, last=False)
        run.saver.wait()
        run.train(6, last=False)
    faults.install("", rank=rank)
    assert run.names() == ["step-1", "step-2", "step-5"]
    with (again := sharded_run(tmp_path, load_step=2)).manager:
        assert again.manager.load()


@pytest.mark.promise(
    "A writer process that is killed or stopped fails one save, is named in the error, and is started again.",
    section="failure",
)
@on_two_ranks
def test_a_writer_process_that_is_killed_or_stopped_is_named_and_started_again(rank: int, tmp_path: Path) -> None:
    for kind, how in (("kill", "ended"), ("stop", "was stopped")):
        fault = f"{kind}@write:rank=1,step=2,process=writer"
        run = run_with(fault, rank, tmp_path / kind, "async_with_pinned_mem")
        with run.manager:
            run.train(2, last=False)
            run.saver.wait()
            faults.install("", rank=rank)  # or the next writer would start with it
            run.train(6, last=False)
        assert_one_failure(run, "rank 1: WriterProcessDied: writer process", how)


@pytest.mark.promise(
    "Only failures in a row end the run: `checkpoint.max_failed_saves` (3), or two of the last save.",
    section="failure",
)
def test_saves_that_fail_in_a_row_end_the_run_with_what_failed(start_run: StartRun, mode: str) -> None:
    run = start_run(interval=1, async_mode=mode, max_failed_saves=2)
    run.step()
    assert run.manager.latest_step() == 1
    with injected("EIO@manifest:times=always"), pytest.raises(SaveFailed, match="Input/output error"):
        for _ in range(6):
            run.step()
    assert run.committed() == [1]


@pytest.mark.promise("A save without enough space does not begin.", section="failure")
def test_a_save_for_which_there_is_no_room_is_not_begun(start_run: StartRun, tmp_path: Path) -> None:
    free = [1 << 40]
    store = CheckpointStore(tmp_path / "checkpoint", free_bytes=lambda path: free[0])
    run = start_run(interval=1, seams={"store": store})
    run.step()
    free[0] = 1000
    run.step()
    run.step()
    assert run.events.steps("save_failed") == [2, 3][: len(run.events.steps("save_failed"))]
    assert "room for" in run.events.figures("save_failed")["reason"]
    assert run.names() == ["step-1"]
    free[0] = 1 << 40
    run.step()
    assert run.committed() == [1, 4]


@pytest.mark.parametrize(("after", "name"), [(1, ".metadata"), (2, ".metadata"), (3, "manifest.json")])
def test_a_sync_of_the_coordinator_that_fails_names_the_file(
    start_run: StartRun, tmp_path: Path, after: int, name: str
) -> None:
    disk = FailingDisk("fsync_file", code=errno.EIO, after=after)
    run = start_run(interval=1, seams={"store": CheckpointStore(tmp_path / "checkpoint", durable=disk)})
    run.step()
    assert run.manager.latest_step() == -1
    reason = run.events.figures("save_failed")["reason"]
    assert f"Input/output error: '{tmp_path}/checkpoint/step-1.staging/{name}'" in without_token(reason)


def test_where_the_system_has_no_more_threads_saves_are_made_by_the_caller(
    start_run: StartRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    run = start_run(interval=1, async_mode="async", keep_latest_k=2).loaded()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    run.train(4, last=False)
    assert run.names() == ["step-3", "step-4"]


class Average:
    """A state whose `state_dict` returns a new copy each time, and `other`."""

    def __init__(self) -> None:
        self.other: Any = 1
        self.copies: list[weakref.ref[Tensor]] = []

    def state_dict(self) -> dict[str, Any]:
        copy = torch.zeros(100)
        self.copies.append(weakref.ref(copy))
        return {"average": copy, "other": self.other}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load nothing: no test resumes it."""

    def alive(self) -> int:
        return sum(copy() is not None for copy in self.copies)


def test_a_failed_save_keeps_nothing_of_the_state(start_run: StartRun, mode: str) -> None:
    average = Average()
    run = start_run(interval=1, async_mode=mode, max_failed_saves=9, states={"average": average}).loaded()
    run.step()
    run.manager.wait()
    average.other = nn.Linear, 2  # No checkpoint has classes.
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            run.step()
            run.manager.wait()
            if mode != "disabled":
                gc.collect()  # The thread may end after the collection that follows a failure.
            assert average.alive() == 0
    finally:
        gc.enable()
    assert run.events.steps("save_failed") == [2, 3, 4]


def test_the_error_that_ends_a_run_shows_where_its_save_failed(start_run: StartRun, tmp_path: Path) -> None:
    seams = {"store": CheckpointStore(tmp_path / "checkpoint", durable=FailingDisk("rename"))}
    run = start_run(interval=1, max_failed_saves=1, seams=seams)
    with pytest.raises(SaveFailed) as caught:
        run.train(2, last=False)
    assert caught.value.__cause__ is not None
    shown = str(caught.value.__cause__)
    assert "Traceback" in shown and "RanksFailed" in shown and "No space left on device" in shown
    causes = [caught.value, caught.value.__cause__, caught.value.__cause__.__cause__]
    assert causes[-1] is None and causes[1].__traceback__ is None


class CountingCasts(FailingDisk):
    """Fails the first commit, and counts the cast weights that are in memory when the folder of each save is made."""

    def __init__(self) -> None:
        super().__init__("rename", times=1)
        self.casts: list[int] = []

    def make_dir(self, path: Path) -> None:
        if layout.parse_staging(path.name) is not None:
            alive = [each for each in gc.get_objects() if type(each) is Tensor and each.dtype == torch.bfloat16]
            self.casts.append(sum(each.shape == Tiny().first.weight.shape for each in alive))
        super().make_dir(path)


def test_the_second_try_of_an_export_holds_no_cast_of_the_first(start_run: StartRun, tmp_path: Path) -> None:
    disk = CountingCasts()
    store = CheckpointStore(tmp_path / "checkpoint", durable=disk)
    keys = {"model_weights_only": True, "export_dtype": "bfloat16"}
    start_run(interval=9, seams={"store": store}, **keys).finished(1)
    assert len(disk.casts) == 2 and len({*disk.casts}) == 1
