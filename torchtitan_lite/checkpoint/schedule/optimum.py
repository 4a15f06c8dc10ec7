"""The interval between saves that loses the least time, from what a save costs and how often the run fails.

Pure functions. Saves that are too frequent cost time themselves; between saves that are too rare, each failure costs
more work. Daly's estimate (2006) of the best interval has Young's (1974) as its first term and is right where a save is
not short against the time between failures, too. Two caps of the user's may change it: what a failure may lose comes
before what saves may cost. Whatever they say, the interval is not below the time that a save takes.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

STEPS_LATE = 2
"""A save that is due begins up to two steps later: at the end of a step, and after the ranks have agreed."""


@dataclass(frozen=True)
class SaveCost:
    """What a save costs and how long it takes, in seconds."""

    blocked_seconds: float
    """That training is blocked."""
    slower_seconds: float = 0.0
    """That the steps during it take longer, all together."""
    save_seconds: float = 0.0
    """From its beginning until it is durable."""
    step_seconds: float = 0.0
    """Of one step during which there is no save."""

    @property
    def seconds(self) -> float:
        """Return what the save adds to the time of the run."""
        return self.blocked_seconds + self.slower_seconds

    @property
    def least_interval(self) -> float:
        """Return the shortest interval in which a save ends before the next one begins."""
        return max(self.save_seconds, self.seconds)


@dataclass(frozen=True)
class Caps:
    """The user's limits; infinite for none."""

    max_lost_seconds: float = math.inf
    """That a failure may lose: from the beginning of the last durable save to the failure."""
    max_overhead: float = math.inf
    """What saves may cost, as a part of the time between them."""


class Reason(enum.Enum):
    """What decided the interval, in the words of the log."""

    OPTIMUM = "the optimum"
    MAX_OVERHEAD = "checkpoint.max_overhead"
    MAX_LOST = "checkpoint.max_lost_seconds"
    LEAST = "the time that a save takes"


class Conflict(enum.Enum):
    """Which of the user's limits does not hold."""

    OVERHEAD_EXCEEDED = enum.auto()
    """`max_lost_seconds` needs more saves than `max_overhead` allows."""
    LOST_EXCEEDED = enum.auto()
    """Saves take too long for `max_lost_seconds`."""


@dataclass(frozen=True)
class Choice:
    """The interval, in seconds from the end of the blocking part of a save to the beginning of the next save."""

    seconds: float
    reason: Reason
    conflict: Conflict | None = None


def optimum_seconds(cost_seconds: float, mtbf_seconds: float) -> float:
    """Return Daly's interval for saves that cost `cost_seconds` and a failure every `mtbf_seconds` on average."""
    if cost_seconds >= 2 * mtbf_seconds:
        return mtbf_seconds
    root = math.sqrt(cost_seconds / (2 * mtbf_seconds))
    return 2 * mtbf_seconds * root * (1 + root / 3 + root * root / 9) - cost_seconds


def most_lost_seconds(interval: float, cost: SaveCost) -> float:
    """Return what a failure at the worst moment loses, the end of a save: the last save, the interval and this save."""
    return cost.blocked_seconds + interval + STEPS_LATE * cost.step_seconds + cost.save_seconds


def choose_interval(cost: SaveCost, mtbf_seconds: float, caps: Caps) -> Choice:
    """Return the interval for saves of this cost: the optimum within the caps, never below the time of a save."""
    seconds, reason, conflict = optimum_seconds(cost.seconds, mtbf_seconds), Reason.OPTIMUM, None
    affordable = cost.seconds / caps.max_overhead
    if seconds < affordable:
        seconds, reason = affordable, Reason.MAX_OVERHEAD
    allowed = caps.max_lost_seconds - most_lost_seconds(0.0, cost)
    if seconds > allowed:
        conflict = Conflict.OVERHEAD_EXCEEDED if affordable > allowed else None
        seconds, reason = allowed, Reason.MAX_LOST
    if seconds < cost.least_interval:
        conflict = Conflict.LOST_EXCEEDED if allowed < cost.least_interval else None
        seconds, reason = cost.least_interval, Reason.LEAST
    return Choice(seconds, reason, conflict)
