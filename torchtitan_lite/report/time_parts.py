"""Where the time of a run went, part by part. Pure.

With a ledger these are its parts, over all starts. An older run has none: then the parts are what its metrics and
events say, without the steps that were trained again and the time between two starts, which they do not know.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torchtitan_lite import accounts
from torchtitan_lite.report.lines import GOODPUT, Logged, number_or_nan
from torchtitan_lite.report.saved_steps import Save
from torchtitan_lite.report.starts import ReportedStart

LABELS = {
    "productive": "training",
    "redone": "steps trained again",
    "saving": "blocked by saves",
    "loading": "loading",
    "starting": "starting up",
    "compiling": "first steps (compiling)",
    "waiting_for_data": "waiting for data",
    "leaving": "ending, or leaving for a signal",
    "other": "other",
    "down": "down between starts",
}


@dataclass(frozen=True)
class TimeParts:
    """Seconds by part, in the order of `LABELS`, without those that are zero."""

    seconds: dict[str, float]
    has_ledger: bool

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    @property
    def goodput(self) -> float:
        """The share of training in all; NaN if nothing is known."""
        return self.seconds.get("productive", 0.0) / self.total if self.total else math.nan


def time_parts(
    ledger: accounts.Accounts, logged: Logged, starts: Sequence[ReportedStart], saves: Sequence[Save]
) -> TimeParts:
    """Return the parts of the run's time, of the ledger if it has starts with steps."""
    if ledger.starts:
        found = ledger.seconds
        return TimeParts({part: found[part] for part in LABELS if found.get(part, 0.0) > 0}, True)
    return TimeParts(_without_ledger(logged, starts, saves), False)


def _without_ledger(logged: Logged, starts: Sequence[ReportedStart], saves: Sequence[Save]) -> dict[str, float]:
    counts = steps_per_line(logged.steps, [start.loaded.step for start in starts])
    pairs = zip(logged.training_seconds, counts, strict=True)
    productive = sum(seconds * count for seconds, count in pairs if math.isfinite(seconds))
    parts = {
        "productive": productive,
        "saving": sum(save.stall_seconds or 0.0 for save in saves),
        "loading": sum(start.loaded.seconds or 0.0 for start in starts),
    }
    percent = number_or_nan(logged.last.get(GOODPUT))
    if percent > 0:
        parts["other"] = max(0.0, 100 * productive / percent - sum(parts.values()))
    return {part: parts[part] for part in LABELS if parts.get(part, 0.0) > 0}


def steps_per_line(steps: Sequence[int], loaded: Sequence[int]) -> list[int]:
    """Return how many steps each logged line covers: since the line before, or since the step that was loaded."""
    counts, before, waiting = [], 0, sorted(loaded)
    index = 0
    for step in steps:
        while index < len(waiting) and waiting[index] < step:
            before = max(before, waiting[index])
            index += 1
        counts.append(step - before)
        before = step
    return counts
