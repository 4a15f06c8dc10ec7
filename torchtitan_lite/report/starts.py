"""The starts of a run: from which step each continued, how far it came, and how it ended. Pure.

With a ledger its starts count, and events older than it are split as without one: a load that follows a sign of
training begins a start, and so does a save of a step that the start had already saved. A start that was killed before
its first save leaves no event, so only the ledger has it.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchtitan_lite.metrics import accounts

Event = Mapping[str, Any]

FINISHED, PREEMPTED, FAILED, CUT, UNKNOWN = "finished", "preempted", "failed", "killed", "unknown"
_LOADING = ("load_started", "load_failed", "image_skipped", "fallback", "quarantined")
_OF_NO_START = ("purged",)
"""Also written after the end of a start, by what it left in the background."""


@dataclass(frozen=True)
class Start:
    """One start of a run. Its number is from 1."""

    number: int
    began: float
    """Unix seconds of its first sign."""
    last_sign: float
    """Unix seconds of its last sign."""
    loaded_step: int
    """The step that it loaded; 0 for a fresh start."""
    last_step: int
    """The last step that it is known to have reached."""
    end: str
    """finished, preempted or failed; killed if another start followed without a word; unknown of the last start."""
    signal: int | None = None
    load_seconds: float | None = None
    loaded_from: str = "fresh"
    """checkpoint; memory, what the start before had left there; seed, initial or fresh; empty if it loaded nothing."""
    at_risk_steps: int = 0
    """Of what it loaded: those that the disk lacked."""
    topology: str = ""
    events: tuple[Event, ...] = field(default=(), repr=False)

    @property
    def is_from_memory(self) -> bool:
        return self.loaded_from == "memory"

    @property
    def is_resumed(self) -> bool:
        return self.loaded_step > 0


def starts_of(events: Sequence[Event], ledger: accounts.Accounts, last_logged_step: int) -> list[Start]:
    """Return the starts in their order; the last one has reached `last_logged_step` at least."""
    begun = [start.began for start in ledger.starts]
    older = [event for event in events if not begun or event["time"] < begun[0]]
    groups: list[tuple[accounts.Start | None, list[Event]]] = [(None, group) for group in split(older)]
    offset = len(groups)
    groups += [(start, []) for start in ledger.starts]
    for event in events[len(older) :]:
        groups[offset - 1 + bisect.bisect_right(begun, event["time"])][1].append(event)
    last = len(groups) - 1
    return [
        _start(index + 1, counted, group, last_logged_step if index == last else 0, is_last=index == last)
        for index, (counted, group) in enumerate(groups)
    ]


def split(events: Sequence[Event]) -> list[list[Event]]:
    """Return `events`, of a run without a ledger, divided by starts."""
    groups: list[list[Event]] = []
    trains, saved = True, -1
    for event in events:
        name, step = event["event"], event["step"]
        is_again = name == "save_started" and step <= saved and step > 0
        if not groups or is_again or (name == "load_started" and trains):
            groups.append([])
            trains, saved = False, -1
        groups[-1].append(event)
        if name not in (*_LOADING, *_OF_NO_START):
            trains = True
        if name == "save_started":
            saved = max(saved, step)
    return groups


def _start(
    number: int, counted: accounts.Start | None, events: Sequence[Event], logged_step: int, *, is_last: bool
) -> Start:
    loads = [event for event in events if event["event"] == "loaded"]
    ends = [event for event in events if event["event"] in (FINISHED, PREEMPTED)]
    loaded_step = loads[-1]["step"] if loads else (counted.loaded_step or 0) if counted is not None else 0
    steps = [loaded_step, logged_step, *(event["step"] for event in events if event["event"] in _REACHED)]
    at_risk = loads[-1].get("at_risk_steps") if loads else None
    end = ends[-1]["event"] if ends else UNKNOWN if is_last else CUT
    if counted is not None:
        steps.append(counted.last_step)
        end = counted.end or end
    return Start(
        number=number,
        began=counted.began if counted is not None else events[0]["time"],
        last_sign=max([event["time"] for event in events] + ([counted.last_beat] if counted is not None else [])),
        loaded_step=loaded_step,
        last_step=max(steps),
        end=end,
        signal=ends[-1].get("signal") if ends else None,
        load_seconds=loads[-1].get("seconds") if loads else None,
        loaded_from=_loaded_from(counted, loads),
        at_risk_steps=at_risk if isinstance(at_risk, int) else 0,
        topology=str(counted.about.get("topology", "")) if counted is not None else "",
        events=tuple(events),
    )


def _loaded_from(counted: accounts.Start | None, loads: Sequence[Event]) -> str:
    if counted is not None and counted.loaded_from:
        return counted.loaded_from
    if loads and loads[-1]["step"] > 0:
        return "memory" if loads[-1].get("origin") == "memory" else "checkpoint"
    return "" if counted is not None and counted.loaded_step is None else "fresh"


_REACHED = ("save_started", "committed", FINISHED, "resumed")
