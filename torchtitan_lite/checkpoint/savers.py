"""How a state becomes a checkpoint while training goes on: at once, in a thread, in a process.

A saver is given a state, a writer and a step, and hands back a `PendingSave` with two promises:
`staged`, after which the state may change, and `durable`, after which the checkpoint cannot be lost.
A failure is the result of `durable`, always as `SaveFailed`, and never raised from `save`: every
mode is settled in the same way. One save is under way at a time; the caller settles the last one
first. **Collective**: all ranks save the same step with savers of the same kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult

from torchtitan_lite.checkpoint import dcp
from torchtitan_lite.checkpoint.staging import SnapshotPlanner, Stager, StagingArena
from torchtitan_lite.checkpoint.writer import WriteItems, write_items
from torchtitan_lite.checkpoint.writer_process import WriterProcess
from torchtitan_lite.config.job_config import Checkpoint
from torchtitan_lite.distributed.consensus import Peers
from torchtitan_lite.errors import SaveFailed
from torchtitan_lite.log import logger

State = dict[str, Any]


@dataclass(frozen=True)
class PendingSave:
    """A save under way."""

    step: int
    staged: Future[None]
    """Done when the state may change."""
    durable: Future[None]
    """Done when the checkpoint is committed; failed with `SaveFailed`."""


class Saver(Protocol):
    """One way to save."""

    write_items: WriteItems
    """Writes a rank's file; handed to the `StorageWriter` of each save."""

    def start(self) -> None:
        """Makes early what takes time to make. Idempotent, main thread."""

    def save(self, state: State, writer: StorageWriter, step: int) -> PendingSave:
        """Sets off a save. Collective."""
        ...

    def close(self) -> None:
        """Ends what `start` or `save` began, after the save under way. Idempotent."""


class SyncSaver:
    """Saves while the caller waits."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self.write_items: WriteItems = write_items

    def start(self) -> None:
        """Nothing to make."""

    def save(self, state: State, writer: StorageWriter, step: int) -> PendingSave:
        try:
            dcp.save(state, writer, DefaultSavePlanner(), self._peers.group, step)
        except SaveFailed as error:
            return PendingSave(step, _done(), _failed(error))
        return PendingSave(step, _done(), _done())

    def close(self) -> None:
        """Nothing to end."""


class ThreadSaver:
    """Copies the state while the caller waits, then saves the copy in a thread."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._stager = Stager(pin=torch.cuda.is_available())
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._under_way = _done()
        self.write_items: WriteItems = write_items

    @property
    def arena(self) -> StagingArena:
        """Where the tensors of the save under way lie."""
        return self._stager.arena

    def start(self) -> None:
        """Nothing to make."""

    def save(self, state: State, writer: StorageWriter, step: int) -> PendingSave:
        # The group is made here: making it is collective, and in the thread it could meet the caller's collectives.
        group = self._peers.group
        planner = SnapshotPlanner()
        if self._under_way.done():
            planner.take(state, self._stager)
        else:
            # The caller stopped waiting for it, and its copy must not change while it is being written. Refused in the
            # thread like any failure, for this rank may be the only one that still writes.
            planner.refuse("the save before it is still being written")
        self._under_way = self._executor.submit(dcp.save, {}, writer, planner, group, step)
        return PendingSave(step, _done(), self._under_way)

    def close(self) -> None:
        self._executor.shutdown(wait=True)
        self._stager.close()


class ProcessSaver:
    """Like `ThreadSaver`, but what the thread would write is written by a process of its own.

    The copy lies in memory that both have mapped. Planning, agreement and commit stay in the thread.
    """

    def __init__(self, peers: Peers, timeout_seconds: float, ignored_signals: Sequence[str] = ()) -> None:
        self._thread = ThreadSaver(peers)
        self.process = WriterProcess(timeout_seconds, ignored_signals)
        self.write_items: WriteItems = self._write_through_process

    def start(self) -> None:
        self.process.start()

    def save(self, state: State, writer: StorageWriter, step: int) -> PendingSave:
        self.process.start()
        return self._thread.save(state, writer, step)

    def close(self) -> None:
        self._thread.close()
        self.process.close()

    def _write_through_process(
        self, path: Path, items: Sequence[tuple[MetadataIndex, torch.Tensor | bytes]]
    ) -> list[WriteResult]:
        arena = self._thread.arena
        placed = [(index, data if isinstance(data, bytes) else arena.place_of(data)) for index, data in items]
        return self.process.write(path, placed, arena)


def build_saver(config: Checkpoint, peers: Peers) -> Saver:
    """The saver of `config.async_mode`."""
    if config.async_mode == "disabled":
        return SyncSaver(peers)
    if config.async_mode == "async":
        return ThreadSaver(peers)
    if not torch.cuda.is_available():
        logger.info("async_with_pinned_mem: no accelerator here, staging into shared memory that is not pinned.")
    return ProcessSaver(peers, config.timeout_seconds, config.preemption_signals)


def _done() -> Future[None]:
    future: Future[None] = Future()
    future.set_result(None)
    return future


def _failed(error: SaveFailed) -> Future[None]:
    future: Future[None] = Future()
    future.set_exception(error)
    return future
