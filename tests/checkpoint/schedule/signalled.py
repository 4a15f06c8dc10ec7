"""Preemption without signals: the test says when one is received."""

from __future__ import annotations

import math
import threading

from torchtitan_lite.checkpoint.schedule.preemption import PreemptionWatch


class FakePreemption(PreemptionWatch):
    """Watches no signals; the test sets what is received and how much time is left."""

    def __init__(self, seconds_left: float = math.inf) -> None:
        super().__init__((), grace_seconds=60)
        self._seconds_left = seconds_left
        self.agreed = threading.Event()
        """Set once the ranks have agreed to leave."""

    def seconds_left(self) -> float:
        return self._seconds_left

    def leave(self) -> None:
        self.agreed.set()

    def receive(self, number: int) -> None:
        self._received = number
