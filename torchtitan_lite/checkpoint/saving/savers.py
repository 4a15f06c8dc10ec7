"""The ways to save a state while training continues: at once, in a thread, or by a process.

`save` takes a state and a target, and returns a `PendingSave` with two futures: after `staged` the
state may change, after `durable` the checkpoint cannot be lost. A failure is the result of `durable`,
as `SaveFailed` (`LeaseLost` if the folder belongs to another job), and `save` never raises it: the
caller settles every mode in the same way. Only `RanksDiffer` is raised at once, because no later save
could succeed. One save is under way at a time; the caller settles the last one first. **Collective**: all
ranks save the same step with the same kind of saver.
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
from torchtitan_lite.checkpoint.saving.images import Images
from torchtitan_lite.checkpoint.saving.save_plan import PlanCache
from torchtitan_lite.checkpoint.saving.writer import RankContent, Target, commit
from torchtitan_lite.checkpoint.staging.stager import Staged, Stager, build_stager
from torchtitan_lite.checkpoint.staging.watch import DO_NOT_WATCH, StagingWatch, build_staging_watch
from torchtitan_lite.collection import no_collection
from torchtitan_lite.config.job_config import Checkpoint
from torchtitan_lite.disk.background import lower_io
from torchtitan_lite.disk.digest import FileRecord
from torchtitan_lite.disk.writer_process import WriterProcess
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.errors import CheckpointError, LeaseLost, RanksDiffer, SaveFailed
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
    """Done when the checkpoint is committed; its result is what was committed on the coordinator, None on other ranks.
    Failed with `SaveFailed` or `LeaseLost`."""
    differs: RanksDiffer | None = None
    """What has to be raised once the checkpoint is durable: it has the values of the lowest ranks."""


class SavesStates(Protocol):
    """Begins saves: the part of a saver that `InFlight` uses."""

    def save(self, state: State, target: Target) -> PendingSave:
        """Begin to save `state` as `target`. **Collective**."""
        ...


class Saver(SavesStates, Protocol):
    """One way to save."""

    def start(self) -> None:
        """Start early what takes long to start. Idempotent, main thread."""

    def prepare(self, get_state: Callable[[], State]) -> None:
        """Plan and allocate for states like `get_state()`, so that the first save is as fast as the later ones.

        **Collective**, and `get_state` may be, too. A failure here is only logged: the save meets it again and reports
        it.
        """

    def compare_alongside(self, get_state: Callable[[], State]) -> None:
        """Begin to compare the ranks alongside training, if a save would have to compare all that they share.

        **Collective**, after a step that was trained, and `get_state` may be collective, too.
        """

    def close(self, timeout_seconds: float) -> None:
        """End threads and processes, after the save under way or after `timeout_seconds`. Idempotent."""


class StateSaver:
    """Saves at once from the live tensors; with `copies`, in a thread from a copy, which a `process` may write.

    All three plan in the caller's thread and commit where the save runs.
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
        self._images = None if copies is None else copies.images
        self._process = process
        self._under_way: Future[CheckpointInfo | None] = _done(None)
        self._content = live_content if copies is None else copies.content
        self._run: Run = _at_once if copies is None else _in_thread

    def start(self) -> None:
        """Start the writer process, if there is one. Idempotent, main thread."""
        if self._process is not None:
            self._process.start()

    def prepare(self, get_state: Callable[[], State]) -> None:
        """Plan for states like `get_state()` and allocate an arena for them; without copies, do nothing. Collective."""
        if self._copies is None:
            return
        num_bytes = -1
        try:
            num_bytes = self._plans.plan(get_state()).image().file.num_bytes
        except Exception as error:
            logger.debug("No plan for saves yet: %s", error)
        if self._images is not None:
            self._images.make_room(num_bytes)
        # A larger arena replaces the present one, from which the thread of a save under way still writes.
        if num_bytes >= 0 and self._under_way.done():
            self._copies.stager.prepare(num_bytes)

    def compare_alongside(self, get_state: Callable[[], State]) -> None:
        """Begin to compare the ranks in a thread; without copies the first save does it. **Collective**."""
        if self._copies is None:
            return
        try:
            self._plans.compare_alongside(get_state)
        except Exception as error:
            logger.debug("The ranks are compared in the first save: %s", error)

    def save(self, state: State, target: Target) -> PendingSave:
        """Plan, take the content, and commit it: here, or in a thread. **Collective**, main thread.

        Raises `RanksDiffer`, unless the target is written anyway.
        """
        content: RankContent | None = None
        failure: Exception | None = None
        # What is made of thousands of tensors here is gone when this returns, unless a collection makes it grow old.
        with no_collection():
            try:
                numbers = () if self._images is None else self._images.report()
                planned = self._plans.plan(state, lambda: self._check(target), numbers=numbers)
            except Exception as error:
                return refused(target.step, error)
            if planned.differs is not None and not target.writes_anyway:
                raise planned.differs
            if self._images is not None:
                self._images.note_save(target.step, planned.agreed)
            try:
                content = self._content(planned.image(), target)
            except Exception as error:
                failure = error  # Of this rank only: `commit` raises it on every rank.
        # The group is made here: making it is collective, and in the thread it could meet the caller's collectives.
        group = self._peers.group
        staged: Future[None] = Future()
        durable = self._run(lambda: self._finish(content, failure, staged, target, group))
        if self._copies is not None:
            self._under_way = durable
            durable.add_done_callback(self._note_over)
        return PendingSave(target.step, staged, durable, planned.differs)

    def close(self, timeout_seconds: float) -> None:
        """Give the arena back and end the process, after the save under way or after that time. Idempotent."""
        if wait_for([self._under_way], timeout_seconds).not_done:
            logger.warning("A save is still being written after %.0f s; closing without it", timeout_seconds)
        else:
            self._under_way = _done(None)  # The traceback of a failure keeps references, also to the copy.
            if self._copies is not None:
                self._copies.stager.close()
        if self._process is not None:
            self._process.close()

    def _note_over(self, durable: Future[CheckpointInfo | None]) -> None:
        assert self._copies is not None
        self._copies.release()
        if self._images is not None and durable.exception() is None:
            self._images.note_durable(durable.result())

    def _check(self, target: Target) -> None:
        if not self._under_way.done():
            # The caller stopped waiting for that save, and its copy must not change while it is being written.
            raise SaveFailed(target.step, f"on rank {self._peers.rank} the save before it is still being written")
        if self._process is not None:
            self._process.start()  # Again, if it died: a failure raised here fails the save on every rank.
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
    """Saves while the caller waits, from the live tensors: no copy, so no additional memory."""

    def __init__(self, peers: Peers, plans: PlanCache | None = None) -> None:
        super().__init__(peers, plans)


class ThreadSaver(StateSaver):
    """Copies the state while the caller waits; a thread then writes the copy by `write`."""

    def __init__(
        self,
        peers: Peers,
        plans: PlanCache | None = None,
        *,
        stager: Stager | None = None,
        write: WriteStaged = write_in_place,
        watch: StagingWatch = DO_NOT_WATCH,
        images: Images | None = None,
    ) -> None:
        stager = stager or (build_stager() if images is None else images.stager)
        super().__init__(peers, plans, Copies(stager, write, watch, images))


class ProcessSaver(StateSaver):
    """Copies the state while the caller waits into memory that a writer process maps, too; that process writes it."""

    def __init__(
        self,
        peers: Peers,
        timeout_seconds: float,
        ignored_signals: Sequence[str] = (),
        *,
        plans: PlanCache | None = None,
        watch: StagingWatch = DO_NOT_WATCH,
        images: Images | None = None,
    ) -> None:
        process = None if images is None else images.process
        self.process = process or WriterProcess(timeout_seconds, ignored_signals, rank=peers.rank)
        stager = build_stager() if images is None else images.stager
        super().__init__(peers, plans, Copies(stager, self._write_in_process, watch, images), self.process)

    def _write_in_process(self, path: Path, staged: Staged, target: Target) -> FileRecord:
        return self.process.write(path, staged.arena, staged.num_bytes, target.step, staged.record)


def build_saver(
    config: Checkpoint, peers: Peers, plans: PlanCache | None = None, images: Images | None = None
) -> Saver:
    """Return the saver of `config.async_mode`, whose copies become `images`."""
    if config.async_mode == "disabled":
        return SyncSaver(peers, plans)
    watch = build_staging_watch(config)
    if config.async_mode == "async":
        return ThreadSaver(peers, plans, watch=watch, images=images)
    if not torch.cuda.is_available():
        logger.info("async_with_pinned_mem: no accelerator found, staging into shared memory that is not pinned")
    return ProcessSaver(
        peers, config.timeout_seconds, config.preemption_signals, plans=plans, watch=watch, images=images
    )


class Run(Protocol):
    """Runs `work` and returns its outcome, which may be a `CheckpointError`."""

    def __call__(self, work: Callable[[], T], /) -> Future[T]: ...


def _at_once(work: Callable[[], T]) -> Future[T]:
    try:
        return _done(work())
    except CheckpointError as error:
        return _failed(error)


def _in_thread(work: Callable[[], T]) -> Future[T]:
    """Return the outcome of `work`, which a daemon thread runs: one that hangs does not keep the process alive."""
    future: Future[T] = Future()
    device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def run() -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)  # A new thread begins with device 0.
            lower_io()
            outcome = work()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(outcome)

    threading.Thread(target=run, name="checkpoint", daemon=True).start()
    return future


def refused(step: int, error: Exception) -> PendingSave:
    """Return a save that failed on every rank before it touched the disk."""
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
