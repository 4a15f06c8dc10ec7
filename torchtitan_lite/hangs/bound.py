"""How long a step may take before its rank counts as hung, and how long it has taken. Values only: no clock."""

from __future__ import annotations

import math
from collections import deque
from typing import Literal

STEPS_BEFORE_AUTO = 10
"""Steps of a start before "auto" watches. A number of seconds counts from the first step on, which may compile."""
SLOWEST_OF = 100
FACTOR = 10.0
LEAST_SECONDS = 60.0


class Bound:
    """The most seconds that a step may take, by the key `comm.hang_seconds` and the steps of this start."""

    def __init__(self, setting: int | Literal["auto"]) -> None:
        self._fixed_seconds = None if setting == "auto" else float(setting)
        self._steps_before = STEPS_BEFORE_AUTO if setting == "auto" else 1
        self._num_steps = 0
        self._last_steps: deque[float] = deque(maxlen=SLOWEST_OF)

    def step_took(self, seconds: float) -> None:
        """Note that a step of this start is over; `seconds` are without its pauses. The first one, which may compile,
        says nothing about the others."""
        self._num_steps += 1
        if self._num_steps > 1:
            self._last_steps.append(seconds)

    @property
    def seconds(self) -> float:
        """The most that the next step may take; 0 while no step is watched."""
        if self._num_steps < self._steps_before:
            return 0.0
        if self._fixed_seconds is not None:
            return self._fixed_seconds
        return max(LEAST_SECONDS, FACTOR * max(self._last_steps))


class Stillness:
    """How long the count of a rank has stood, in time in which the watcher itself ran.

    So a job that is suspended and continued, with its watchers, has not hung.
    """

    def __init__(self) -> None:
        self._count = -1
        self._last_look = 0.0
        self._seconds = 0.0
        self.since_pause = math.inf
        """Seconds since the last pause was seen; infinity if none was."""

    def look(self, now: float, count: int, *, is_paused: bool, tick_seconds: float) -> float:
        """Return the seconds for which `count` has stood at `now`; 0 in a pause.

        `tick_seconds` are those until the look after this one was to come.
        """
        passed = min(now - self._last_look, 2 * tick_seconds)
        self._seconds = 0.0 if is_paused or count != self._count else self._seconds + passed
        self.since_pause = 0.0 if is_paused else self.since_pause + passed
        self._count, self._last_look = count, now
        return self._seconds
