"""What the ranks still save before they leave: a pure function of what is durable and of the time left.

While the grace period has time for a save, the current step is saved and no training is lost. If it has not,
the save that was in flight counts, because a new one would not finish: the next start resumes from its step.
The decision comes after the wait for the save in flight: only then is it known whether that save became
durable, how long it took and how much time is left, and the wait is right in each case. Clocks differ between
ranks, so the coordinator decides for all.
"""

from __future__ import annotations

import enum


class Leaving(enum.Enum):
    """How the ranks leave."""

    AT_ONCE = enum.auto()
    """The current step is durable."""
    WITH_THE_SAVE_AWAITED = enum.auto()
    """The save that was in flight is durable, and the time left is too short for another one."""
    AFTER_A_SAVE = enum.auto()
    """The current step is saved first."""


def how_to_leave(
    step: int, *, durable: int | None, awaited: int | None, seconds_left: float, save_seconds: float | None
) -> Leaving:
    """Return how to leave at the end of `step`. Pure.

    `durable` is the last step that is durable, None for none; `awaited` is the step of the save that was in flight and
    has ended, None for none; `save_seconds` is the time that the last durable save took, None if there was none. If
    there is no save to leave with, a new one is tried however little time is left: how long it takes is a guess, and
    the try costs nothing.
    """
    if durable == step:
        return Leaving.AT_ONCE
    awaited_is_durable = awaited is not None and awaited == durable
    if awaited_is_durable and save_seconds is not None and seconds_left < save_seconds:
        return Leaving.WITH_THE_SAVE_AWAITED
    return Leaving.AFTER_A_SAVE
