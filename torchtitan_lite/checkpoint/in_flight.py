"""The save in flight, and how the last ones ended.

One save is in flight at most. It is settled when it is durable or failed: a durable one is followed
by retention, which so counts only what is durable; a failed one is reported, counted and dropped,
and only `max_failed_saves` in a row are an error of the run. Success is noticed by each rank as it
polls; failure is a fact that the ranks exchange first, so that they act on it in the same step.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field
from typing import Any, Protocol

from torchtitan_lite.checkpoint.savers import PendingSave, Saver, State
from torchtitan_lite.checkpoint.writer import CommittingWriter, Origin
from torchtitan_lite.distributed.consensus import Peers
from torchtitan_lite.errors import SaveFailed
from torchtitan_lite.log import logger, readable_bytes
from torchtitan_lite.store.manifest import CheckpointKind
from torchtitan_lite.store.retention import RetentionPolicy, to_purge
from torchtitan_lite.store.store import CheckpointStore


class OnEvent(Protocol):
    """Takes what happened to which step, with its figures; called from any thread."""

    def __call__(self, event: str, step: int, /, **figures: Any) -> None: ...


@dataclass
class _Save:
    """One save, until it is settled."""

    pending: PendingSave
    kind: CheckpointKind
    store: CheckpointStore
    began_seconds: float
    stall_seconds: float = 0.0
    durable_seconds: float = 0.0
    over: Future[None] = field(default_factory=Future)
    """Done when retention, or the removal of what a failed save left, is over too; a thread that waits for `durable`
    may go on before."""


class InFlight:
    """The save in flight, if there is one. `timeout_seconds` bounds each wait."""

    def __init__(
        self,
        peers: Peers,
        retention: RetentionPolicy,
        *,
        timeout_seconds: float,
        max_failed_saves: int,
        clock: Callable[[], float],
        on_event: OnEvent,
    ) -> None:
        self._peers = peers
        self._retention = retention
        self._timeout_seconds = timeout_seconds
        self._max_failed_saves = max_failed_saves
        self._clock = clock
        self._on_event = on_event
        self._save: _Save | None = None
        self._failed_in_a_row = 0
        self.last_durable: int | None = None
        """The step that was saved last, durably."""

    @property
    def failed(self) -> bool:
        """Whether this rank knows that the save in flight failed. Not collective."""
        return self._save is not None and _failed(self._save.pending.durable)

    def begin(
        self, step: int, state: State, kind: CheckpointKind, store: CheckpointStore, saver: Saver, origin: Origin
    ) -> None:
        """Sets off a save of `state`; nothing may be in flight. **Collective**."""
        assert self._save is None, "settle() comes first"
        began = self._clock()
        self._on_event("save_started", step, kind=kind.value)
        gc.collect(1)
        writer = CommittingWriter(store, step, kind, origin, write_items=saver.write_items)
        save = _Save(saver.save(state, writer, step), kind, store, began_seconds=began)
        save.pending.durable.add_done_callback(lambda _: self._when_over(save))
        save.stall_seconds = self._clock() - began
        self._save = save
        self._on_event("staged", step, stall_seconds=save.stall_seconds)

    def wait_for_staging(self) -> None:
        """Returns when the state may change. Not collective."""
        if self._save is not None and not self._save.pending.staged.done():
            began = self._clock()
            self._save.pending.staged.result(self._timeout_seconds)
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
        failure = _outcome(save.pending, self._timeout_seconds)
        if save.pending.durable.done():
            wait_for([save.over], self._timeout_seconds)
        save.stall_seconds += self._clock() - began
        self._save = None
        if failure is None:
            self._failed_in_a_row = 0
            self.last_durable = save.pending.step
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
                self._abandon(save)
            else:
                self._purge(save.store, newest=save.pending.step)
        finally:
            save.over.set_result(None)

    def _abandon(self, save: _Save) -> None:
        try:
            save.store.abandon(save.pending.step)
        except OSError as error:
            logger.warning("Could not remove what the failed save of step %d left: %s", save.pending.step, error)

    def _purge(self, store: CheckpointStore, newest: int) -> None:
        for info in to_purge(self._retention, store.committed(), protected={newest}):
            try:
                store.delete(info)
            except OSError as error:
                logger.warning("Could not remove %s, which is no longer kept: %s. It stays.", info.path, error)
            else:
                self._on_event("purged", info.step, bytes=info.nbytes)

    def _report_saved(self, save: _Save) -> None:
        if not self._peers.is_coordinator:
            return
        step, stall = save.pending.step, save.stall_seconds
        nbytes = save.store.get(step).nbytes
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


def _failed(durable: Future[None]) -> bool:
    return durable.done() and durable.exception() is not None


def _outcome(pending: PendingSave, timeout_seconds: float) -> SaveFailed | None:
    try:
        failure = pending.durable.exception(timeout_seconds)
    except FutureTimeout:
        return SaveFailed(pending.step, f"not durable after {timeout_seconds:.0f} s (checkpoint.timeout_seconds)")
    if failure is None or isinstance(failure, SaveFailed):
        return failure
    return SaveFailed(pending.step, f"{type(failure).__name__}: {failure}")
