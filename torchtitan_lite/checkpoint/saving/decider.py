"""What the ranks do about saving at the end of a step: the same on every rank, without one waiting for another.

Each rank sends flags at the end of a step and receives those of the step before, ORed over the ranks. Policies that
answer alike everywhere (steps) act at once; those that could differ (seconds) act one step later, on the flags. A
signal to leave comes before any policy.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Sequence

from torchtitan_lite.checkpoint.context import RunContext
from torchtitan_lite.checkpoint.saving.auto_interval import AutoInterval
from torchtitan_lite.checkpoint.saving.in_flight import InFlightSave
from torchtitan_lite.checkpoint.saving.maker import SaveMaker
from torchtitan_lite.checkpoint.schedule.interval import (
    AtRisk,
    SavePolicy,
    Tick,
    answer,
    build_skips_when_busy,
)
from torchtitan_lite.checkpoint.schedule.leaving import Leaving, how_to_leave
from torchtitan_lite.checkpoint.schedule.preemption import PreemptionWatch
from torchtitan_lite.distributed.step_consensus import StepConsensus, StepFlags
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.events import Preempted
from torchtitan_lite.log import counted, logger

MOST_BEHIND = 2
"""Intervals that the disk may be behind without a warning: kills cut a save, and the one that makes up for it."""


class SaveDecider:
    """Decides at the end of each step whether it is saved, as `policy` and the ranks want it."""

    def __init__(
        self,
        policy: SavePolicy,
        maker: SaveMaker,
        in_flight: InFlightSave,
        departure: Departure,
        consensus: StepConsensus,
        auto: Sequence[AutoInterval],
        context: RunContext,
    ) -> None:
        self._policy = policy
        self._alike_policy, self._differing_policy = policy.split()
        self._skips_when_busy = build_skips_when_busy(context.config)
        self._loads_only = context.config.load_only
        self._maker = maker
        self._in_flight = in_flight
        self._departure = departure
        self._consensus = consensus
        self._auto = auto
        self._peers = context.peers
        self._policy_failure: ConfigError | None = None
        """Of this rank, if its flags that are under way say so."""
        self._is_overdue = False
        """Whether the step after a load from memory is to be saved."""
        self._loaded: int | None = None
        self._latest: int | None = None
        """The latest step that was loaded or saved."""
        self._reached: int | None = None
        """The step at which the loop is."""
        self._num_left = 0
        """The number of steps since the ranks agreed to stop: more than one if the loop continues."""
        self._has_warned_of_missed = False

    def continue_from(self, step: int | None) -> None:
        """Note that the state is now that of `step`; None if the steps count from the start.

        **Collective**: if it was loaded from memory, the ranks agree on whether it is owed to the disk.
        """
        self._loaded = self._latest = self._reached = step
        self._num_left = 0
        # Only after a load from memory; the same on all ranks.
        is_behind = self._maker.on_disk.step < (step or 0)
        self._is_overdue = is_behind and self._peers.on_coordinator(lambda: self._owes(step or 0))

    def end_of_step(self, step: int, *, last: bool, now: bool) -> tuple[bool, int]:
        """Save `step` if it is due, wanted `now`, the `last` one, or if the ranks leave. **Collective**.

        Return whether it was saved or is being saved, and the signal that the ranks leave for (0: none, as at the last
        step). Raises `SaveFailed` if a save failed that was one too many, and ConfigError for a step before the latest.
        """
        self._refuse_before_latest(step)
        reached, self._reached = self._reached, step
        self._maker.trained.note_step()
        for each in self._auto:
            each.enter()
        agreed = self._receive()
        leaving_for = 0 if last else agreed.signal
        saved = not self._loads_only and self._save(step, last, now, agreed, leaving_for)
        self._latest = step if saved else self._latest
        self._is_overdue = False
        if not saved and not self._has_warned_of_missed and self._peers.is_coordinator:
            self._warn_of_missed(reached, step)
        continues = not last and not leaving_for
        if continues:
            # After the first step there is all that is to be saved.
            self._maker.prepare(step, now=True)
        if continues and not saved and not self._loads_only:
            self._maker.note_not_saved(step)
            self._maker.compare_alongside(step)
        for each in self._auto:
            each.leave(step, began=saved and continues)
        if leaving_for:
            self._note_left(leaving_for)
        # After the save, not together with `receive`: flags from before it would say that a save by the clock is due,
        # and the next step would be saved again.
        self._send(step)
        return saved, leaving_for

    def finish(self, step: int, *, leaving_for: int) -> bool:
        """Save `step`, the last one, unless it is durable; for ranks that leave for a signal, only return False.

        **Collective**. Durable on return; raises `SaveFailed`, and ConfigError for a step that the loop has passed.
        """
        if leaving_for:
            logger.info("Preempted by %s: the next start finishes step %d", signal.Signals(leaving_for).name, step)
            return False
        if self._reached is not None and step < self._reached:
            raise ConfigError(
                f"finish({step}): expected a step from {self._reached} on, because this loop is at step "
                f"{self._reached}, and its state would be saved as that of step {step}. Name the step that the loop "
                "has reached; to finish an earlier one, load it first."
            )
        if self._reached is not None and step > self._reached + 1:
            logger.warning(
                "finish(%d): the last step that this loop loaded or passed to save() is %d, and the present state is "
                "saved as step %d. If the loop ended early, name the step that it reached",
                step,
                self._reached,
                step,
            )
        # However it ended: what is not durable is saved below.
        self._in_flight.outcome()
        if not self._maker.is_saved(step, loaded=self._loaded):
            self._maker.last_of_all(step)
        self._latest = self._reached = step
        return True

    def drain(self) -> None:
        """Wait for the exchange under way, if there is one. **Collective**."""
        self._consensus.receive()

    def _note_left(self, received: int) -> None:
        """Warn, once, of a loop that trains on although `save` has set `preempted_by`."""
        self._num_left += 1
        if self._num_left == 2 and self._peers.is_coordinator:
            logger.warning(
                "This loop continues to train after %s. It has to end once save() has set preempted_by: after "
                "checkpoint.preemption_grace_seconds the process ends with exit code 1",
                signal.Signals(received).name,
            )

    def _refuse_before_latest(self, step: int) -> None:
        """Raise ConfigError if `step` is before the latest one that was loaded or saved, where the next start begins.

        What the loop trains now would be lost with it.
        """
        if self._latest is not None and step < self._latest and not self._loads_only:
            raise ConfigError(
                f"save({step}): expected a step from {self._latest} on, which this run has: the next start resumes "
                f"from step {self._latest}. After a load, count from manager.loaded_step on, over all epochs; to "
                "train from an earlier step again, load it first."
            )

    def _warn_of_missed(self, reached: int | None, step: int) -> None:
        """Warn once of a loop that calls `save` only at steps of its own choice: it may save none of them, silently."""
        try:
            missed = None if reached is None else answer(self._alike_policy, "missed_step", reached, step)
        except ConfigError as error:  # On this rank only, so not to be raised.
            self._has_warned_of_missed = True
            logger.warning("%s Steps that the loop skips are not reported", error)
            return
        if missed is not None:
            self._has_warned_of_missed = True
            logger.warning(
                "save(%d): step %d was due and was not saved, because the last call was for step %d. Call save() at "
                "every step; to save a step of your own choice, such as this one, call save(%d, now=True)",
                step,
                missed,
                reached,
                step,
            )

    def _receive(self) -> StepFlags:
        """Return the flags that the ranks sent last; settle the save in flight if they say that it ended."""
        agreed = self._consensus.receive()
        if agreed.signal:
            # The save in flight is awaited, and looked at, before the ranks leave.
            self._departure.preemption.leave()
        elif agreed.save_failed:
            self._in_flight.settle()
        else:
            self._in_flight.poll()
        return agreed

    def _save(self, step: int, last: bool, now: bool, agreed: StepFlags, leaving_for: int) -> bool:
        if leaving_for:
            return self._departure.after(step, leaving_for)
        if last:
            self._in_flight.outcome()  # However it ended: this save is tried.
            self._maker.last_of_all(step)
        # `now` is an argument of `save`: a method of its own could save one step twice, and would need an exchange of
        # flags next to that of the step.
        elif now or self._is_due(step, agreed):
            self._in_flight.settle()
            logger.info("Saving step %d", step)
            self._maker.begin(step)
            self._in_flight.poll()
        else:
            return False
        return True

    def _is_due(self, step: int, agreed: StepFlags) -> bool:
        """Return whether the policy wants `step` saved; False, with a log line, where `when_busy` skips it.

        Raises ConfigError for a policy that gave no answer, on all ranks: at this step, or at the one before on a rank.
        """
        if agreed.policy_failed:
            self._peers.raise_together(self._policy_failure)
        alike_due = answer(self._alike_policy, "due", self._tick(step), self._maker.last)
        due = bool(alike_due) or agreed.save_due or self._is_overdue
        if due and self._skips_when_busy and (busy_with := self._busy_with(agreed)) >= 0:
            return self._maker.skip(step, busy_with)
        return due

    def _busy_with(self, agreed: StepFlags) -> int:
        """Return the step that a rank is still writing, -1 if none is: as it is now, not as it was a step ago."""
        if agreed.step_in_flight < 0:
            return -1
        return self._peers.max_over_ranks(agreed.step_in_flight if self._in_flight.is_writing else -1)[0]

    def _send(self, step: int) -> None:
        """Send this rank's flags of `step` without waiting for the others."""
        self._consensus.send(
            StepFlags(
                save_due=self._is_differing_due(step),
                save_failed=self._in_flight.failed,
                step_in_flight=-1 if self._in_flight.step is None else self._in_flight.step,
                signal=self._departure.preemption.received,
                policy_failed=self._policy_failure is not None,
            )
        )

    def _is_differing_due(self, step: int) -> bool:
        """Return the answer of this rank, False for none: the other ranks wait for its flags, and raise it with it."""
        self._policy_failure = None
        try:
            return bool(answer(self._differing_policy, "due", self._tick(step), self._maker.last))
        except ConfigError as error:
            self._policy_failure = error
            return False

    def _owes(self, step: int) -> bool:
        """Return whether a save of `step`, which was loaded from memory, is overdue; warn if it long is. Coordinator.

        What the clock wants is known to all ranks here, so it need not wait for the flags of a step.
        """
        loaded, on_disk = self._tick(step), self._maker.on_disk
        if answer(self._policy, "intervals_behind", loaded, on_disk) > MOST_BEHIND and not self._loads_only:
            at_risk = AtRisk.between(on_disk, loaded)
            logger.warning(
                "The disk is %s (%.1f s of training) behind step %d, which was loaded from memory: more than %d "
                "intervals. The next step is saved",
                counted(at_risk.steps, "step"),
                at_risk.seconds,
                step,
                MOST_BEHIND,
            )
        return bool(answer(self._policy, "is_overdue", loaded, on_disk))

    def _tick(self, step: int) -> Tick:
        now = self._maker.now(step)
        auto_seconds = min((each.seconds for each in self._auto), default=math.inf)
        return Tick(step, now.seconds, self._in_flight.is_writing, auto_seconds)


# How the ranks leave after a scheduler's signal to one of them: what they save before, and what they report.
#
# Every method is **collective**.


class Departure:
    """Makes all ranks leave together for a signal that one of them received."""

    def __init__(
        self, preemption: PreemptionWatch, maker: SaveMaker, in_flight: InFlightSave, context: RunContext
    ) -> None:
        self.preemption = preemption
        self._maker = maker
        self._in_flight = in_flight
        self._peers = context.peers
        self._emit = context.emit

    def untrained(self, step: int) -> int:
        """Return the signal for which the ranks leave before they train anything after `step`; 0 for none."""
        received: int = max(self._peers.gather(self.preemption.received))
        if received:
            self.preemption.leave()
            logger.info("Trained nothing after step %d; leaving for %s", step, signal.Signals(received).name)
            self._emit(Preempted(step, signal=received, given_up_steps=0))
        return received

    def after(self, step: int, received: int) -> bool:
        """Save what the grace period has time for, and report that the ranks leave for the signal `received`.

        Returns whether `step` is durable; if not, the save that was in flight is. Raises as `SaveMaker.full` does.
        """
        awaited = self._in_flight.step
        self._in_flight.outcome()  # Whether it failed or not, the ranks leave.
        if self._how(step, awaited) is Leaving.AFTER_A_SAVE:
            self._maker.full(step)
        saved = self._peers.on_coordinator(lambda: self._in_flight.last_durable)
        assert saved is not None, "each way to leave has a durable save"
        if saved != step:
            logger.warning("The grace period is too short to save step %d; the next start trains it again", step)
        logger.info("Saved step %d; leaving for %s", saved, signal.Signals(received).name)
        self._emit(Preempted(saved, signal=received, given_up_steps=step - saved))
        return saved == step

    def _how(self, step: int, awaited: int | None) -> Leaving:
        # Perhaps only one rank received the signal.
        left = min(self._peers.gather(self.preemption.seconds_left()))
        done = self._in_flight
        return self._peers.on_coordinator(
            lambda: how_to_leave(
                step, durable=done.last_durable, awaited=awaited, seconds_left=left, save_seconds=done.last_seconds
            )
        )
