"""How much of the time went into training.

Productive are the seconds of training steps, as their caller measures them. Set-up, loading, and
standing still for a save are not. Work that a restart repeats counts as done: one process does not
know what another one lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class Goodput:
    """Counts from its making."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._start = clock()
        self._productive_seconds = 0.0

    def add_productive(self, seconds: float) -> None:
        """`seconds` more went into training steps."""
        self._productive_seconds += seconds

    def percent(self) -> float:
        """Productive seconds per 100 seconds since the start, 0 while no time has passed."""
        elapsed = self._clock() - self._start
        return min(100.0, 100.0 * self._productive_seconds / elapsed) if elapsed > 0 else 0.0
