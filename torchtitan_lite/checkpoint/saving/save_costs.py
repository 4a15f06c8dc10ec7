"""What the saves of this start cost, measured from the ends of its steps.

The cost of a save is the time that it adds to the run, as this rank's clock shows it: the call of `save` that began it,
and what the steps during it take longer than steps without a save. The ranks train in step, so a rank that another one
holds up counts the wait. Steps during a save include the wait for its copy. Not measured: what the disk still does
after the save is durable, and work that the loop does in some steps only (an evaluation) is taken for a slower step
if it falls into a save. Medians of the last saves keep such a step from counting. **Any rank**.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from statistics import median

from torchtitan_lite.checkpoint.saving.in_flight import InFlightSave
from torchtitan_lite.checkpoint.schedule.optimum import SaveCost

NUM_SAVES = 5
NUM_STEPS = 64


@dataclass
class _Followed:
    """A save until it is settled: what it blocked, and the seconds of each step during it."""

    step: int
    blocked_seconds: float
    steps: list[float] = field(default_factory=list)


class SaveCosts:
    """Measures the last saves of `in_flight`. Call `enter` and `leave` at both ends of each call of `save`."""

    def __init__(self, in_flight: InFlightSave, clock: Callable[[], float]) -> None:
        self._in_flight = in_flight
        self._clock = clock
        self._entered = 0.0
        self._left: float | None = None
        self._quiet_steps: deque[float] = deque(maxlen=NUM_STEPS)
        self._costs: deque[SaveCost] = deque(maxlen=NUM_SAVES)
        self._followed: _Followed | None = None

    def enter(self) -> None:
        """Note that the loop has ended a step."""
        self._entered = self._clock()

    def leave(self, step: int, *, began: bool) -> bool:
        """Note that the loop continues after `step`; a save `began` in it or not. Return whether a cost is new."""
        now = self._clock()
        # The first step of a start takes longer than the others.
        if self._left is not None:
            seconds = (self._entered if began else now) - self._left
            (self._followed.steps if self._followed else self._quiet_steps).append(seconds)
        self._left = now
        is_new = self._settle()
        if began:
            self._followed = _Followed(step, now - self._entered)
            is_new = self._settle() or is_new
        return is_new

    def cost(self) -> SaveCost | None:
        """Return the median cost of the last saves; None before the first one is durable."""
        if not self._costs:
            return None
        return SaveCost(
            blocked_seconds=median(cost.blocked_seconds for cost in self._costs),
            slower_seconds=max(0.0, median(cost.slower_seconds for cost in self._costs)),
            save_seconds=median(cost.save_seconds for cost in self._costs),
            step_seconds=_median_or_zero(self._quiet_steps),
        )

    def _settle(self) -> bool:
        """Add the cost of the followed save if it is durable; forget it if it failed."""
        followed, done = self._followed, self._in_flight
        if followed is None or done.step == followed.step:
            return False
        self._followed = None
        if done.last_durable != followed.step or done.last_seconds is None:
            return False
        self._costs.append(SaveCost(followed.blocked_seconds, self._slower(followed), save_seconds=done.last_seconds))
        return True

    def _slower(self, followed: _Followed) -> float:
        """Return what the steps during the save took longer; negative if less, so that the median has no bias."""
        if not self._quiet_steps:
            return 0.0
        return sum(followed.steps) - len(followed.steps) * median(self._quiet_steps)


def _median_or_zero(values: Iterable[float]) -> float:
    found = list(values)
    return median(found) if found else 0.0
