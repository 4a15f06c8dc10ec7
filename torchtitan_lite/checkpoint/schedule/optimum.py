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


@dataclass(frozen=True)
class Choice:
    """The interval, in seconds from the end of the blocking part of a save to the beginning of the next save."""

    seconds: float
    reason: Reason
    exceeds: bool = False
    """Whether a limit of the user's does not hold: `max_lost_seconds` needs more saves than `max_overhead` allows, or,
    with the reason `LEAST`, saves take too long for it."""


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
    seconds, reason, exceeds = optimum_seconds(cost.seconds, mtbf_seconds), Reason.OPTIMUM, False
    affordable = cost.seconds / caps.max_overhead
    if seconds < affordable:
        seconds, reason = affordable, Reason.MAX_OVERHEAD
    allowed = caps.max_lost_seconds - most_lost_seconds(0.0, cost)
    if seconds > allowed:
        seconds, reason, exceeds = allowed, Reason.MAX_LOST, affordable > allowed
    if seconds < cost.least_interval:
        seconds, reason, exceeds = cost.least_interval, Reason.LEAST, allowed < cost.least_interval
    return Choice(seconds, reason, exceeds)


# How often a run fails, estimated from its hours and its unclean ends. Pure functions.
#
# The estimate is the mean of a gamma distribution of the failure rate: a prior, which counts like half a failure (the
# shape of Jeffreys' prior for a rate), updated by what was seen. So one failure soon counts more than the prior, and a
# run without any is trusted more with every hour.


ACCELERATOR_HOURS = 50_000.0
"""Hours of one accelerator between failures: 419 unexpected interruptions in 54 days on 16,384 GPUs (The Llama 3 Herd
of Models, 2024, section 3.3.4) are one in 50,700."""
OTHER_HOURS = 168.0
"""Hours between failures that do not depend on the number of ranks (a host, a file system, a person): one a week. An
assumption, not a measurement."""
PRIOR_WEIGHT = 0.5
"""Failures that the prior counts for."""


@dataclass(frozen=True)
class Past:
    """What is known of how a run has run so far: by default, nothing."""

    hours: float = 0.0
    """Hours that its starts ran, all together."""
    unclean_ends: int = 0
    """Starts that neither finished nor left for a signal."""


def prior_hours(num_ranks: int) -> float:
    """Return the mean hours between failures of a run on `num_ranks` of which nothing is known."""
    return 1 / (1 / OTHER_HOURS + num_ranks / ACCELERATOR_HOURS)


def mtbf_hours(past: Past, prior: float) -> float:
    """Return the estimated mean hours between failures of a run with this past; `prior` is that of an unknown run."""
    return (PRIOR_WEIGHT * prior + past.hours) / (PRIOR_WEIGHT + past.unclean_ends)
