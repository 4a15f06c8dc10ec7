"""What fails on one rank while a manager is opened or waits is an error of all ranks, or ends that rank in time."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.checkpoint.conftest import StartRun
from tests.ranks import on_two_ranks
from torchtitan_lite.checkpoint.format.flattening import State
from torchtitan_lite.checkpoint.manager import CheckpointManager
from torchtitan_lite.checkpoint.saving.savers import PendingSave, SyncSaver
from torchtitan_lite.checkpoint.saving.target import SaveTarget
from torchtitan_lite.checkpoint.seams import Seams
from torchtitan_lite.config.own_loop import loop_config
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.errors import SaveFailed


class Unhookable(torch.optim.SGD):
    """An optimizer that takes no hooks: its wrapper has replaced the method."""

    def register_step_pre_hook(self, hook: Any) -> Any:
        raise NotImplementedError("this optimizer takes no hooks")


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    """Let this process open no further file or socket."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@on_two_ranks
def test_an_optimizer_that_refuses_its_hook_on_one_rank_is_an_error_of_all(rank: int, tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = (Unhookable if rank else torch.optim.SGD)(model.parameters(), lr=0.1)
    manager = CheckpointManager.for_loop(
        model=model, optimizer=optimizer, folder=tmp_path, preemption_signals=(), timeout_seconds=300
    )
    with pytest.raises(NotImplementedError, match="takes no hooks"):
        manager.load()
    manager.close()


@on_two_ranks
def test_signals_that_one_rank_cannot_watch_are_an_error_of_all(rank: int, tmp_path: Path) -> None:
    model, peers = nn.Linear(2, 2), Peers(timedelta(seconds=300))
    peers.gather(None)  # Its connections exist.
    manager = CheckpointManager(
        None,
        model,
        None,
        None,
        None,
        loop_config(tmp_path, {"preemption_signals": ("SIGUSR2",)}),
        seams=Seams(peers=peers),
    )
    if rank:
        with no_descriptor_left(), pytest.raises(OSError, match="Too many open files"):
            manager.open()
    else:
        with pytest.raises(OSError, match="Too many open files"):
            manager.open()
    manager.close()
    peers.gather(None)
    peers.close()


class Never(Future[Any]):
    """Is never done, and notes how long callers would wait for it."""

    def __init__(self, waits: list[float | None]) -> None:
        super().__init__()
        self._waits = waits

    def result(self, timeout: float | None = None) -> Any:
        self._waits.append(timeout)
        return super().result(0)


class HangingSaver(SyncSaver):
    """A saver whose copy hangs."""

    def __init__(self) -> None:
        super().__init__(Peers(timedelta(seconds=60)))
        self.waits: list[float | None] = []

    def save(self, state: State, target: SaveTarget) -> PendingSave:
        return PendingSave(target.step, Never(self.waits), Future())

    def close(self, timeout_seconds: float) -> None:
        self.waits.append(timeout_seconds)


def test_a_rank_whose_copy_hangs_waits_for_it_once_and_leaves(start_run: StartRun) -> None:
    """The others wait for this rank in training: it has to end, so that the launcher ends them."""
    saver = HangingSaver()
    run = start_run(interval=1, seams={"saver": saver}, timeout_seconds=40)
    run.step()
    with pytest.raises(SaveFailed, match="not staged after 40 s"):
        run.optimizer.step()
    with pytest.raises(SaveFailed, match="not staged after 40 s"):
        run.optimizer.step()
    run.manager.close()
    assert saver.waits == [40, 0, 0]
