"""What the ranks still save before they leave, as a function of what is durable and how much time is left.

Nothing trained is given up while the grace period allows for a save. When it does not, a save that was
already in flight is worth more than a new one that would not finish: its step is what the run goes on
from. Asked after the save in flight was waited for: that is right whatever is decided, and only then
is it known whether it became durable, how long it took, and how much time it left. Clocks differ from
rank to rank: one rank decides for all.
"""

from __future__ import annotations

import enum


class Leaving(enum.Enum):
    """How the ranks leave."""

    AT_ONCE = enum.auto()
    """The present step is durable."""
    WITH_THE_SAVE_AWAITED = enum.auto()
    """The save that was in flight is durable, and the time left is too short for another."""
    AFTER_A_SAVE = enum.auto()
    """The present step is saved first."""


def how_to_leave(
    step: int, *, durable: int | None, awaited: int | None, seconds_left: float, save_seconds: float | None
) -> Leaving:
    """How to leave at the end of `step`.

    `durable` is the step saved last, durably; `awaited` the step of the save that was in flight and was waited for;
    `save_seconds` what the last durable save took, None if there was none. Without a save to leave with, a new one is
    tried however little time is left: the time it takes is a guess, and there is nothing to lose by it.
    """
    if durable == step:
        return Leaving.AT_ONCE
    awaited_is_durable = awaited is not None and awaited == durable
    if awaited_is_durable and save_seconds is not None and seconds_left < save_seconds:
        return Leaving.WITH_THE_SAVE_AWAITED
    return Leaving.AFTER_A_SAVE
