"""The share of a run's time that went into training.

The seconds of training steps, as the caller measures them, are productive; set-up, loading and the time that a save
blocks are not. With `resume` the totals cover all starts of a run, without the steps after the checkpoint that the
restart loaded.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class Goodput:
    """Count seconds, from the moment it is made."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._start = clock()
        self._productive_seconds = 0.0

    def add_productive(self, seconds: float) -> None:
        """Add `seconds` that went into training steps."""
        self._productive_seconds += seconds

    def resume(self, run_seconds: float, productive_seconds: float) -> None:
        """Add the totals of the earlier starts of this run."""
        self._start -= run_seconds
        self._productive_seconds += productive_seconds

    @property
    def run_seconds(self) -> float:
        """Seconds of the run so far, over all of its starts."""
        return self._clock() - self._start

    @property
    def productive_seconds(self) -> float:
        """The seconds of it that went into training steps."""
        return self._productive_seconds

    def percent(self) -> float:
        """Return productive seconds in percent of all seconds; 0 while no time has passed."""
        elapsed = self.run_seconds
        return min(100.0, 100.0 * self._productive_seconds / elapsed) if elapsed > 0 else 0.0
