"""The ways to save a state while training continues: at once, in a thread, or by a process.

`save` takes a state and a target, and returns a `PendingSave` with two futures: after `staged` the state may change,
after `durable` the checkpoint cannot be lost. A failure is the result of `durable`, as `SaveFailed` (`LeaseLost` if the
folder belongs to another job), and `save` never raises it: the caller settles every mode in the same way. Only
`RanksDiffer` is raised at once, because no later save could succeed. A way to save is a `Saver`, not a subclass of the
manager, so that each is tested without the others. One save is under way at a time; the caller settles the last one
first. **Collective**: all ranks save the same step with the same kind of saver.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, TypeVar

import torch

from torchtitan_lite.checkpoint.format.flattening import State
from torchtitan_lite.checkpoint.planning.plan_cache import PlanCache
from torchtitan_lite.checkpoint.planning.rank_file import RankFile
from torchtitan_lite.checkpoint.saving.companion import Companion
from torchtitan_lite.checkpoint.saving.content import Copies, WriteStaged, live_content, write_in_place
from torchtitan_lite.checkpoint.saving.target import RankContent, SaveTarget
from torchtitan_lite.checkpoint.saving.writer import commit
from torchtitan_lite.checkpoint.staging.stager import (
    Copying,
    StagedCopy,
    StagingWatch,
    build_staging_watch,
    do_not_watch,
)
from torchtitan_lite.collection import no_collection
from torchtitan_lite.config.job_config import Checkpoint
from torchtitan_lite.disk.block_writer import NewFile
from torchtitan_lite.disk.digest import FileRecord
from torchtitan_lite.disk.threads import in_a_thread
from torchtitan_lite.disk.writer_process import WriterProcess
from torchtitan_lite.distributed.exchange import Exchange
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.errors import CheckpointError, LeaseLost, PeerLost, RanksDiffer, SaveFailed
from torchtitan_lite.log import logger
from torchtitan_lite.store.manifest import CheckpointInfo

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


class Saver:
    """One way to save: plans in the caller's thread, and commits where `_run` runs it what `_content` gives."""

    def __init__(self, peers: Peers, plans: PlanCache | None = None, companions: Sequence[Companion] = ()) -> None:
        self._peers = peers
        self._plans = plans or PlanCache(peers)
        self._companions = companions

    def start(self) -> None:
        """Start early what takes long to start. Idempotent, main thread."""

    def prepare(self, get_state: Callable[[], State]) -> None:
        """Plan and allocate for states like `get_state()`, so that the first save is as fast as the later ones.

        **Collective**, and `get_state` may be, too. A failure here is only a warning: the save meets it again.
        """

    def compare_alongside(self, get_state: Callable[[], State]) -> None:
        """Begin to compare the ranks alongside training, if a save would have to compare all that they share.

        **Collective**, after a step that was trained, and `get_state` may be collective, too.
        """

    def close(self, timeout_seconds: float) -> None:
        """End threads and processes, after the save under way or after `timeout_seconds`. Idempotent."""

    def save(self, state: State, target: SaveTarget) -> PendingSave:
        """Plan, take the content, and commit it: here, or in a thread. **Collective**, main thread.

        Raises `RanksDiffer`, unless the target is written anyway, as no state of one rank alone is, and `PeerLost`.
        """
        content: RankContent | None = None
        failure: Exception | None = None
        try:
            self._check(target)
        except Exception as error:
            failure = error  # The save fails on every rank then.
        numbers = [each.numbers() for each in self._companions]
        # What is made of thousands of tensors here is gone when this returns, unless a collection makes it grow old.
        with no_collection():
            try:
                planned = self._plans.plan(
                    state,
                    compares=True,
                    failure=failure,
                    numbers=[*chain(*numbers)],
                    is_save=True,
                    step=target.step,
                )
            except (PeerLost, RanksDiffer):
                raise
            except Exception as error:
                return refused(error, target)
            if planned.differs is not None and not target.writes_anyway:
                raise planned.differs
            if planned.corruption:
                target = dataclasses.replace(target, ranks_differ=(planned.corruption,))
            agreed = iter(planned.agreed)
            for each, own in zip(self._companions, numbers, strict=True):
                each.agreed(target.step, [*islice(agreed, len(own))])
            try:
                content = self._content(planned.file(), target)
            except Exception as error:
                failure = error  # Of this rank only: `commit` raises it on every rank.
        # Its group is made here: making it is collective, and in the thread it could meet the caller's collectives.
        exchange = self._peers.saves
        staged: Future[None] = Future()
        durable = self._run(lambda: self._finish(content, failure, staged, target, exchange))
        return PendingSave(target.step, staged, durable, planned.differs)

    def _check(self, target: SaveTarget) -> None:
        """Raise for a save that cannot succeed."""
        target.check()

    def _content(self, file: RankFile, target: SaveTarget) -> RankContent:
        """Return what is written of `file`. Main thread."""
        raise NotImplementedError

    def _run(self, commit: Callable[[], CheckpointInfo | None]) -> Future[CheckpointInfo | None]:
        """Return the outcome of `commit`, which runs here or in a thread."""
        raise NotImplementedError

    def _finish(
        self,
        content: RankContent | None,
        failure: Exception | None,
        staged: Future[None],
        target: SaveTarget,
        exchange: Exchange,
    ) -> CheckpointInfo | None:
        try:
            if content is not None:
                content.wait()
        except Exception as error:
            failure = error
        finally:
            staged.set_result(None)
        return commit(content, failure, target, self._peers, exchange)


class SyncSaver(Saver):
    """Saves while the caller waits, from the live tensors: no copy, so no memory but small buffers."""

    def _content(self, file: RankFile, target: SaveTarget) -> RankContent:
        return live_content(file)

    def _run(self, commit: Callable[[], CheckpointInfo | None]) -> Future[CheckpointInfo | None]:
        return _at_once(commit)


class CopyingSaver(Saver):
    """Copies the state while the caller waits; a thread then writes the copy and commits."""

    def __init__(
        self, peers: Peers, plans: PlanCache | None, copies: Copies, companions: Sequence[Companion] = ()
    ) -> None:
        super().__init__(peers, plans, companions)
        self._copies = copies
        self._under_way: Future[CheckpointInfo | None] = _done(None)

    def prepare(self, get_state: Callable[[], State]) -> None:
        num_bytes = -1
        try:
            num_bytes = self._plans.plan(get_state()).file().data.num_bytes
        except Exception as error:
            # Said now, because with images in memory the first save may be far.
            if self._peers.is_coordinator:
                logger.warning("No save could succeed at this step: %s", f"{error}".removesuffix("."))
        for each in self._companions:
            each.sized(num_bytes)
        # A larger arena replaces the present one, from which the thread of a save under way still writes.
        if num_bytes >= 0 and self._under_way.done():
            self._copies.stager.prepare(num_bytes)

    def compare_alongside(self, get_state: Callable[[], State]) -> None:
        try:
            self._plans.compare_alongside(get_state)
        except Exception as error:
            logger.debug("The ranks are compared in the first save: %s", error)

    def close(self, timeout_seconds: float) -> None:
        """Give the arena back, after the save under way or after that time. Idempotent."""
        if wait_for([self._under_way], timeout_seconds).not_done:
            logger.warning("A save is still being written after %.0f s; closing without it", timeout_seconds)
        else:
            self._copies.stager.close()

    def _check(self, target: SaveTarget) -> None:
        if not self._under_way.done():
            # The caller stopped waiting for that save, and its copy must not change while it is being written.
            raise SaveFailed(target.step, f"on rank {self._peers.rank} the previous save is still being written")
        self.start()  # Again, if a process died.
        super()._check(target)

    def _content(self, file: RankFile, target: SaveTarget) -> RankContent:
        return self._copies.content(file, target)

    def _run(self, commit: Callable[[], CheckpointInfo | None]) -> Future[CheckpointInfo | None]:
        self._under_way = durable = _run_in_thread(commit)
        durable.add_done_callback(self._note_over)
        return durable

    def _note_over(self, durable: Future[CheckpointInfo | None]) -> None:
        self._copies.release()
        if durable.exception() is not None:
            if self._under_way is durable:  # Not a save that began since.
                self._under_way = _done(None)  # The traceback of a failure keeps the state, and the copy.
            return
        for each in self._companions:
            each.durable(durable.result())


class ThreadSaver(CopyingSaver):
    """The thread writes the copy by `write`."""

    def __init__(
        self,
        peers: Peers,
        plans: PlanCache | None = None,
        *,
        write: WriteStaged = write_in_place,
        watch: StagingWatch = do_not_watch,
        copying: Copying | None = None,
        companions: Sequence[Companion] = (),
    ) -> None:
        super().__init__(peers, plans, Copies(copying or Copying(), write, watch, companions), companions)


class ProcessSaver(CopyingSaver):
    """A writer process, which maps the copy, too, writes it: that of `copying`, or one of its own."""

    def __init__(
        self,
        peers: Peers,
        timeout_seconds: float,
        ignored_signals: Sequence[str] = (),
        *,
        plans: PlanCache | None = None,
        watch: StagingWatch = do_not_watch,
        copying: Copying | None = None,
        companions: Sequence[Companion] = (),
    ) -> None:
        copying = copying or Copying()
        self.process = copying.process or WriterProcess(timeout_seconds, ignored_signals, rank=peers.rank)
        super().__init__(peers, plans, Copies(copying, self._write_in_process, watch, companions), companions)

    def start(self) -> None:
        """Start the writer process, unless it lives. Main thread."""
        self.process.start()

    def close(self, timeout_seconds: float) -> None:
        """Give the arena back and end the process, after the save under way or after that time. Idempotent."""
        super().close(timeout_seconds)
        self.process.close()

    def _write_in_process(self, new: NewFile, staged: StagedCopy, target: SaveTarget) -> FileRecord:
        return self.process.write(new, staged.arena, staged.num_bytes, target.step, staged.record)


def build_saver(
    config: Checkpoint, peers: Peers, plans: PlanCache | None = None, companions: Sequence[Companion] = ()
) -> Saver:
    """Return the saver of `config.async_mode`; its copies are made as `companions` want, and are also theirs."""
    if config.async_mode == "disabled":
        return SyncSaver(peers, plans)
    watch = build_staging_watch(config)
    copying = next((found for each in companions if (found := each.copying()) is not None), None)
    if config.async_mode == "async":
        return ThreadSaver(peers, plans, watch=watch, copying=copying, companions=companions)
    if not torch.cuda.is_available():
        logger.info("async_with_pinned_mem: no accelerator found, staging into shared memory that is not pinned")
    return ProcessSaver(
        peers,
        config.timeout_seconds,
        config.preemption_signals,
        plans=plans,
        watch=watch,
        copying=copying,
        companions=companions,
    )


def _at_once(work: Callable[[], T]) -> Future[T]:
    try:
        return _done(work())
    except CheckpointError as error:
        return _failed_future(error)


def _run_in_thread(work: Callable[[], T]) -> Future[T]:
    """Return the outcome of `work`, which a daemon thread runs: one that hangs does not keep the process alive.

    Where the system has no more threads, it runs here.
    """
    future: Future[T] = Future()
    device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def run() -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)  # A new thread begins with device 0.
            outcome = work()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(outcome)

    in_a_thread("checkpoint", run)
    return future


def refused(error: Exception, target: SaveTarget) -> PendingSave:
    """Return a save of `target` that failed on every rank before it touched the disk."""
    if not isinstance(error, SaveFailed | LeaseLost):
        error = SaveFailed(target.step, f"{type(error).__name__}: {error}")
    return PendingSave(target.step, _done(None), _failed_future(error))


def _done(value: T) -> Future[T]:
    future: Future[T] = Future()
    future.set_result(value)
    return future


def _failed_future(error: CheckpointError) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_exception(error)
    return future
