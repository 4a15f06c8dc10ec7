"""Signals that come when a test says so."""

from __future__ import annotations

import math
import threading

from torchtitan_lite.checkpoint.schedule.preemption import PreemptionWatch


class Told(PreemptionWatch):
    """Watches nothing; the test says what was received, and how much time is left."""

    def __init__(self, seconds_left: float = math.inf) -> None:
        super().__init__((), grace_seconds=60)
        self._seconds_left = seconds_left
        self.agreed = threading.Event()
        """Set when the ranks agreed to leave."""

    def seconds_left(self) -> float:
        return self._seconds_left

    def leave(self) -> None:
        self.agreed.set()

    def receive(self, number: int) -> None:
        self._received = number
