"""How the ranks leave when a scheduler asks one of them to: what is saved before, and what is said.

Every method is **collective**.
"""

from __future__ import annotations

import signal

from torchtitan_lite.checkpoint.saving.in_flight import InFlight
from torchtitan_lite.checkpoint.saving.run_saves import RunSaves
from torchtitan_lite.checkpoint.schedule.leaving import Leaving, how_to_leave
from torchtitan_lite.checkpoint.schedule.preemption import PreemptionWatch
from torchtitan_lite.distributed.consensus import Peers
from torchtitan_lite.log import logger
from torchtitan_lite.store.housekeeping import OnEvent


class Departure:
    """The leaving of all ranks together, for the signal that one of them received."""

    def __init__(
        self, preemption: PreemptionWatch, saves: RunSaves, in_flight: InFlight, peers: Peers, on_event: OnEvent
    ) -> None:
        self._preemption = preemption
        self._saves = saves
        self._in_flight = in_flight
        self._peers = peers
        self._on_event = on_event

    def untrained(self, step: int) -> int:
        """Return the signal that the ranks leave for before they train anything after `step`; 0 for none."""
        received: int = max(self._peers.gather(self._preemption.received))
        if received:
            self._preemption.leave()
            logger.info("Trained nothing after step %d; leaving for %s.", step, signal.Signals(received).name)
            self._on_event("preempted", step, signal=received, given_up_steps=0)
        return received

    def after(self, step: int, received: int) -> bool:
        """Leave after `step` for the signal `received`, something being durable: `step` (True), or what was in flight,
        if time is too short for more."""
        awaited = self._in_flight.step
        self._in_flight.outcome()  # However it ended: the ranks leave.
        if self._how(step, awaited) is Leaving.AFTER_A_SAVE:
            self._saves.full(step)
        saved = self._peers.on_coordinator(lambda: self._in_flight.last_durable)
        assert saved is not None, "each way to leave has a durable save"
        if saved != step:
            logger.warning("The grace period is too short to save step %d too; a rerun trains it again.", step)
        logger.info("Saved step %d; leaving for %s.", saved, signal.Signals(received).name)
        self._on_event("preempted", saved, signal=received, given_up_steps=step - saved)
        return saved == step

    def _how(self, step: int, awaited: int | None) -> Leaving:
        left = min(self._peers.gather(self._preemption.seconds_left()))  # The signal may have come to one rank alone.
        done = self._in_flight
        return self._peers.on_coordinator(
            lambda: how_to_leave(
                step, durable=done.last_durable, awaited=awaited, seconds_left=left, save_seconds=done.last_seconds
            )
        )
