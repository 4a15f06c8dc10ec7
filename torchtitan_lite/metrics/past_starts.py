"""How the earlier starts of a run ended, counted from events.jsonl: for runs that have no ledger yet.

A start that finished or left for a signal says so in its events; one that was killed, or ended with an error, does
not. Such a start counts once a later start loads a checkpoint: a start that died before its first checkpoint leaves no
sign. The hours of a start are those from its first event to its last: the time since its last save is not in them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from torchtitan_lite.checkpoint.schedule.failures import Past
from torchtitan_lite.event_lines import Recorded, parse_record
from torchtitan_lite.events import CleanEnd, Loaded, LoadStarted, SaveStarted
from torchtitan_lite.log import logger


def past_starts(path: Path) -> Past:
    """Return the past of the run whose events are in `path`, without the start that reads them; none without a file."""
    try:
        with path.open("rb") as lines:
            return count_past(_recorded(lines))
    except FileNotFoundError:
        return Past()
    except OSError as error:
        logger.warning("Could not read %s: %s. The unclean ends of earlier starts are not counted", path, error)
        return Past()


def count_past(events: Iterable[Recorded]) -> Past:
    """Return the past that these events show, in their order; the start that they end in is under way."""
    seconds, last, unclean_ends = 0.0, 0.0, 0
    began: float | None = None
    for time, event in events:
        match event:
            case LoadStarted() if began is not None:
                seconds, unclean_ends, began = seconds + max(0.0, last - began), unclean_ends + 1, None
            case CleanEnd() if began is not None:
                seconds, began = seconds + max(0.0, time - began), None
            # A start that trains. Other events may come after its end: a removal in the background.
            case Loaded() | SaveStarted() if began is None and event.step != 0:  # Step 0: a seed checkpoint.
                began = time
        last = time
    return Past(seconds / 3600, unclean_ends)


def _recorded(lines: Iterable[bytes]) -> Iterator[Recorded]:
    """Yield the events in `lines`; a torn line is none."""
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and (recorded := parse_record(record)) is not None:
            yield recorded
