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

from torchtitan_lite import faults
from torchtitan_lite.checkpoint.format.file_image import FileImage
from torchtitan_lite.checkpoint.saving.agreed_planner import AgreedPlanner
from torchtitan_lite.checkpoint.saving.object_items import ObjectItems
from torchtitan_lite.checkpoint.saving.save_plan import PlanCache, Planned
from torchtitan_lite.checkpoint.saving.writer import CommittingWriter, RankContent, Target
from torchtitan_lite.checkpoint.staging.stager import Staged, Stager, build_stager
from torchtitan_lite.checkpoint.staging.watch import DO_NOT_WATCH, StagingWatch, build_staging_watch
from torchtitan_lite.config.job_config import Checkpoint
from torchtitan_lite.disk.background import give_way
from torchtitan_lite.disk.block_writer import Bounced, InPlace, write_blocks
from torchtitan_lite.disk.digest import FileRecord
from torchtitan_lite.disk.writer_process import WriterProcess
from torchtitan_lite.distributed import dcp
from torchtitan_lite.distributed.consensus import Peers
from torchtitan_lite.errors import CheckpointError, LeaseLost, SaveFailed
from torchtitan_lite.log import logger
from torchtitan_lite.store import layout
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


class Saver(Protocol):
    """One way to save."""

    def start(self) -> None:
        """Makes early what takes time to make. Idempotent, main thread."""

    def prepare(self, get_state: Callable[[], State]) -> None:
        """Plans, and makes ready for, saves of states like `get_state()`: the first one is as fast as the others.

        Collective, as `get_state` is. What fails here fails again, and is told, when it is saved.
        """

    def save(self, state: State, target: Target) -> PendingSave:
        """Sets off a save. Collective."""
        ...

    def close(self, timeout_seconds: float) -> None:
        """Ends what `start` or `save` began, after the save under way or after that time. Idempotent."""


class SyncSaver:
    """Saves while the caller waits, from the live tensors: nothing is held twice."""

    def __init__(self, peers: Peers, plans: PlanCache | None = None) -> None:
        self._peers = peers
        self._plans = plans or PlanCache(peers)
        self._objects = ObjectItems()

    def start(self) -> None:
        """Nothing to make."""

    def prepare(self, get_state: Callable[[], State]) -> None:
        """Nothing to make ready: training stands still for all of a save."""

    def save(self, state: State, target: Target) -> PendingSave:
        failure: Exception | None = None
        content: RankContent | None = None
        try:
            planned = self._plans.plan(state, target.check)
        except Exception as error:
            return _refused(target.step, error)
        try:
            content = self._content(planned, target)
        except Exception as error:
            failure = error
        try:
            committed = _commit(content, failure, target, self._peers, self._peers.group)
        except CheckpointError as error:
            return PendingSave(target.step, _done(None), _failed(error))
        return PendingSave(target.step, _done(None), _done(committed))

    def close(self, timeout_seconds: float) -> None:
        """Nothing to end."""

    def _content(self, planned: Planned, target: Target) -> RankContent:
        image, name, objects = _image(planned, self._objects, self._peers.rank)
        _wait_for_devices(image.tensors)
        durable = target.store.durable
        return RankContent(
            planned.plan,
            name,
            objects,
            image.num_bytes,
            tensors=lambda: image.tensors,
            write=lambda path: write_blocks(path, Bounced(image.num_bytes, image.fill), durable=durable),
        )


class RefusingSaver:
    """Saves nothing: the state could not be made, on every rank."""

    def __init__(self, error: SaveFailed) -> None:
        self._error = error

    def start(self) -> None:
        """Nothing to make."""

    def prepare(self, get_state: Callable[[], State]) -> None:
        """Nothing to make ready."""

    def save(self, state: State, target: Target) -> PendingSave:
        return _refused(target.step, self._error)

    def close(self, timeout_seconds: float) -> None:
        """Nothing to end."""


WriteStaged = Callable[[Path, Staged, Target], FileRecord]
"""Makes the file of a staged image, durably."""


def _nothing() -> None:
    """Nothing to wait for."""


class ThreadSaver:
    """Copies the state while the caller waits, then writes the copy in a thread, or has `write` do it."""

    def __init__(
        self,
        peers: Peers,
        plans: PlanCache | None = None,
        *,
        stager: Stager | None = None,
        write: WriteStaged | None = None,
        watch: StagingWatch = DO_NOT_WATCH,
        ready: Callable[[], None] = _nothing,
    ) -> None:
        self._peers = peers
        self._ready = ready
        self._plans = plans or PlanCache(peers)
        self._stager = stager or build_stager()
        self._write = write or write_in_place
        self._watch = watch
        self._objects = ObjectItems()
        self._under_way: Future[CheckpointInfo | None] = _done(None)

    def start(self) -> None:
        """Nothing to make."""

    def prepare(self, get_state: Callable[[], State]) -> None:
        try:
            image, *_ = _image(self._plans.plan(get_state()), self._objects, self._peers.rank)
        except Exception as error:
            logger.debug("No plan for saves yet: %s", error)
            return
        # The arena is exchanged for a larger one, which the thread must not be writing from.
        if self._under_way.done():
            self._stager.prepare(image.num_bytes)

    def save(self, state: State, target: Target) -> PendingSave:
        try:
            planned = self._plans.plan(state, lambda: self._check(target))
        except Exception as error:
            return _refused(target.step, error)
        content, wait, failure = self._staged_content(planned, target)
        # The group is made here: making it is collective, and in the thread it could meet the caller's collectives.
        group = self._peers.group
        staged: Future[None] = Future()
        self._under_way = _in_thread(lambda: self._finish(content, wait, failure, staged, target, group))
        return PendingSave(target.step, staged, self._under_way)

    def close(self, timeout_seconds: float) -> None:
        if wait_for([self._under_way], timeout_seconds).not_done:
            logger.warning("A save is still being written after %.0f s; leaving it behind.", timeout_seconds)
            return
        self._under_way = _done(None)  # A failure holds what it came through, the copy too.
        self._stager.close()

    def _check(self, target: Target) -> None:
        if not self._under_way.done():
            # The caller stopped waiting for it, and its copy must not change while it is being written.
            raise SaveFailed(target.step, f"on rank {self._peers.rank} the save before it is still being written")
        self._ready()
        target.check()

    def _staged_content(
        self, planned: Planned, target: Target
    ) -> tuple[RankContent | None, Callable[[], None], Exception | None]:
        try:
            faults.point("stage", step=target.step)
            image, name, objects = _image(planned, self._objects, self._peers.rank)
            compare = self._watch(image, [item.index.fqn for item in planned.plan.items])
            staged = self._stager.take(image)
        except Exception as error:
            return None, _nothing, error
        write = self._write
        content = RankContent(
            planned.plan,
            name,
            objects,
            image.num_bytes,
            tensors=staged.tensors,
            write=lambda path: write(path, staged, target),
        )
        return content, lambda: compare(staged), None

    def _finish(
        self,
        content: RankContent | None,
        wait: Callable[[], None],
        failure: Exception | None,
        staged: Future[None],
        target: Target,
        group: dist.ProcessGroup | None,
    ) -> CheckpointInfo | None:
        try:
            wait()
        except Exception as error:
            failure = error
        finally:
            staged.set_result(None)
        return _commit(content, failure, target, self._peers, group)


class ProcessSaver:
    """Like `ThreadSaver`, but what the thread would write is written by a process of its own.

    The copy lies in memory that both have mapped. Agreement and commit stay in the thread.
    """

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
        # Started anew, if it has to be, where a failure to do so is every rank's.
        self._thread = ThreadSaver(peers, plans, write=self._have_it_written, watch=watch, ready=self.process.start)

    def start(self) -> None:
        self.process.start()

    def prepare(self, get_state: Callable[[], State]) -> None:
        self._thread.prepare(get_state)

    def save(self, state: State, target: Target) -> PendingSave:
        return self._thread.save(state, target)

    def close(self, timeout_seconds: float) -> None:
        self._thread.close(timeout_seconds)
        self.process.close()

    def _have_it_written(self, path: Path, staged: Staged, target: Target) -> FileRecord:
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


def _image(planned: Planned, items: ObjectItems, rank: int) -> tuple[FileImage, str, Sequence[Any]]:
    name, plan = layout.data_file(rank, 0), planned.plan
    objects, placed = items.lay_out(planned.objects(), name, plan.layout.end)
    return FileImage(plan.layout, planned.tensors(), objects, planned.volatile()), name, placed


def _wait_for_devices(tensors: Sequence[torch.Tensor]) -> None:
    """What this thread asked devices for is done: other threads, which read `tensors`, have streams of their own."""
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


def write_in_place(path: Path, staged: Staged, target: Target) -> FileRecord:
    return write_blocks(path, InPlace(staged.arena.memory, staged.num_bytes), durable=target.store.durable)


def _commit(
    content: RankContent | None,
    failure: Exception | None,
    target: Target,
    peers: Peers,
    group: dist.ProcessGroup | None,
) -> CheckpointInfo | None:
    """What was committed, on the coordinator. Raises `SaveFailed` or `LeaseLost`, on every rank if on one."""
    writer, planner = CommittingWriter(target, content), AgreedPlanner(failure)
    try:
        dcp.save({}, writer, planner, group, target.step)
    except CheckpointError as error:
        peers.is_group_in_doubt |= not dcp.is_group_whole(error)
        raise
    return writer.committed


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


def _refused(step: int, error: Exception) -> PendingSave:
    """A save that failed on every rank before anything of it was there."""
    if not isinstance(error, SaveFailed | LeaseLost):
        error = SaveFailed(step, f"{type(error).__name__}: {error}")
    return PendingSave(step, _done(None), _failed(error))


def _done(value: T) -> Future[T]:
    future: Future[T] = Future()
    future.set_result(value)
    return future


def _failed(error: CheckpointError) -> Future[CheckpointInfo | None]:
    future: Future[CheckpointInfo | None] = Future()
    future.set_exception(error)
    return future
