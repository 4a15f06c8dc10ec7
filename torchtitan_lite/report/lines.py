"""The JSON Lines files of a run, read as a stream.

A line that is not a JSON object, such as the torn last one of a run under way, is skipped. Of metrics.jsonl only the
columns that the report draws are kept, so a million steps fit in 50 MB of memory.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchtitan_lite.events import is_figure
from torchtitan_lite.json_lines import object_in

LOSS = "loss_metrics/global_avg_loss"
STEP_SECONDS = "time_metrics/end_to_end(s)"
TOKENS_PER_SECOND = "throughput(tps)"
_LARGEST_STEP = 1 << 62


@dataclass
class Logged:
    """The logged steps of a run, each once, by ascending step; NaN where a line has no finite number."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    loss: array[float] = field(default_factory=lambda: array("d"))
    seconds: array[float] = field(default_factory=lambda: array("d"))
    """Of one step, from log line to log line, saves included: the mean since the step logged before."""
    last: dict[str, Any] = field(default_factory=dict)
    """The last line as it is in the file."""

    def __len__(self) -> int:
        return len(self.steps)

    def add(self, record: dict[str, Any]) -> None:
        """Add the line `record`. A step that comes again replaces itself and what followed it."""
        step = record.get("step")
        if not isinstance(step, int) or isinstance(step, bool) or abs(step) > _LARGEST_STEP:
            return
        while self.steps and self.steps[-1] >= step:
            for column in (self.steps, self.loss, self.seconds):
                column.pop()
        self.steps.append(step)
        self.loss.append(number_or_nan(record.get(LOSS)))
        self.seconds.append(number_or_nan(record.get(STEP_SECONDS)))
        self.last = record


def read_logged(path: Path) -> Logged:
    """Return the columns of the metrics.jsonl at `path`; none without a file. Raises OSError."""
    logged = Logged()
    for record in read_records(path):
        logged.add(record)
    return logged


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects in the file at `path`, line by line; none without a file. Raises OSError."""
    try:
        with path.open("rb") as lines:
            for line in lines:
                if (record := object_in(line)) is not None:
                    yield record
    except FileNotFoundError:
        return


def number_or_nan(value: Any) -> float:
    """Return `value` as a number; NaN for anything that is no figure."""
    return float(value) if is_figure(value) else math.nan


def known(figure: float) -> float | None:
    """Return the figure of an event; None for NaN, which stands for one that its line does not have."""
    return None if math.isnan(figure) else figure
