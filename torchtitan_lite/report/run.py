"""Everything that is known of a run, read from its dump folder. Nothing there is changed."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from torchtitan_lite.accounts import CLEAN_ENDS, FAILED, read_accounts
from torchtitan_lite.config.address import is_in_object_store
from torchtitan_lite.config.drift import Change
from torchtitan_lite.errors import CheckpointError, CheckpointNotFound, TorchtitanLiteError
from torchtitan_lite.event_lines import Recorded, parse_record
from torchtitan_lite.events import Uploaded
from torchtitan_lite.examining.inventory import USABLE, ListedCheckpoint, inventory
from torchtitan_lite.json_lines import object_in
from torchtitan_lite.log import logger
from torchtitan_lite.report.changes import configs_of, differences, without_secret_values
from torchtitan_lite.report.lines import Logged, read_logged, read_records
from torchtitan_lite.report.saved_steps import Save, ShardMap, read_shards, saves_of
from torchtitan_lite.report.starts import CUT, UNKNOWN, ReportedStart, starts_of
from torchtitan_lite.store.holder import HolderSeen
from torchtitan_lite.store.place import Place
from torchtitan_lite.store.store import CheckpointStore

METRICS, EVENTS, CONFIG, CONFIGS = "metrics.jsonl", "events.jsonl", "config.json", "configs.jsonl"
RUNNING = "running"
_SILENT_SECONDS = 120.0
"""A job of another machine whose lock has not changed for so long does not count as running."""


@dataclass(frozen=True)
class Run:
    """One run, as its files show it at `read_at`."""

    folder: Path
    name: str
    logged: Logged
    starts: tuple[ReportedStart, ...]
    saves: tuple[Save, ...]
    parts: Mapping[str, float]
    """Seconds of the run by part, in the order of `LABELS`, without those that are zero."""
    shards: ShardMap | None
    config: Mapping[str, Any]
    """The last known one, by section.key."""
    changes: Mapping[int, list[Change]]
    """By the number of the start that made them, against the start before it whose configuration is known."""
    status: str
    """running, finished, preempted, failed, killed or unknown."""
    read_at: float
    uploaded: Recorded | None = None
    """The last upload into a second folder."""

    @property
    def goodput(self) -> float:
        """The share of training in all; NaN if nothing is known."""
        return self.parts.get("productive", 0.0) / sum(self.parts.values()) if self.parts else math.nan

    @property
    def last_step(self) -> int:
        """The last step that the run is known to have reached."""
        logged = self.logged.steps[-1] if len(self.logged) else 0
        return max([logged, *(start.last_step for start in self.starts[-1:])])

    @property
    def total_steps(self) -> int | None:
        """The steps that the configuration asks for."""
        steps = self.config.get("training.steps")
        return steps if isinstance(steps, int) else None

    @property
    def committed(self) -> list[Save]:
        """The saves that were committed and whose cost is known."""
        return [save for save in self.saves if save.seconds is not None]

    @property
    def best_rate(self) -> float:
        """The highest bandwidth of any save, in bytes a second; NaN without one."""
        return max((save.bytes_per_second for save in self.saves if save.bytes_per_second), default=math.nan)


def read_run(spelling: str, *, now: float | None = None) -> Run:
    """Return the run in the dump folder `spelling`. Raises CheckpointError if there is no run in it, and OSError."""
    folder, now = Path(spelling), time.time() if now is None else now
    if not folder.is_dir():
        finding = "it is not a folder" if os.path.lexists(folder) else "it does not exist"
        raise CheckpointNotFound(str(folder), None, finding=finding)
    config = _config(folder / CONFIG)
    checkpoints = SeenFolder.of(folder, str(config.get("checkpoint.folder") or "checkpoint"))
    entries = checkpoints.entries
    logged, parsed = read_logged(folder / METRICS), map(parse_record, read_records(folder / EVENTS))
    events = [recorded for recorded in parsed if recorded is not None]
    if not (len(logged) or events or config or entries):
        raise CheckpointError(
            f"{folder} is not the dump folder of a run: it has none of {METRICS}, {EVENTS}, {CONFIG} and checkpoints"
        )
    ledger = read_accounts(folder)
    starts = starts_of(events, ledger, logged.steps[-1] if len(logged) else 0)
    export_folder = config.get("checkpoint.export_folder")  # Of weights alone, in a folder of their own.
    exports = SeenFolder.of(folder, str(export_folder)) if export_folder else SeenFolder()
    are_seen = checkpoints.was_read and exports.was_read
    saves = saves_of(starts, [*entries, *exports.entries], are_seen=are_seen)
    known = configs_of(starts, read_records(folder / CONFIGS), config)
    seconds = ledger.seconds
    return Run(
        folder=folder,
        name=folder.absolute().name,
        logged=logged,
        starts=tuple(starts),
        saves=tuple(saves),
        parts={part: seconds[part] for part in LABELS if seconds[part] > 0},
        shards=_shards(checkpoints),
        config=config or (known[max(known)] if known else {}),
        changes={now: differences(known[before], known[now]) for before, now in pairwise(sorted(known))},
        status=_run_status(starts, checkpoints.lock, now),
        read_at=now,
        uploaded=next((each for each in reversed(events) if isinstance(each.event, Uploaded)), None),
    )


def _config(path: Path) -> dict[str, Any]:
    try:
        return without_secret_values(object_in(path.read_bytes()) or {})
    except FileNotFoundError:
        return {}


def _shards(checkpoints: SeenFolder) -> ShardMap | None:
    """Return the shard map of the latest full checkpoint, else of the latest one; None without any."""
    usable = [entry for entry in checkpoints.entries if entry.state in USABLE]
    full = [entry for entry in usable if entry.kind is not None and entry.kind.value == "full"]
    for entry in reversed(full or usable):
        if (found := read_shards(checkpoints.place_of(entry.name), entry.step or 0)) is not None:
            return found
    return None


def _run_status(starts: list[ReportedStart], lock: HolderSeen | None, now: float) -> str:
    """Return how the run is doing: as its last start ended, or if it did not say, as its `lock` shows it."""
    end = starts[-1].end if starts else UNKNOWN
    if end in (*CLEAN_ENDS, FAILED):
        return end
    if lock is None:
        return UNKNOWN if end == UNKNOWN else CUT
    if lock.holder is None:
        return UNKNOWN
    return CUT if lock.holder.has_ended() or now - lock.at > _SILENT_SECONDS else RUNNING


# A folder of checkpoints as a report shows it: on a disk, or in an object store.


@dataclass(frozen=True)
class SeenFolder:
    """What is in a folder of checkpoints; the default is nothing."""

    entries: tuple[ListedCheckpoint, ...] = ()
    lock: HolderSeen | None = None
    place_of: Callable[[str], Place] = Path
    """Returns the place of the entry with a name."""
    was_read: bool = True

    @classmethod
    def of(cls, dump_folder: Path, name: str) -> SeenFolder:
        """Return the folder called `name` in a configuration.

        A store that cannot be read is a warning: what the dump folder has is known without it.
        """
        if not is_in_object_store(name):
            root = dump_folder / name
            if not root.is_dir():
                return cls()
            return cls(tuple(inventory(root)), CheckpointStore(root).seen_holder(), root.joinpath)
        try:
            # Its client is an extra, and takes its time.
            from torchtitan_lite.bucket.bucket_store import open_bucket
            from torchtitan_lite.examining.stored_inventory import stored_inventory

            store = open_bucket(name)
            _, entries = stored_inventory(store)
            return cls(tuple(entries), store.seen_holder(), store.place_of)
        except (OSError, TorchtitanLiteError) as error:
            logger.warning("The checkpoints in %s are left out: %s", name, error)
            return cls(was_read=False)


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
"""Each part of the ledger that the page shows, and its name there."""


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
