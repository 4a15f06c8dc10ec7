"""The starts of a run: from which step each continued, how far it came, and how it ended. Pure.

The starts are those of the ledger, also those that left no event. The events of a run without one are of one start.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from torchtitan_lite import accounts
from torchtitan_lite.event_lines import Recorded
from torchtitan_lite.events import (
    CleanEnd,
    Committed,
    Diverged,
    Finished,
    Loaded,
    Preempted,
    Resumed,
    SaveStarted,
)
from torchtitan_lite.report.lines import known

CUT, UNKNOWN = "killed", "unknown"
_REACHED = (SaveStarted, Committed, Finished, Resumed)


@dataclass(frozen=True)
class ReportedLoad:
    """What a start began with."""

    step: int
    """0 for a fresh start."""
    origin: str
    """checkpoint; memory, what the start before had left there; seed, initial or fresh; empty if it loaded nothing."""
    seconds: float | None
    at_risk_steps: int
    """Those that the disk lacked."""

    @property
    def is_from_memory(self) -> bool:
        return self.origin == "memory"

    @property
    def is_resumed(self) -> bool:
        return self.step > 0


@dataclass(frozen=True)
class ReportedStart:
    """One start of a run. Its number is from 1."""

    number: int
    began: float
    """Unix seconds of its first sign."""
    last_sign: float
    """Unix seconds of its last sign."""
    loaded: ReportedLoad
    last_step: int
    """The last step that it is known to have reached."""
    end: str
    """finished, preempted or failed; killed if another start followed without a word; unknown of the last start."""
    signal: int | None = None
    topology: str = ""
    diverged: tuple[Diverged, ...] = ()
    """Each time that it diverged: where, and which batch was skipped then."""
    events: tuple[Recorded, ...] = field(default=(), repr=False)


def starts_of(events: Sequence[Recorded], ledger: accounts.Accounts, last_logged_step: int) -> list[ReportedStart]:
    """Return the starts in their order; the last one has reached `last_logged_step` at least."""
    counted = ledger.starts
    if not counted and events:
        counted = (accounts.Start("", began=events[0].time, last_beat=events[-1].time),)
    begun = [start.began for start in counted]
    groups: list[list[Recorded]] = [[] for _ in counted]
    for event in events:
        # The one that made a seed checkpoint is in no ledger: what it did counts for the first one.
        groups[max(0, bisect.bisect_right(begun, event.time) - 1)].append(event)
    last = len(counted) - 1
    return [
        _start(index + 1, start, group, last_logged_step if index == last else 0, is_last=index == last)
        for index, (start, group) in enumerate(zip(counted, groups, strict=True))
    ]


def _start(
    number: int, counted: accounts.Start, recorded: Sequence[Recorded], logged_step: int, *, is_last: bool
) -> ReportedStart:
    events = [each.event for each in recorded]
    # What a start loads once it diverged is not what it began with.
    before = itertools.takewhile(lambda event: not isinstance(event, Diverged), events)
    loaded = _reported_load(counted, [event for event in before if isinstance(event, Loaded)])
    ends = [event for event in events if isinstance(event, CleanEnd)]
    steps = [event.step for event in events if isinstance(event, _REACHED)]
    return ReportedStart(
        number=number,
        began=counted.began,
        last_sign=max([counted.last_beat, *(each.time for each in recorded)]),
        loaded=loaded,
        last_step=max([loaded.step, logged_step, counted.last_step, *steps]),
        end=counted.end or (ends[-1].name if ends else UNKNOWN if is_last else CUT),
        signal=(ends[-1].signal or None) if ends and isinstance(ends[-1], Preempted) else None,
        topology=str(counted.about.get("topology", "")),
        diverged=tuple(event for event in events if isinstance(event, Diverged)),
        events=tuple(recorded),
    )


def _reported_load(counted: accounts.Start, loads: Sequence[Loaded]) -> ReportedLoad:
    if not loads:
        return ReportedLoad(counted.loaded_step or 0, counted.loaded_from, None, 0)
    last = loads[-1]
    return ReportedLoad(last.step, counted.loaded_from, known(last.seconds), last.at_risk_steps)
