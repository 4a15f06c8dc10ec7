"""How the ranks leave after a scheduler's signal to one of them: what they save before, and what they report.

Every method is **collective**.
"""

from __future__ import annotations

import signal

from torchtitan_lite.checkpoint.context import RunContext
from torchtitan_lite.checkpoint.saving.in_flight import InFlightSave
from torchtitan_lite.checkpoint.saving.maker import SaveMaker
from torchtitan_lite.checkpoint.schedule.leaving import Leaving, how_to_leave
from torchtitan_lite.checkpoint.schedule.preemption import PreemptionWatch
from torchtitan_lite.events import Preempted
from torchtitan_lite.log import logger


class Departure:
    """Makes all ranks leave together for a signal that one of them received."""

    def __init__(
        self, preemption: PreemptionWatch, maker: SaveMaker, in_flight: InFlightSave, context: RunContext
    ) -> None:
        self._preemption = preemption
        self._maker = maker
        self._in_flight = in_flight
        self._peers = context.peers
        self._emit = context.emit

    @property
    def received(self) -> int:
        """Return the signal that this rank received, 0 for none. Any rank."""
        return self._preemption.received

    def leave(self) -> None:
        """Note that the ranks have agreed to leave: from now on the grace period counts for all. Any rank."""
        self._preemption.leave()

    def untrained(self, step: int) -> int:
        """Return the signal for which the ranks leave before they train anything after `step`; 0 for none."""
        received: int = max(self._peers.gather(self._preemption.received))
        if received:
            self._preemption.leave()
            logger.info("Trained nothing after step %d; leaving for %s", step, signal.Signals(received).name)
            self._emit(Preempted(step, signal=received, given_up_steps=0))
        return received

    def after(self, step: int, received: int) -> bool:
        """Save what the grace period has time for, and report that the ranks leave for the signal `received`.

        Returns whether `step` is durable; if not, the save that was in flight is. Raises as `SaveMaker.full` does.
        """
        awaited = self._in_flight.step
        self._in_flight.outcome()  # Whether it failed or not, the ranks leave.
        if self._how(step, awaited) is Leaving.AFTER_A_SAVE:
            self._maker.full(step)
        saved = self._peers.on_coordinator(lambda: self._in_flight.last_durable)
        assert saved is not None, "each way to leave has a durable save"
        if saved != step:
            logger.warning("The grace period is too short to save step %d; the next start trains it again", step)
        logger.info("Saved step %d; leaving for %s", saved, signal.Signals(received).name)
        self._emit(Preempted(saved, signal=received, given_up_steps=step - saved))
        return saved == step

    def _how(self, step: int, awaited: int | None) -> Leaving:
        # Perhaps only one rank received the signal.
        left = min(self._peers.gather(self._preemption.seconds_left()))
        done = self._in_flight
        return self._peers.on_coordinator(
            lambda: how_to_leave(
                step, durable=done.last_durable, awaited=awaited, seconds_left=left, save_seconds=done.last_seconds
            )
        )
