"""The save in flight, and how the last ones ended.

One save is in flight at most. It is settled when it is durable or failed: a durable one is followed
by retention, which so counts only what is durable; a failed one is reported, counted and dropped,
and only `max_failed_saves` in a row are an error of the run. Success is noticed by each rank as it
polls; failure is a fact that the ranks exchange first, so that they act on it in the same step.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field

from torchtitan_lite import faults
from torchtitan_lite.checkpoint.saving.savers import PendingSave, SavesStates, State
from torchtitan_lite.checkpoint.saving.writer import Origin, Target, free
from torchtitan_lite.config.job_config import Checkpoint
from torchtitan_lite.disk.at_exit import end_at_exit, is_finished
from torchtitan_lite.disk.forks import forget_in_children
from torchtitan_lite.distributed.consensus import Peers
from torchtitan_lite.errors import LeaseLost, SaveFailed
from torchtitan_lite.log import logger, readable_bytes
from torchtitan_lite.store.housekeeping import Housekeeping, OnEvent
from torchtitan_lite.store.manifest import CheckpointInfo, CheckpointKind
from torchtitan_lite.store.store import CheckpointStore


@dataclass
class _Save:
    """One save, until it is settled."""

    pending: PendingSave
    kind: CheckpointKind
    store: CheckpointStore
    fence: Callable[[], None]
    began_seconds: float
    stall_seconds: float = 0.0
    durable_seconds: float = 0.0
    over: Future[None] = field(default_factory=Future)
    """Done when retention, or the removal of what a failed save left, is over too; a thread that waits for `durable`
    may go on before."""


class InFlight:
    """The save in flight, if there is one. `timeout_seconds` bounds each wait, `exit_seconds` that at the exit."""

    def __init__(
        self,
        peers: Peers,
        housekeeping: Housekeeping,
        *,
        timeout_seconds: float,
        max_failed_saves: int,
        clock: Callable[[], float],
        on_event: OnEvent,
        exit_seconds: float | None = None,
    ) -> None:
        self._peers = peers
        self._exit_seconds = timeout_seconds if exit_seconds is None else exit_seconds
        self._housekeeping = housekeeping
        self._timeout_seconds = timeout_seconds
        self._max_failed_saves = max_failed_saves
        self._clock = clock
        self._on_event = on_event
        self._save: _Save | None = None
        self._failed_in_a_row = 0
        self.last_durable: int | None = None
        """The step that was saved last, durably."""
        self.last_seconds: float | None = None
        """How long that save took, from its beginning until it was durable."""
        forget_in_children(self.forget)

    @property
    def step(self) -> int | None:
        """The step of the save in flight. Not collective."""
        return None if self._save is None else self._save.pending.step

    @property
    def failed(self) -> bool:
        """Whether this rank knows that the save in flight failed. Not collective."""
        return self._save is not None and _failed(self._save.pending.durable)

    @property
    def is_writing(self) -> bool:
        """Whether the save in flight is neither durable nor failed on this rank. Not collective."""
        return self._save is not None and not self._save.pending.durable.done()

    def begin(
        self,
        step: int,
        state: State,
        kind: CheckpointKind,
        store: CheckpointStore,
        saver: SavesStates,
        origin: Origin,
        fence: Callable[[], None] = free,
    ) -> None:
        """Sets off a save of `state`; nothing may be in flight. **Collective**.

        `fence` raises `LeaseLost` if the folder is no longer this job's; asked on the coordinator, before anything
        there is touched and before the commit.
        """
        assert self._save is None, "settle() comes first"
        began = self._clock()
        self._on_event("save_started", step, kind=kind.value)
        faults.set_step(step)
        faults.point("save")
        target = Target(store, step, kind, origin, fence=fence, check=lambda: self._preflight(step, kind, store, fence))
        save = _Save(saver.save(state, target), kind, store, fence, began_seconds=began)
        save.pending.durable.add_done_callback(lambda _: self._when_over(save))
        save.stall_seconds = self._clock() - began
        self._save = save
        if not save.over.done():
            end_at_exit(self)
        self._on_event("staged", step, stall_seconds=save.stall_seconds)

    def forget_lineage(self) -> None:
        """Another checkpoint was loaded: what was saved before is no step of the run that goes on. Any rank."""
        self.last_durable = None

    def forget(self) -> None:
        """Have nothing in flight, in a child that was just forked: the thread that saves is its parent's."""
        self._save = None
        is_finished(self)

    def end_at_exit(self) -> None:
        """Wait for the save in flight, and tell how it ended: nobody will settle it any more. Not collective."""
        if (save := self._save) is None:
            return
        self._save = None
        step, seconds, began = save.pending.step, self._exit_seconds, self._clock()
        if not save.over.done():
            logger.warning(
                "The checkpoint manager was not closed: waiting up to %.0f s for the save of step %d. "
                "Use it in a with statement, or call close().",
                seconds,
                step,
            )
            wait_for([save.over], seconds)
        if not save.pending.durable.done():
            logger.warning("Step %d is not saved: its save was not over after %.0f s.", step, seconds)
        elif (failure := save.pending.durable.exception()) is not None:
            logger.warning("Step %d is not saved: %s", step, next(iter(str(failure).splitlines()), ""))
        else:
            self._report_saved(save)
            self._housekeeping.close(max(0.0, seconds - (self._clock() - began)))

    def wait_for_staging(self) -> None:
        """Returns when the state may change. Not collective. Raises `SaveFailed` if that takes too long."""
        if self._save is not None and not self._save.pending.staged.done():
            began = self._clock()
            try:
                self._save.pending.staged.result(self._timeout_seconds)
            except FutureTimeout:
                seconds = f"{self._timeout_seconds:.0f} s (checkpoint.timeout_seconds)"
                raise SaveFailed(self._save.pending.step, f"not staged after {seconds}") from None
            self._save.stall_seconds += self._clock() - began

    def poll(self) -> None:
        """Takes note of a save that became durable; returns at once. Not collective."""
        if self._save is not None and self._save.over.done() and not self.failed:
            self.settle()

    def settle(self) -> SaveFailed | None:
        """Waits until nothing is in flight; returns how the save failed, if it did. Every rank comes to the same end.

        Raises that failure when it is one too many in a row.
        """
        failure = self.outcome()
        if failure is not None and self._failed_in_a_row >= self._max_failed_saves:
            raise failure
        return failure

    def outcome(self) -> SaveFailed | None:
        """As `settle`, and leaves it to the caller what a failure means."""
        if self._save is None:
            return None
        save, began = self._save, self._clock()
        self._save = None
        is_finished(self)
        failure = _outcome(save.pending, self._timeout_seconds)
        if save.pending.durable.done():
            wait_for([save.over], self._timeout_seconds)
        else:
            self._peers.is_group_in_doubt = True  # Its thread may hang in it.
        save.stall_seconds += self._clock() - began
        if failure is None:
            self._failed_in_a_row = 0
            self.last_durable, self.last_seconds = save.pending.step, save.durable_seconds
            self._report_saved(save)
        else:
            self._failed_in_a_row += 1
            self._report_failed(save, failure)
        return failure

    def _when_over(self, save: _Save) -> None:
        """Runs in the thread that saved, as soon as the save is over."""
        save.durable_seconds = self._clock() - save.began_seconds
        try:
            if not self._peers.is_coordinator:
                return
            if _failed(save.pending.durable):
                if not isinstance(save.pending.durable.exception(), LeaseLost):
                    self._housekeeping.abandon(save.pending.step, save.store)
                return
            if (committed := save.pending.durable.result()) is not None:
                self._housekeeping.note_committed(committed, save.store)
            self._housekeeping.purge_when_there_is_time(save.store, save.fence)
        finally:
            save.over.set_result(None)

    def _preflight(self, step: int, kind: CheckpointKind, store: CheckpointStore, fence: Callable[[], None]) -> None:
        """Refuses a save that would fail half-way: the folder is another job's by now, or the disk has no room."""
        if self._peers.is_coordinator:
            fence()  # First: making room, and then staging, remove what a save of the other job has staged.
            self._housekeeping.make_sure_of_room(step, kind, store)

    def _report_saved(self, save: _Save) -> None:
        committed = save.pending.durable.result()
        if committed is None:
            return  # It is the coordinator that tells.
        step, stall, nbytes = save.pending.step, save.stall_seconds, committed.nbytes
        logger.info(
            "saved step %d%s: %s in %.2f s (training stood still %.3f s)",
            step,
            " (weights only)" if save.kind is CheckpointKind.WEIGHTS_ONLY else "",
            readable_bytes(nbytes),
            save.durable_seconds,
            stall,
        )
        self._on_event(
            "committed",
            step,
            kind=save.kind.value,
            bytes=nbytes,
            seconds=save.durable_seconds,
            stall_seconds=stall,
        )

    def _report_failed(self, save: _Save, failure: SaveFailed) -> None:
        limit = self._max_failed_saves
        logger.error("%s (failed save %d of at most %d in a row)", failure, self._failed_in_a_row, limit)
        self._on_event("save_failed", save.pending.step, reason=failure.cause, in_a_row=self._failed_in_a_row)


def _failed(durable: Future[CheckpointInfo | None]) -> bool:
    return durable.done() and durable.exception() is not None


def _outcome(pending: PendingSave, timeout_seconds: float) -> SaveFailed | None:
    """How `pending` failed, if it did. Raises `LeaseLost`: no further try can succeed."""
    try:
        failure = pending.durable.exception(timeout_seconds)
    except FutureTimeout:
        return SaveFailed(pending.step, f"not durable after {timeout_seconds:.0f} s (checkpoint.timeout_seconds)")
    if isinstance(failure, LeaseLost):
        raise failure
    if failure is None or isinstance(failure, SaveFailed):
        return failure
    return SaveFailed(pending.step, f"{type(failure).__name__}: {failure}")


def build_in_flight(
    config: Checkpoint, peers: Peers, housekeeping: Housekeeping, clock: Callable[[], float], on_event: OnEvent
) -> InFlight:
    """Return what watches the saves of a run."""
    return InFlight(
        peers,
        housekeeping,
        timeout_seconds=config.timeout_seconds,
        max_failed_saves=config.max_failed_saves,
        clock=clock,
        on_event=on_event,
        exit_seconds=min(config.preemption_grace_seconds, config.timeout_seconds),
    )
