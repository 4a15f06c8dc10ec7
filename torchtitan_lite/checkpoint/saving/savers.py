"""How a state becomes a checkpoint while training goes on: at once, in a thread, in a process.

A saver is given a state and a target, and hands back a `PendingSave` with two promises: `staged`,
after which the state may change, and `durable`, after which the checkpoint cannot be lost. A failure
is the result of `durable`, as `SaveFailed` (`LeaseLost` where the folder is another job's), and never
raised from `save`: every mode is settled in the same way. One save is under way at a time; the
caller settles the last one first. **Collective**: all ranks save the same step with savers of the
same kind.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from torchtitan_lite.checkpoint.saving.content import Copies, WriteStaged, live_content, write_in_place
from torchtitan_lite.checkpoint.saving.save_plan import PlanCache
from torchtitan_lite.checkpoint.saving.writer import RankContent, Target, commit
from torchtitan_lite.checkpoint.staging.stager import Staged, Stager, build_stager
from torchtitan_lite.checkpoint.staging.watch import DO_NOT_WATCH, StagingWatch, build_staging_watch
from torchtitan_lite.config.job_config import Checkpoint
from torchtitan_lite.disk.background import give_way
from torchtitan_lite.disk.digest import FileRecord
from torchtitan_lite.disk.writer_process import WriterProcess
from torchtitan_lite.distributed.consensus import Peers
from torchtitan_lite.errors import CheckpointError, LeaseLost, SaveFailed
from torchtitan_lite.log import logger
from torchtitan_lite.store.manifest import CheckpointInfo

State = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True)
class PendingSave:
    """A save under way."""

    step: int
    staged: Future[None]
    """Done when the state may change."""
    durable: Future[CheckpointInfo | None]
    """Done when the checkpoint is committed, on the coordinator with what it is; failed with `SaveFailed`, or
    `LeaseLost`."""


class SavesStates(Protocol):
    """Begins saves; all that a save in flight needs of a saver."""

    def save(self, state: State, target: Target) -> PendingSave:
        """Sets off a save. Collective."""
        ...


class Saver(SavesStates, Protocol):
    """One way to save."""

    def start(self) -> None:
        """Makes early what takes time to make. Idempotent, main thread."""

    def prepare(self, get_state: Callable[[], State]) -> None:
        """Plans, and makes ready for, saves of states like `get_state()`: the first one is as fast as the others.

        Collective, as `get_state` is. What fails here fails again, and is told, when it is saved.
        """

    def close(self, timeout_seconds: float) -> None:
        """Ends what `start` or `save` began, after the save under way or after that time. Idempotent."""


class StateSaver:
    """Saves in one of three ways: at once from the live tensors, or from `copies` in a thread, which may have a
    `process` write them.

    Agreement and commit are the same in each: the plan in the caller's thread, the rest where the save runs.
    """

    def __init__(
        self,
        peers: Peers,
        plans: PlanCache | None,
        copies: Copies | None = None,
        process: WriterProcess | None = None,
    ) -> None:
        self._peers = peers
        self._plans = plans or PlanCache(peers)
        self._copies = copies
        self._process = process
        self._under_way: Future[CheckpointInfo | None] = _done(None)
        self._content = live_content if copies is None else copies.content
        self._run: Run = _at_once if copies is None else _in_thread

    def start(self) -> None:
        """Start the writer process if there is one. Idempotent, main thread."""
        if self._process is not None:
            self._process.start()

    def prepare(self, get_state: Callable[[], State]) -> None:
        """Plan for states like `get_state()`, and have an arena made for them: without copies there is no need."""
        if self._copies is None:
            return
        try:
            image = self._plans.plan(get_state()).image()
        except Exception as error:
            logger.debug("No plan for saves yet: %s", error)
            return
        # The arena is exchanged for a larger one, which the thread must not be writing from.
        if self._under_way.done():
            self._copies.stager.prepare(image.file.num_bytes)

    def save(self, state: State, target: Target) -> PendingSave:
        """Begin a save: plan it, take the content, and commit that. **Collective**, main thread."""
        try:
            planned = self._plans.plan(state, lambda: self._check(target))
        except Exception as error:
            return refused(target.step, error)
        content: RankContent | None = None
        failure: Exception | None = None
        try:
            content = self._content(planned.image(), target)
        except Exception as error:
            failure = error  # Of this rank alone: `commit` raises it on all.
        # The group is made here: making it is collective, and in the thread it could meet the caller's collectives.
        group = self._peers.group
        staged: Future[None] = Future()
        durable = self._run(lambda: self._finish(content, failure, staged, target, group))
        if self._copies is not None:
            self._under_way = durable
        return PendingSave(target.step, staged, durable)

    def close(self, timeout_seconds: float) -> None:
        """End what `start` and `save` began, after the save under way or after that time. Idempotent."""
        if wait_for([self._under_way], timeout_seconds).not_done:
            logger.warning("A save is still being written after %.0f s; leaving it behind.", timeout_seconds)
        else:
            self._under_way = _done(None)  # A failure holds what it came through, the copy too.
            if self._copies is not None:
                self._copies.stager.close()
        if self._process is not None:
            self._process.close()

    def _check(self, target: Target) -> None:
        if not self._under_way.done():
            # The caller stopped waiting for it, and its copy must not change while it is being written.
            raise SaveFailed(target.step, f"on rank {self._peers.rank} the save before it is still being written")
        self.start()  # Again, if the process died: here a failure to start is every rank's.
        target.check()

    def _finish(
        self,
        content: RankContent | None,
        failure: Exception | None,
        staged: Future[None],
        target: Target,
        group: dist.ProcessGroup | None,
    ) -> CheckpointInfo | None:
        try:
            if content is not None:
                content.wait()
        except Exception as error:
            failure = error
        finally:
            staged.set_result(None)
        return commit(content, failure, target, self._peers, group)


class SyncSaver(StateSaver):
    """Saves while the caller waits, from the live tensors: nothing is held twice."""

    def __init__(self, peers: Peers, plans: PlanCache | None = None) -> None:
        super().__init__(peers, plans)


class ThreadSaver(StateSaver):
    """Copies the state while the caller waits, then has `write` write the copy in a thread."""

    def __init__(
        self,
        peers: Peers,
        plans: PlanCache | None = None,
        *,
        stager: Stager | None = None,
        write: WriteStaged = write_in_place,
        watch: StagingWatch = DO_NOT_WATCH,
    ) -> None:
        super().__init__(peers, plans, Copies(stager or build_stager(), write, watch))


class ProcessSaver(StateSaver):
    """Copies the state while the caller waits into memory that a writer process maps too; that process writes it."""

    def __init__(
        self,
        peers: Peers,
        timeout_seconds: float,
        ignored_signals: Sequence[str] = (),
        *,
        plans: PlanCache | None = None,
        watch: StagingWatch = DO_NOT_WATCH,
    ) -> None:
        self.process = WriterProcess(timeout_seconds, ignored_signals, rank=peers.rank)
        super().__init__(peers, plans, Copies(build_stager(), self._write_in_process, watch), self.process)

    def _write_in_process(self, path: Path, staged: Staged, target: Target) -> FileRecord:
        return self.process.write(path, staged.arena, staged.num_bytes, target.step)


def build_saver(config: Checkpoint, peers: Peers, plans: PlanCache | None = None) -> Saver:
    """The saver of `config.async_mode`."""
    if config.async_mode == "disabled":
        return SyncSaver(peers, plans)
    watch = build_staging_watch(config)
    if config.async_mode == "async":
        return ThreadSaver(peers, plans, watch=watch)
    if not torch.cuda.is_available():
        logger.info("async_with_pinned_mem: no accelerator here, staging into shared memory that is not pinned.")
    return ProcessSaver(peers, config.timeout_seconds, config.preemption_signals, plans=plans, watch=watch)


class Run(Protocol):
    """Runs `work`, which raises `CheckpointError` if it fails, and returns its outcome."""

    def __call__(self, work: Callable[[], T], /) -> Future[T]: ...


def _at_once(work: Callable[[], T]) -> Future[T]:
    try:
        return _done(work())
    except CheckpointError as error:
        return _failed(error)


def _in_thread(work: Callable[[], T]) -> Future[T]:
    """The outcome of `work`. A thread that nobody has to wait for: one that hangs does not keep the process."""
    future: Future[T] = Future()
    device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def run() -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)  # Each thread begins with the first one.
            give_way()
            outcome = work()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(outcome)

    threading.Thread(target=run, name="checkpoint", daemon=True).start()
    return future


def refused(step: int, error: Exception) -> PendingSave:
    """Return a save that failed on every rank before anything of it was there."""
    if not isinstance(error, SaveFailed | LeaseLost):
        error = SaveFailed(step, f"{type(error).__name__}: {error}")
    return PendingSave(step, _done(None), _failed(error))


def _done(value: T) -> Future[T]:
    future: Future[T] = Future()
    future.set_result(value)
    return future


def _failed(error: CheckpointError) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_exception(error)
    return future
