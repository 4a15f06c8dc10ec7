"""The interval of `checkpoint.interval_type = "auto"`: chosen on the coordinator, again after each save and each step.

Only the coordinator has an interval, so only its clock makes a save due; the other ranks learn it with the flags of the
step, like every save by the clock.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

from torchtitan_lite.checkpoint.context import RunContext
from torchtitan_lite.checkpoint.saving.in_flight import InFlightSave
from torchtitan_lite.checkpoint.schedule.optimum import (
    Caps,
    Choice,
    Past,
    Reason,
    SaveCost,
    choose_interval,
    most_lost_seconds,
    mtbf_hours,
    prior_hours,
)
from torchtitan_lite.config.job_config import Checkpoint
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.events import IntervalChosen
from torchtitan_lite.log import in_one_line, logger

FIRST_SECONDS = 60.0
"""Until the first save, whose cost nothing is known of."""
NOTICEABLE = 1.25
"""An interval that is longer or shorter by this factor than the one in the log is logged, and is an event."""


class AutoInterval:
    """The interval now, in `seconds`. `mtbf` returns the hours between failures, given those of this start."""

    def __init__(
        self,
        costs: SaveCosts,
        caps: Caps,
        mtbf: Callable[[float], float],
        context: RunContext,
    ) -> None:
        self._costs = costs
        self._caps = caps
        self._mtbf = mtbf
        self._peers = context.peers
        self._clock = context.clock
        self._emit = context.emit
        self._began = context.clock()
        self._seconds = min(FIRST_SECONDS, caps.max_lost_seconds / 2)
        self._cost: SaveCost | None = None
        self._logged: Choice | None = None

    @property
    def seconds(self) -> float:
        """Return the interval on the coordinator; infinite on other ranks, which do not decide."""
        return self._seconds if self._peers.is_coordinator else math.inf

    def enter(self) -> None:
        """Note that the loop has ended a step. Any rank."""
        self._costs.enter()

    def leave(self, step: int, *, began: bool) -> None:
        """Note that the loop continues after `step`, in which a save `began` or not, and choose again. Any rank."""
        if self._costs.leave(step, began=began):
            self._cost = self._costs.cost()
        if self._cost is None or not self._peers.is_coordinator:
            return
        hours = self._mtbf((self._clock() - self._began) / 3600)
        choice = choose_interval(self._cost, hours * 3600, self._caps)
        self._seconds = choice.seconds
        if self._is_noticeable(choice):
            self._log(choice, self._cost, hours)
            self._logged = choice
            self._emit(
                IntervalChosen(
                    step,
                    seconds=choice.seconds,
                    reason=choice.reason.value,
                    cost_seconds=self._cost.seconds,
                    stall_seconds=self._cost.blocked_seconds,
                    save_seconds=self._cost.save_seconds,
                    mtbf_hours=hours,
                )
            )

    def _is_noticeable(self, choice: Choice) -> bool:
        before = self._logged
        if before is None or (before.reason, before.exceeds) != (choice.reason, choice.exceeds):
            return True
        return not before.seconds / NOTICEABLE < choice.seconds < before.seconds * NOTICEABLE

    def _log(self, choice: Choice, cost: SaveCost, hours: float) -> None:
        logger.info(
            "Saving every %.1f s: %s; a save costs %.2f s (blocked %.2f s, slower steps %.2f s) and is durable in "
            "%.2f s, a failure is expected every %.1f h",
            choice.seconds,
            choice.reason.value,
            cost.seconds,
            cost.blocked_seconds,
            cost.slower_seconds,
            cost.save_seconds,
            hours,
        )
        before = self._logged
        if choice.exceeds and (before is None or (before.reason, before.exceeds) != (choice.reason, True)):
            logger.warning("%s", _exceeding_text(choice, cost, self._caps))


def build_auto_intervals(in_flight: InFlightSave, past: Callable[[], Past], context: RunContext) -> list[AutoInterval]:
    """Return what chooses the interval of a run; none if that is configured. `past`: once, on the coordinator."""
    config = context.config
    if config.interval_type != "auto":
        return []
    caps = Caps(config.max_lost_seconds or math.inf, config.max_overhead or math.inf)
    costs = SaveCosts(in_flight, context.clock)
    return [AutoInterval(costs, caps, _build_mtbf(config, context.peers, past), context)]


def _build_mtbf(config: Checkpoint, peers: Peers, past: Callable[[], Past]) -> Callable[[float], float]:
    if config.mtbf_hours:
        return lambda _: config.mtbf_hours
    found: list[Past] = []

    def estimated(hours: float) -> float:
        if not found:
            found.append(_known_past(past))
        before = found[0]
        return mtbf_hours(Past(before.hours + hours, before.unclean_ends), prior_hours(peers.world_size))

    return estimated


def _known_past(past: Callable[[], Past]) -> Past:
    """Return what `past` returns; where it fails, nothing, with a warning: the other ranks wait for this one."""
    try:
        found = past()
        if isinstance(found, Past) and 0 <= found.hours < math.inf and 0 <= found.unclean_ends < math.inf:
            return found
        finding = f"found {in_one_line(found)}"
    except (Exception, SystemExit) as error:
        finding = f"but it raised {in_one_line(error)}"
    logger.warning("past: expected a Past of numbers from 0, %s. The interval does not count earlier starts", finding)
    return Past()


def _exceeding_text(choice: Choice, cost: SaveCost, caps: Caps) -> str:
    if choice.reason is Reason.MAX_LOST:
        return (
            f"checkpoint.max_lost_seconds = {caps.max_lost_seconds:g} takes precedence over checkpoint.max_overhead = "
            f"{caps.max_overhead:g}: saves cost {cost.seconds / choice.seconds:.3g} of the time between them"
        )
    return (
        f"checkpoint.max_lost_seconds = {caps.max_lost_seconds:g} cannot be met: a save takes "
        f"{cost.least_interval:.1f} s, so a failure may lose {most_lost_seconds(choice.seconds, cost):.0f} s"
    )


# What the saves of this start cost, measured from the ends of its steps.
#
# The cost of a save is the time that it adds to the run, as this rank's clock shows it: the call of `save` that began
# it, and what the steps during it take longer than steps without a save. The ranks train in step, so a rank that
# another one holds up counts the wait. Steps during a save include the wait for its copy. Not measured: what the disk
# still does after the save is durable, and work that the loop does in some steps only (an evaluation) is taken for a
# slower step if it falls into a save. Medians of the last saves keep such a step from counting. **Any rank**.


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
            step_seconds=median(self._quiet_steps or [0.0]),
        )

    def _settle(self) -> bool:
        """Add the cost of the followed save if it is durable; forget it if it failed."""
        followed, done = self._followed, self._in_flight
        if followed is None or done.step == followed.step:
            return False
        self._followed = None
        if done.last_durable != followed.step or done.last_seconds is None:
            return False
        # Negative if the steps during the save took less, so that the median has no bias.
        slower = sum(each - median(self._quiet_steps) for each in followed.steps) if self._quiet_steps else 0.0
        self._costs.append(SaveCost(followed.blocked_seconds, slower, save_seconds=done.last_seconds))
        return True
