"""The save in flight, and how the last saves ended.

At most one save is in flight. It is settled once it is durable or has failed. Retention runs after a
durable one, so that it counts only durable checkpoints. A failed one is reported, counted and dropped;
only `max_failed_saves` failures in a row end the run. Each rank acts on success when it polls; a failure
goes through the step flags first, so that all ranks act on it in the same step. The event of a durable
save comes at once, from the thread that saved, because the next call may be hours away; if the loop waits
for it, from the loop, with that wait.
"""

from __future__ import annotations

import atexit
import gc
import threading
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from concurrent.futures import wait as wait_for
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from traceback import format_exception

from torchtitan_lite import faults
from torchtitan_lite.checkpoint.context import RunContext
from torchtitan_lite.checkpoint.saving.savers import PendingSave
from torchtitan_lite.checkpoint.saving.target import Origin, SaveTarget
from torchtitan_lite.disk.forks import forget_in_children
from torchtitan_lite.errors import LeaseLost, RanksDiffer, SaveFailed
from torchtitan_lite.events import Committed, SaveFailure, SaveStaged, SaveStarted
from torchtitan_lite.log import logger, readable_bytes
from torchtitan_lite.store.housekeeping import Housekeeping
from torchtitan_lite.store.manifest import CheckpointInfo, CheckpointKind
from torchtitan_lite.store.protocol import StoresCheckpoints


@dataclass
class _Save:
    """One save, until it is settled."""

    target: SaveTarget
    pending: PendingSave
    began_seconds: float
    stall_seconds: float = 0.0
    durable_seconds: float = 0.0
    is_given_up: bool = False
    """Whether the loop waited for its staging as long as for a complete save: no code waits for it again."""
    is_awaited: bool = False
    """Whether the loop waits for it."""
    has_event: bool = False
    """Whether the event that says that it is durable was emitted."""
    over: Future[None] = field(default_factory=Future)
    """Done when retention, or the removal of a failed save's leftovers, is over, too. Threads that wait for `durable`
    may wake before that."""


class InFlightSave:
    """Waits for the save in flight, if any: at most `timeout_seconds` each time, at exit also at most the grace."""

    def __init__(self, housekeeping: Housekeeping, context: RunContext) -> None:
        config = context.config
        self._housekeeping = housekeeping
        self._timeout_seconds = config.timeout_seconds
        self._exit_seconds = min(config.preemption_grace_seconds, config.timeout_seconds)
        self._max_failed_saves = config.max_failed_saves
        self._peers, self._clock, self._emit = context.peers, context.clock, context.emit
        self._save: _Save | None = None
        self._began = 0.0
        self._emitting = threading.Lock()
        self._failed_in_a_row = 0
        self.differs: RanksDiffer | None = None
        """What is wrong with the state that was saved last, although it was written."""
        self.last_durable: int | None = None
        """The last step that became durable."""
        self.last_seconds: float | None = None
        """Seconds from the beginning of that save until it was durable."""
        forget_in_children(self.forget)

    @property
    def step(self) -> int | None:
        """The step of the save in flight, None for none. Any rank."""
        return None if self._save is None else self._save.pending.step

    @property
    def failed(self) -> bool:
        """Whether the save in flight has failed, as far as this rank knows. Any rank."""
        return self._save is not None and _has_failed(self._save.pending.durable)

    @property
    def is_writing(self) -> bool:
        """Whether the save in flight is neither durable nor failed on this rank. Any rank."""
        return self._save is not None and not self._save.pending.durable.done()

    def begin(
        self, step: int, kind: CheckpointKind, store: StoresCheckpoints, origin: Origin, *, writes_anyway: bool = False
    ) -> SaveTarget:
        """Note that the save of `step` begins, and return what it creates; nothing may be in flight. Any rank."""
        assert self._save is None, "settle() comes first"
        self._began = self._clock()
        at_risk_steps, at_risk_seconds = origin.at_risk
        self._emit(SaveStarted(step, kind=kind.value, at_risk_steps=at_risk_steps, at_risk_seconds=at_risk_seconds))
        faults.set_step(step)
        faults.point("save")
        check = partial(self._preflight, step, kind, store)
        return SaveTarget(store, step, kind, origin, check=check, writes_anyway=writes_anyway)

    def note_refused(self, step: int, error: RanksDiffer) -> None:
        """Note that the save of `step` is not made, although it began, because ranks differ. Any rank."""
        self._emit(SaveFailure(step, reason=str(error), in_a_row=self._failed_in_a_row))

    def follow(self, target: SaveTarget, pending: PendingSave) -> None:
        """Have `pending`, the save of `target` that began last, in flight. Any rank."""
        self.differs = pending.differs
        save = _Save(target, pending, began_seconds=self._began)
        save.pending.durable.add_done_callback(lambda durable: self._when_over(save, durable))
        save.stall_seconds = self._clock() - self._began
        self._save = save
        if not save.over.done():
            # The threads that save are daemon threads, so one that hangs cannot keep the process alive. Registered now,
            # not at import: what is registered last is called first, while the process groups still exist.
            atexit.register(self.end_at_exit)
        self._emit(SaveStaged(target.step, stall_seconds=save.stall_seconds))
        save.pending.durable.add_done_callback(lambda durable: self._emit_at_once(save, durable))

    def forget_lineage(self) -> None:
        """Forget the last durable step, because another checkpoint was loaded: it is no step of that run. Any rank."""
        self.last_durable = None

    def forget(self) -> None:
        """Drop the save in flight, in a child that was just forked: the thread that saves belongs to its parent."""
        self._save = None
        atexit.unregister(self.end_at_exit)

    def end_at_exit(self) -> None:
        """Wait for the save in flight at the interpreter's exit, and log how it ended. Any rank."""
        if (save := self._save) is None:
            return
        self._save = None
        with self._emitting:
            save.is_awaited = True
        step, seconds, began = save.pending.step, self._exit_seconds, self._clock()
        if not save.over.done():
            logger.warning(
                "The checkpoint manager was not closed: waiting up to %.0f s for the save of step %d. "
                "Use it in a with statement, or call close()",
                seconds,
                step,
            )
            wait_for([save.over], seconds)
        if not save.pending.durable.done():
            logger.warning("Step %d is not saved: its save had not ended after %.0f s", step, seconds)
        elif (failure := save.pending.durable.exception()) is not None:
            logger.warning("Step %d is not saved: %s", step, next(iter(str(failure).splitlines()), ""))
        else:
            self._report_saved(save)
            self._housekeeping.close(max(0.0, seconds - (self._clock() - began)))

    def wait_for_staging(self) -> None:
        """Wait until the state may change. Any rank. Raises `SaveFailed` after `timeout_seconds`.

        The state of this rank alone may not change then, so the rank has to leave; the others wait for it in training.
        """
        if self._save is not None and not self._save.pending.staged.done():
            began = self._clock()
            try:
                self._save.pending.staged.result(self._seconds_for(self._save))
            except FutureTimeout:
                self._save.is_given_up = True
                seconds = f"{self._timeout_seconds:.0f} s (checkpoint.timeout_seconds)"
                raise SaveFailed(self._save.pending.step, f"not staged after {seconds}") from None
            self._save.stall_seconds += self._clock() - began

    def poll(self) -> None:
        """Settle a save that has become durable; return at once. Any rank."""
        if self._save is not None and self._save.over.done() and not self.failed:
            self.settle()

    def settle(self) -> SaveFailed | None:
        """Wait until nothing is in flight; return the save's failure, None if it is durable or there was none.

        Each rank waits by itself and gets the same result. Raises the failure if it is number `max_failed_saves` in a
        row.
        """
        failure = self.outcome()
        if failure is not None and self._failed_in_a_row >= self._max_failed_saves:
            raise failure
        return failure

    def outcome(self) -> SaveFailed | None:
        """Wait as `settle` does, and return the failure however many there were in a row."""
        if self._save is None:
            return None
        save, began = self._save, self._clock()
        with self._emitting:
            save.is_awaited = True
        # While the save is in flight here: Ctrl-C may end these waits, and the next call waits again.
        with suppress(FutureTimeout):
            save.pending.durable.exception(self._seconds_for(save))
            wait_for([save.over], self._timeout_seconds)
        self._save = None
        atexit.unregister(self.end_at_exit)
        failure = _outcome(save.pending, self._timeout_seconds)
        if not save.pending.durable.done():
            # The save's thread may hang in a collective of the group.
            self._peers.is_group_in_doubt = True
        save.stall_seconds += self._clock() - began
        if failure is None:
            self._failed_in_a_row = 0
            self.last_durable, self.last_seconds = save.pending.step, save.durable_seconds
            self._report_saved(save)
        else:
            self._failed_in_a_row += 1
            in_a_row, limit = self._failed_in_a_row, self._max_failed_saves
            # As text: a handler that keeps records would keep its traceback, and with it the state.
            logger.error("%s (failed save %d of at most %d in a row)", str(failure), in_a_row, limit)
            self._emit(SaveFailure(save.pending.step, reason=failure.cause, in_a_row=in_a_row))
        del save.pending  # Its callbacks have the save: only garbage collection, now and then, would free both.
        if failure is not None:
            failure = _without_state(failure)
            gc.collect()
        return failure

    def _seconds_for(self, save: _Save) -> float:
        return 0.0 if save.is_given_up else self._timeout_seconds

    def _when_over(self, save: _Save, durable: Future[CheckpointInfo | None]) -> None:
        """Run retention or cleanup, in the thread that saved, as soon as the save is over."""
        save.durable_seconds, target = self._clock() - save.began_seconds, save.target
        try:
            if not self._peers.is_coordinator:
                return
            if _has_failed(durable):
                if place := target.found.place:
                    self._housekeeping.remove_failed_save(target.step, target.store, place)
                return
            if (committed := durable.result()) is not None:
                self._housekeeping.note_committed(committed, target.store)
            self._housekeeping.purge_when_there_is_time(target.store)
        finally:
            save.over.set_result(None)

    def _preflight(self, step: int, kind: CheckpointKind, store: StoresCheckpoints) -> None:
        """Raise for a save that would fail half-way: the folder belongs to another job, or the disk has no room."""
        if self._peers.is_coordinator:
            self._housekeeping.make_sure_of_room(step, kind, store)

    def _report_saved(self, save: _Save) -> None:
        committed = save.pending.durable.result()
        if committed is None:
            return  # The coordinator reports it.
        step, stall, nbytes = save.pending.step, save.stall_seconds, committed.nbytes
        logger.info(
            "Saved step %d: %s in %.2f s (blocked %.3f s)%s",
            step,
            readable_bytes(nbytes),
            save.durable_seconds,
            stall,
            ", weights only" if save.target.kind is CheckpointKind.WEIGHTS_ONLY else "",
        )
        self._emit_committed(save, committed)

    def _emit_at_once(self, save: _Save, durable: Future[CheckpointInfo | None]) -> None:
        with self._emitting:
            if save.is_awaited or _has_failed(durable):
                return
            if (committed := durable.result()) is not None:
                self._emit_committed(save, committed)

    def _emit_committed(self, save: _Save, committed: CheckpointInfo) -> None:
        if save.has_event:
            return
        save.has_event = True
        slowest_rank, slowest_seconds = save.target.found.slowest
        self._emit(
            Committed(
                committed.step,
                kind=save.target.kind.value,
                bytes=committed.nbytes,
                seconds=save.durable_seconds,
                stall_seconds=save.stall_seconds,
                slowest_rank=slowest_rank,
                slowest_seconds=slowest_seconds,
            )
        )


def _has_failed(durable: Future[CheckpointInfo | None]) -> bool:
    return durable.done() and durable.exception() is not None


def _without_state(failure: SaveFailed) -> SaveFailed:
    """Return `failure` with what led to it as text: the frames of tracebacks keep the state that was to be saved."""
    alone = SaveFailed(failure.step, failure.cause)
    if failure.__cause__ is not None:
        alone.__cause__ = RuntimeError("\n" + "".join(format_exception(failure.__cause__)))
    return alone


def _outcome(pending: PendingSave, timeout_seconds: float) -> SaveFailed | None:
    """Return the failure of `pending`, None if it is durable. Raises `LeaseLost`: no further try can succeed.

    The caller has waited for `timeout_seconds`.
    """
    if not pending.durable.done():
        return SaveFailed(pending.step, f"not durable after {timeout_seconds:.0f} s (checkpoint.timeout_seconds)")
    failure = pending.durable.exception()
    if isinstance(failure, LeaseLost):
        raise failure
    if failure is None or isinstance(failure, SaveFailed):
        return failure
    return SaveFailed(pending.step, f"{type(failure).__name__}: {failure}")
