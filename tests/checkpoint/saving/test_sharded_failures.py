"""Two ranks, one of which fails: both notice in the same step, nothing is lost, training continues."""

import errno
import math
import os
import threading
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.sharded_run import (
    assert_one_failure,
    at_steps,
    run_with,
    same_everywhere,
    sharded_run,
    train_over_a_failure,
)
from tests.checkpoint.small_run import SmallRun, same
from tests.disks import FailingDisk
from tests.ranks import on_two_ranks
from torchtitan_lite import faults
from torchtitan_lite.checkpoint.saving.savers import ThreadSaver
from torchtitan_lite.disk.durable import Durable
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.errors import ConfigError, SaveFailed
from torchtitan_lite.store import layout
from torchtitan_lite.store.store import CheckpointStore


class Unwritable:
    """A state that cannot become bytes while `fails` is true."""

    fails = False

    def state_dict(self) -> dict[str, Any]:
        return {"value": (lambda: None) if self.fails else 5}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


@on_two_ranks
def test_a_commit_that_fails_fails_the_save_on_both(rank: int, tmp_path: Path, mode: str) -> None:
    disk = FailingDisk("rename", code=errno.EIO, name="step-2.staging")
    store = CheckpointStore(tmp_path / "checkpoint", durable=disk)
    run = sharded_run(tmp_path, async_mode=mode, seams={"save_policy": at_steps(1, 2, 5), "store": store})
    train_over_a_failure(run)
    assert_one_failure(run, "rank 0: OSError: [Errno 5] Input/output error")


class LooksAtTheServer(Durable):
    """A client to which the folder of step 2 is not there until it has looked `looks` times."""

    def __init__(self, looks: float) -> None:
        self.looks = looks

    def create(self, path: Path) -> int:
        if layout.parse_staging(path.parent.name) == 2 and self.looks > 0:
            self.looks -= 1
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return super().create(path)


@on_two_ranks
def test_a_rank_that_does_not_see_the_folder_of_a_save_looks_again_and_is_named_in_vain(
    rank: int, tmp_path: Path
) -> None:
    def run_with_disk(looks: float, look_seconds: float) -> SmallRun:
        root = tmp_path / str(looks) / "checkpoint"
        disk = LooksAtTheServer(looks if rank else 0)
        store = CheckpointStore(root, durable=disk, look_seconds=look_seconds)
        return sharded_run(root.parent, async_mode="async", seams={"save_policy": at_steps(1, 2, 5), "store": store})

    run = run_with_disk(1, 60.0)
    with run.manager:
        run.train(6, last=False)
    assert run.names() == ["step-1", "step-2", "step-5"]
    run = run_with_disk(math.inf, 0.0)
    train_over_a_failure(run)
    assert_one_failure(run, f"rank 1: OSError: [Errno 116] Stale file handle: '{run.root}/step-2.staging-")


@on_two_ranks
def test_a_state_that_cannot_be_staged_on_one_rank_fails_the_save_on_both(rank: int, tmp_path: Path, mode: str) -> None:
    loader = Unwritable()
    run = sharded_run(tmp_path, loader=loader, async_mode=mode, seams={"save_policy": at_steps(1, 2, 5)})
    with run.manager:
        run.train(1, last=False)
        loader.fails = rank == 0  # the rank that writes it
        run.train(2, last=False)
        loader.fails = False
        run.saver.wait()
        run.train(6, last=False)
    assert_one_failure(run, "lambda")


@on_two_ranks
def test_failures_in_a_row_end_the_run_on_both_in_the_same_step(rank: int, tmp_path: Path, mode: str) -> None:
    full = ";".join(f"ENOSPC@write:rank=1,step={step}" for step in (2, 4, 5))
    run = run_with(full, rank, tmp_path, mode, seams={}, interval=1, max_failed_saves=2)
    with pytest.raises(SaveFailed, match="rank 1: OSError") as raised, run.manager:
        run.train(9, last=False)
    faults.install("", rank=rank)
    assert raised.value.step == 5
    assert same_everywhere(run.train_state.step)
    assert [step for step, _, _ in run.events.happened("save_failed")] == [2, 4, 5]
    assert "step-3" in run.names()


@on_two_ranks
def test_a_forced_save_is_tried_again(rank: int, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoint", durable=FailingDisk("rename", times=1))
    with (run := sharded_run(tmp_path, interval=100, seams={"store": store})).manager:
        assert run.train(3) == [3]
        assert run.names() == ["step-3"]
    assert len(run.events.happened("save_failed")) == 1


@on_two_ranks
def test_a_save_that_outlived_its_deadline_is_not_torn_by_the_next(rank: int, tmp_path: Path) -> None:
    run = sharded_run(tmp_path, async_mode="async", interval=1, timeout_seconds=2, max_failed_saves=9)
    may_write = threading.Event()
    run.saver.before_write = lambda path: may_write.wait() if rank == 1 else None
    with run.manager:
        run.train(1, last=False)
        saved = run.contents()
        run.train(3, last=False)
        may_write.set()
        run.saver.wait()
        run.train(5)
    assert [step for step, _, _ in run.events.happened("save_failed")][:2] == [1, 2]
    assert {"step-1", "step-5"} <= set(run.names())
    with (again := sharded_run(tmp_path, load_step=1)).manager:
        assert again.manager.load()
        assert same(again.contents(), saved)


@on_two_ranks
def test_a_save_that_only_one_rank_still_writes_fails_the_next_on_both(rank: int, tmp_path: Path) -> None:
    saver = ThreadSaver(Peers(timedelta(seconds=30)))
    run = sharded_run(tmp_path, saver=saver, seams={"save_policy": at_steps(1, 2, 5)})
    with run.manager:
        run.train(1, last=False)
        run.saver.wait()
        stuck: Future[None] = Future()
        if rank == 1:
            saver._under_way = stuck  # The ranks stop waiting at slightly different moments.
        run.train(2, last=False)
        run.saver.wait()
        stuck.set_result(None)
        run.train(6, last=False)
    assert_one_failure(run, "on rank 1 the previous save is still being written")


class RefusesOnOneRank:
    """A state whose `state_dict` raises on the second rank."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def state_dict(self) -> dict[str, Any]:
        if self._rank == 1:
            raise ConfigError("the second rank has no state")
        return {"fine": 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


@on_two_ranks
def test_a_state_dict_that_raises_on_one_rank_is_an_error_on_both(rank: int, tmp_path: Path) -> None:
    run = sharded_run(tmp_path, loader=RefusesOnOneRank(rank), interval=1)
    with pytest.raises(ConfigError, match="the second rank has no state") as raised:
        run.train(1, last=False)
    assert raised.value.reported_elsewhere == (rank == 1) and raised.value.origin_rank == 1
    run.manager.close()


class RaisesOnce:
    """A state whose next `state_dict` raises if `fails` is true."""

    def __init__(self) -> None:
        self.fails = False

    def state_dict(self) -> dict[str, Any]:
        if self.fails:
            self.fails = False
            raise RuntimeError("the disk of the loader is away")
        return {"fine": 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


@on_two_ranks
def test_a_state_that_raises_once_on_one_rank_is_one_failed_save_on_both(rank: int, tmp_path: Path, mode: str) -> None:
    loader = RaisesOnce()
    run = sharded_run(tmp_path, loader=loader, async_mode=mode, seams={"save_policy": at_steps(1, 2, 5)})
    with run.manager:
        run.train(1, last=False)
        run.saver.wait()
        loader.fails = rank == 1
        run.train(6, last=False)
    assert_one_failure(run, "rank 1: RuntimeError: the disk of the loader is away")


@on_two_ranks
def test_a_forced_save_whose_state_raises_once_is_tried_again(rank: int, tmp_path: Path) -> None:
    loader = RaisesOnce()
    with (run := sharded_run(tmp_path, loader=loader, interval=100)).manager:
        run.train(2, last=False)
        loader.fails = rank == 1
        assert run.train(3) == [3]
        assert run.names() == ["step-3"]
    assert [step for step, _, _ in run.events.happened("save_failed")] == [3]
