"""The clock of the tests: time passes where a test says so, and a wait is over at once.

Where a promise is about seconds, what keeps it reads its clock through a seam. With this one a test of minutes takes
none; the same promise is kept in real seconds by one test of a job, which waits next to others (`tests/slots.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from torchtitan_lite.store.lease import LeaseClock


class Clock:
    """Shows `seconds`, which a test sets and `sleep` adds to. `slept` has the length of each wait.

    `during` is called in each wait, with its length, before it is over.
    """

    def __init__(self, seconds: float = 1000.0, during: Callable[[float], object] = lambda seconds: None) -> None:
        self.seconds = seconds
        self.slept: list[float] = []
        self._during = during

    def __call__(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds
        self.slept.append(seconds)
        self._during(seconds)

    @property
    def of_a_bucket(self) -> LeaseClock:
        """For a store; its hearts beat once and stop."""
        return LeaseClock(self.sleep, self, self, _stop)


def _stop(event: threading.Event, seconds: float) -> bool:
    return True
