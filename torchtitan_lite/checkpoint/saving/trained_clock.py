"""The seconds that a run has trained, in all its starts up to the state that it has.

An image and a checkpoint record them, so a start knows how much training the disk lacks. Time between starts, and what
a start does before its loop, is no training; what a killed start trained after its last image is gone.
"""

from __future__ import annotations

from collections.abc import Callable


class TrainedClock:
    """Counts from its construction on, by `clock`. Each rank counts its own; all continue from the same seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # A total, not the seconds that the disk lacks: these change with each commit, which would have to renew the
        # card of every image.
        self._before, self._since = 0.0, clock()

    @property
    def seconds(self) -> float:
        """Return the seconds of training up to now."""
        return self._before + self._clock() - self._since

    def continue_from(self, seconds: float) -> None:
        """Count on from `seconds`, of a state that was loaded."""
        self._before, self._since = seconds, self._clock()

    def note_step(self) -> None:
        """Note that a step has ended: what was counted so far was training."""
        self.continue_from(self.seconds)

    def restart(self) -> None:
        """Leave out what has passed since the last step or load: the loop begins only now."""
        self._since = self._clock()
