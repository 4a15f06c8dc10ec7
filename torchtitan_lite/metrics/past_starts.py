"""How the earlier starts of a run ended, counted from events.jsonl: for runs that have no ledger yet.

A start that finished or left for a signal says so in its events; one that was killed, or ended with an error, does
not. Such a start counts once a later start loads a checkpoint: a start that died before its first checkpoint leaves no
sign. The hours of a start are those from its first event to its last: the time since its last save is not in them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torchtitan_lite.checkpoint.schedule.failures import Past
from torchtitan_lite.log import logger

CLEAN_ENDS = ("finished", "preempted")
SIGNS_OF_LIFE = ("loaded", "save_started")
"""Events of a start that trains. Others may come after its end: a removal in the background."""


def past_starts(path: Path) -> Past:
    """Return the past of the run whose events are in `path`, without the start that reads them; none without a file."""
    try:
        with path.open("rb") as lines:
            return count_past(_events(lines))
    except FileNotFoundError:
        return Past()
    except OSError as error:
        logger.warning("Could not read %s: %s. The unclean ends of earlier starts are not counted", path, error)
        return Past()


def count_past(events: Iterable[Mapping[str, Any]]) -> Past:
    """Return the past that these events show, in their order; the start that they end in is under way."""
    seconds, last, unclean_ends = 0.0, 0.0, 0
    began: float | None = None
    for event in events:
        name, time = event["event"], float(event["time"])
        if name == "load_started" and began is not None:
            seconds, unclean_ends, began = seconds + max(0.0, last - began), unclean_ends + 1, None
        elif name in CLEAN_ENDS and began is not None:
            seconds, began = seconds + max(0.0, time - began), None
        elif name in SIGNS_OF_LIFE and began is None and event.get("step") != 0:  # Step 0: a seed checkpoint.
            began = time
        last = time
    return Past(seconds / 3600, unclean_ends)


def _events(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the events in `lines`; a torn line is none."""
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and _is_event(record):
            yield record


def _is_event(record: Mapping[str, Any]) -> bool:
    return isinstance(record.get("event"), str) and isinstance(record.get("time"), int | float)
