"""How much of the time went into training.

Productive are the seconds of training steps, as their caller measures them. Set-up, loading, and
standing still for a save are not. With `resume` the totals go over all starts of a run; what was
trained after the checkpoint that a restart goes on from is in neither.
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

    def resume(self, run_seconds: float, productive_seconds: float) -> None:
        """Goes on from the totals of the starts before this one."""
        self._start -= run_seconds
        self._productive_seconds += productive_seconds

    @property
    def run_seconds(self) -> float:
        """All seconds so far."""
        return self._clock() - self._start

    @property
    def productive_seconds(self) -> float:
        """Those that went into training steps."""
        return self._productive_seconds

    def percent(self) -> float:
        """Productive seconds per 100 seconds since the start, 0 while no time has passed."""
        elapsed = self.run_seconds
        return min(100.0, 100.0 * self._productive_seconds / elapsed) if elapsed > 0 else 0.0
