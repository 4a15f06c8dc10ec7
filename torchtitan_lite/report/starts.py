"""The starts of a run: from which step each continued, how far it came, and how it ended. Pure.

With a ledger its starts count, and events older than it are split as without one: a load that follows a sign of
training begins a start, and so does a save of a step that the start had already saved. A start that was killed before
its first save leaves no event, so only the ledger has it.
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
    Fallback,
    Finished,
    ImageSkipped,
    Loaded,
    LoadFailed,
    LoadStarted,
    Preempted,
    Purged,
    Quarantined,
    Resumed,
    SaveStarted,
)
from torchtitan_lite.report.lines import known

CUT, UNKNOWN = "killed", "unknown"
_NO_TRAINING = (LoadStarted, LoadFailed, ImageSkipped, Fallback, Quarantined, Purged)
"""Events of a load; and what is also written after the end of a start, by what it left in the background."""
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
    begun = [start.began for start in ledger.starts]
    older = [event for event in events if not begun or event.time < begun[0]]
    groups: list[tuple[accounts.Start | None, list[Recorded]]] = [(None, group) for group in split_by_start(older)]
    offset = len(groups)
    groups += [(start, []) for start in ledger.starts]
    for event in events[len(older) :]:
        groups[offset - 1 + bisect.bisect_right(begun, event.time)][1].append(event)
    last = len(groups) - 1
    return [
        _start(index + 1, counted, group, last_logged_step if index == last else 0, is_last=index == last)
        for index, (counted, group) in enumerate(groups)
    ]


def split_by_start(events: Sequence[Recorded]) -> list[list[Recorded]]:
    """Return `events`, of a run without a ledger, divided by starts."""
    groups: list[list[Recorded]] = []
    trains, saved = True, -1
    for recorded in events:
        event, step = recorded.event, recorded.event.step
        is_save = isinstance(event, SaveStarted)
        is_again = is_save and step <= saved and step > 0
        if not groups or is_again or (isinstance(event, LoadStarted) and trains):
            groups.append([])
            trains, saved = False, -1
        groups[-1].append(recorded)
        if isinstance(event, Diverged) and event.skipped_batch is not None:
            trains, saved = False, -1  # The load that follows is none of another start, nor are the saves.
        elif not isinstance(event, _NO_TRAINING):
            trains = True
        if is_save:
            saved = max(saved, step)
    return groups


def _start(
    number: int, counted: accounts.Start | None, recorded: Sequence[Recorded], logged_step: int, *, is_last: bool
) -> ReportedStart:
    events = [each.event for each in recorded]
    # What a start loads once it diverged is not what it began with.
    before = itertools.takewhile(lambda event: not isinstance(event, Diverged), events)
    loaded = _reported_load(counted, [event for event in before if isinstance(event, Loaded)])
    ends = [event for event in events if isinstance(event, CleanEnd)]
    steps = [loaded.step, logged_step, *(event.step for event in events if isinstance(event, _REACHED))]
    end = ends[-1].name if ends else UNKNOWN if is_last else CUT
    if counted is not None:
        steps.append(counted.last_step)
        end = counted.end or end
    return ReportedStart(
        number=number,
        began=counted.began if counted is not None else recorded[0].time,
        last_sign=max([each.time for each in recorded] + ([counted.last_beat] if counted is not None else [])),
        loaded=loaded,
        last_step=max(steps),
        end=end,
        signal=(ends[-1].signal or None) if ends and isinstance(ends[-1], Preempted) else None,
        topology=str(counted.about.get("topology", "")) if counted is not None else "",
        diverged=tuple(event for event in events if isinstance(event, Diverged)),
        events=tuple(recorded),
    )


def _reported_load(counted: accounts.Start | None, loads: Sequence[Loaded]) -> ReportedLoad:
    if counted is not None and counted.loaded_from:
        origin = counted.loaded_from
    elif loads and loads[-1].step > 0:
        origin = "memory" if loads[-1].origin == "memory" else "checkpoint"
    else:
        origin = "" if counted is not None and counted.loaded_step is None else "fresh"
    if loads:
        return ReportedLoad(loads[-1].step, origin, known(loads[-1].seconds), loads[-1].at_risk_steps)
    return ReportedLoad((counted.loaded_step or 0) if counted is not None else 0, origin, None, 0)
